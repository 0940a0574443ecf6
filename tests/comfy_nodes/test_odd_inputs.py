"""Whatever a node is given, its error names the input, what is expected and what was found.

Every node of the groups below runs through validation and executor with values of another rank,
another number of channels, without cells, not a number, of another type, and with odd constants.
A message of torch or of Python alone is a fault.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import folder_paths
import nodes
from comfy import hooks, loading
from comfy.clip_vision import Output
from comfy.devices.report import free_after_oom
from comfy.ldm.flux.redux import ReduxImageEncoder
from comfy.ldm.gligen.model import GatedSelfAttentionDense, Gligen, PositionNet
from comfy.patching.patcher import ModelPatcher
from comfy.sampling import guidance, samplers
from comfy.style_model import StyleModel
from comfy_execution.executor import PromptExecutor
from comfy_execution.options import ExecutorOptions
from comfy_execution.registry import NodeRegistry
from comfy_execution.spec import NodeSpec
from comfy_execution.validation import validate_prompt
from tests.support import tiny_checkpoint

GROUPS = ("mask", "latent", "image", "conditioning", "sampling", "advanced", "_for_testing")
# They read or write files, or take a second each; loaders and merges have tests of their own.
LEFT_OUT = re.compile("Save|Load|AsLora|Merge|Extract|Webcam")
NAN = math.nan
rand = torch.rand


def entry(*shape: int, **options: Any) -> Any:
    return [[rand(shape), options]]


def samples(*shape: int, **others: Any) -> dict[str, Any]:
    return {"samples": rand(shape), **others}


def described(*shape: int | None) -> Output:
    """What an image encoder saw, with states of another shape."""
    made = Output()
    made.last_hidden_state = None if shape == (None,) else rand(shape)  # type: ignore[arg-type]
    return made


def sound(*shape: int, rate: Any = 44100) -> dict[str, Any]:
    return {"waveform": rand(shape), "sample_rate": rate}


ODD: dict[str, list[Any]] = {
    "IMAGE": [
        rand(64, 64), rand(64, 64, 3), rand(1, 2, 64, 64, 3), rand(1, 64, 64, 2),
        rand(1, 3, 64, 64), rand(1, 64, 64, 5), rand(0, 64, 64, 3), rand(1, 0, 64, 3),
        rand(1, 64, 64, 0), rand(3),
        rand(1, 1, 1, 3), rand(1, 64, 64, 4), torch.full((1, 64, 64, 3), NAN), rand(3, 40, 72, 3),
        torch.zeros(1, 64, 64, 3, dtype=torch.uint8), rand(1, 64, 64, 3).half(), None, "ünï",
    ],
    "MASK": [
        torch.tensor(1.0), rand(64), rand(64, 64), rand(1, 1, 64, 64), rand(1, 64, 64, 3),
        rand(0, 64, 64), rand(1, 0, 64), rand(1, 64, 0), rand(1, 1, 1), rand(3, 40, 72),
        torch.full((1, 64, 64), NAN), torch.ones(1, 64, 64, dtype=torch.bool), None, "ünï",
    ],
    "LATENT": [
        samples(4), samples(8, 8), samples(4, 8, 8), samples(1, 4, 2, 8, 8),
        samples(1, 1, 4, 2, 8, 8), samples(1, 0, 8, 8), samples(1, 16, 8, 8), samples(0, 4, 8, 8),
        samples(1, 4, 0, 8),
        samples(1, 4, 1, 1), samples(3, 4, 5, 9), {"samples": torch.full((1, 4, 8, 8), NAN)}, {},
        {"samples": None}, None, rand(1, 4, 8, 8), samples(1, 64, 8), "ünï",
        samples(1, 4, 8, 8, noise_mask=rand(8)), samples(1, 4, 8, 8, noise_mask=rand(0, 8, 8)),
        samples(2, 4, 8, 8, noise_mask=rand(3, 64, 64)), samples(2, 4, 8, 8, batch_index=3),
        samples(2, 4, 8, 8, batch_index="x"),
    ],
    "CONDITIONING": [
        [], [[None, {}]], entry(77, 32), entry(1, 1, 77, 32), entry(1, 0, 32), entry(1, 77, 48),
        entry(3, 77, 32), entry(1, 77, 32, pooled_output=rand(1, 7)),
        entry(1, 77, 32, pooled_output=rand(7)), entry(1, 77, 32, gligen="x"),
        entry(1, 77, 32, gligen=("position", None, [])), entry(1, 77, 32, control="x"),
        entry(1, 77, 32, hooks="x"), entry(1, 77, 32, attention_mask=rand(1, 9, 9)),
        entry(1, 77, 32, attention_mask="x"),
        entry(1, 77, 32, control=SimpleNamespace(get_control=None, previous_controlnet="x")),
        entry(1, 77, 32, mask=rand(8)),
        entry(1, 77, 32, mask=rand(1, 0, 8)), entry(1, 77, 32, area=(2, 2, 100, 100)), None,
        (*entry(1, 77, 32),), "ünï",
    ],
    "SIGMAS": [
        rand(0), torch.tensor(1.0), rand(2, 3), torch.tensor([1.0, 2.0]), torch.tensor([NAN, 0.0]),
        torch.tensor([math.inf, 0.0]), torch.tensor([10, 1, 0]), [10.0, 0.0], None,
    ],
    "AUDIO": [{}, sound(100), sound(1, 2, 0), sound(0, 2, 9), sound(1, 2, 9, rate=0), None],
    "TIMESTEPS_RANGE": [(0.7, 0.2), (), (0.1,), None],
    "FLOATS": [[], [NAN], 0.5, "ünï", None],
    "CLIP_VISION_OUTPUT": [{}, None, Output(), described(None), described(5, 32), described(32)],
    "STYLE_MODEL": [{}, None, "ünï", StyleModel(ReduxImageEncoder(32, 48))],
    "GLIGEN": [{}, None, "ünï"],
    "HOOKS": [None, "ünï"],
    "HOOK_KEYFRAMES": [None, "ünï"],
    "TRACKS": [{}, {"track_path": rand(5), "track_visibility": rand(5)}, None],
    "WAN_CAMERA_EMBEDDING": [rand(3, 3), None],
    "MODEL": [None, "ünï"],
    "VAE": [None, rand(3)],
    "CLIP": [None, {}],
}  # fmt: skip
ODD_CONSTANTS: dict[str, list[Any]] = {
    "INT": [-1, 0, 3, 10**30],
    "FLOAT": [-1.0, 0.0, NAN, 1e308],
    "STRING": ["", "ünïcödé 漢字 \U0001f600", "\x00", "(((:", "embedding:"],
}
DEFAULTS: dict[str, Any] = {"INT": 1, "FLOAT": 1.0, "BOOLEAN": False, "STRING": "a"}
SHARE = 4  # of the odd values one input of a node is given; 1 for all of them
LARGEST = 64  # of the sizes that nodes begin with
MOST_NUMBERS = 3 * 64 * 96  # of a picture that is really encoded


class SomeNoise:
    seed = 1

    def generate_noise(self, latent: Any) -> torch.Tensor:
        return torch.randn_like(latent["samples"])


class QuickVAE:
    """An autoencoder that does not look at large pictures."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def __getattr__(self, name: str) -> Any:
        return getattr(self.vae, name)

    def encode(self, pixels: Any) -> Any:
        if math.prod(pixels.shape) <= MOST_NUMBERS:
            return self.vae.encode(pixels)
        return torch.zeros(pixels.shape[0], 4, pixels.shape[1] // 8, pixels.shape[2] // 8)


def seen() -> Output:
    made = Output()
    for name in ("last_hidden_state", "penultimate_hidden_states"):
        made[name] = rand(1, 5, 32)
    made["image_embeds"], made["mm_projected"] = rand(1, 32), None
    return made


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A value of each type that nodes work with."""
    folder = tmp_path_factory.mktemp("odd")
    model, clip, vae, *_ = loading.load_checkpoint_guess_config(
        str(tiny_checkpoint.write(folder / "tiny.safetensors"))
    )
    text = entry(1, 77, 32, pooled_output=rand(1, 32))
    guider = guidance.CFGGuider(model)
    guider.set_conds(text, text)
    before = folder_paths.get_temp_directory()
    folder_paths.set_temp_directory(str(folder))
    logging.disable(logging.ERROR)
    yield {
        "IMAGE": rand(1, 64, 64, 3), "MASK": rand(1, 64, 64), "LATENT": samples(1, 4, 8, 8),
        "CONDITIONING": text, "MODEL": model, "CLIP": clip, "VAE": QuickVAE(vae), "GUIDER": guider,
        "SIGMAS": torch.tensor([10.0, 1.0, 0.0]), "SAMPLER": samplers.ksampler("euler"),
        "GLIGEN": gligen_network(), "STYLE_MODEL": StyleModel(ReduxImageEncoder(32, 32)),
        "NOISE": SomeNoise(), "HOOKS": hooks.HookGroup(), "AUDIO": sound(1, 2, 441),
        "HOOK_KEYFRAMES": hooks.HookKeyframeGroup(), "CLIP_VISION_OUTPUT": seen(),
        "TIMESTEPS_RANGE": (0.0, 0.5), "LATENT_OPERATION": lambda latent, **_: latent * 2,
        "FLOATS": [0.1, 0.2], "WAN_CAMERA_EMBEDDING": rand(1, 24, 2, 64, 64),
        "TRACKS": {"track_path": rand(5, 2, 2), "track_visibility": torch.ones(5, 2).bool()},
    }  # fmt: skip
    logging.disable(logging.NOTSET)
    folder_paths.set_temp_directory(before)


def gligen_network() -> ModelPatcher:
    """A GLIGEN network for the small model."""
    layers = [GatedSelfAttentionDense(32, 32, 1, 32) for _ in range(4)]
    network = Gligen(layers, PositionNet(32, 32), 32)
    return ModelPatcher(network, torch.device("cpu"), torch.device("cpu"))


class Keep:
    """Makes a node worth running."""

    RETURN_TYPES, FUNCTION, OUTPUT_NODE, CATEGORY = (), "run", True, "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("*",)}}

    def run(self, value: Any) -> dict[str, Any]:
        return {}


def giver(kind: str, given: dict[str, Any]) -> type:
    """A node class that returns, as of this type, what is written down under a name."""

    def run(_: Any, name: str) -> tuple[Any]:
        return (given[name],)

    return type("Give", (), {
        "RETURN_TYPES": (kind,), "FUNCTION": "run", "CATEGORY": "test", "run": run,
        "IS_CHANGED": classmethod(lambda cls, name: NAN),
        "INPUT_TYPES": classmethod(lambda cls: {"required": {"name": ("STRING", {})}}),
    })  # fmt: skip


class Bench:
    """Runs one node at a time, with values of its own on its links."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.classes = {**nodes.NODE_CLASS_MAPPINGS, "Keep": Keep}
        self.registry = NodeRegistry(self.classes)
        options = ExecutorOptions(run_context=torch.inference_mode, oom_hook=free_after_oom)
        self.executor = PromptExecutor(self.registry, options=options)

    async def run(self, name: str, constants: dict[str, Any], links: dict[str, Any]) -> str | None:
        """The fault in what was said of a failure; None if there was none, or it was refused.

        Args:
            links: Input -> (its type, value).
        """
        inputs = dict(constants)
        prompt: dict[str, Any] = {"n": {"class_type": name, "inputs": inputs}}
        for key, (kind, value) in links.items():
            self.classes.setdefault(f"Give {kind}", giver(kind, self.given))
            self.given[key] = value
            prompt[f"s {key}"] = {"class_type": f"Give {kind}", "inputs": {"name": key}}
            inputs[key] = [f"s {key}", 0]
        spec = self.registry.get(name)
        assert spec is not None
        for slot in range(0 if spec.is_output else spec.slot_count()):
            prompt[f"k{slot}"] = {"class_type": "Keep", "inputs": {"value": ["n", slot]}}
        checked = await validate_prompt("p", prompt, None, self.registry)
        if not checked.valid:
            return None
        await self.executor.execute_async(prompt, "p", {}, checked.outputs)
        if self.executor.success:
            return None
        return said_badly(self.executor.status_messages[-1][1])


def said_badly(error: dict[str, Any]) -> str | None:
    """A message neither of which names an input nor was raised by the node itself."""
    message, frames = error["exception_message"], error["traceback"]
    if re.match(r"[\w., ]+: expected", message):
        return None
    last = frames[-1].splitlines() if frames else [""]
    if "site-packages" not in last[0] and any(row.strip().startswith("raise") for row in last):
        return None
    return f"{error['exception_type']}: {message.strip()[:150]} ({last[0].strip()})"


def single_inputs(spec: NodeSpec) -> Iterator[tuple[str, Any, str, Any]]:
    """Name, type, section and options of each input; of a growing list of them, the least."""
    for name, (kind, section, options) in spec.declared.items():
        template = options.get("template", {})
        if "prefix" not in template:
            yield name, kind, section, options
            continue
        ((one, more),) = template["input"]["required"].values()
        for number in range(template["min"]):
            yield f"{name}.{template['prefix']}{number}", one, section, more


def usual(spec: NodeSpec, good: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Constants and links the node works with; None if it needs what there is none of."""
    constants: dict[str, Any] = {}
    links: dict[str, Any] = {}
    for name, kind, section, options in single_inputs(spec):
        choices = options.get("options") if kind == "COMBO" else kind
        if isinstance(choices, (list, tuple)):
            if not choices:
                return None
            constants[name] = options.get("default", choices[0])
        elif kind in DEFAULTS:
            value = options.get("default", DEFAULTS[kind])
            is_large = kind == "INT" and LARGEST < value <= nodes.MAX_RESOLUTION
            constants[name] = max(LARGEST, options.get("min", 0)) if is_large else value
            if name == "steps":
                constants[name] = 2
        elif found := next((part for part in str(kind).split(",") if part in good), None):
            links[name] = (found, good[found])
        elif section == "required":
            return None
    return constants, links


def variants(
    spec: NodeSpec, constants: dict[str, Any], links: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """What is odd, constants, links: one input at a time, each with a share of the odd values.

    The share moves on from input to input, so that every value meets many nodes.
    """
    turn = sum(map(ord, spec.class_type))
    types = {name: kind for name, kind, *_ in single_inputs(spec)}
    for place, (name, (kind, _)) in enumerate(links.items(), turn):
        for number in range(place % SHARE, len(ODD.get(kind, ())), SHARE):
            odd = (kind, ODD[kind][number])
            yield f"{name}={kind} {number}", constants, {**links, name: odd}
    for place, name in enumerate(constants, turn):
        for value in ODD_CONSTANTS.get(str(types[name]), ())[place % SHARE :: SHARE]:
            yield f"{name}={value!r}", {**constants, name: value}, links


@pytest.mark.parametrize("group", GROUPS)
def test_errors_are_said_in_words_about_the_input(
    group: str, good: dict[str, Any], spec_folder: Path
) -> None:
    assert asyncio.run(nodes.init_builtin_extra_nodes()) == []
    recorded = json.loads((spec_folder / "object_info.json").read_text(encoding="utf-8"))
    bench, faults, count = Bench(), [], 0

    async def sweep() -> None:
        nonlocal count
        for name, info in recorded.items():
            spec = bench.registry.get(name)
            if info["category"].split("/")[0] != group or LEFT_OUT.search(name) or spec is None:
                continue
            made = usual(spec, good)
            for odd, constants, links in variants(spec, *made) if made is not None else ():
                count += 1
                fault = await bench.run(name, constants, links)
                if fault is not None:
                    faults.append(f"{name} {odd}: {fault}")

    with torch.inference_mode():
        asyncio.run(sweep())
    assert count > 20
    assert not faults, "\n".join(faults)
