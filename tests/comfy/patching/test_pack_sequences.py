"""Prompts in a row through what custom nodes of the known kinds do, with little and much memory.

Each way is written as packs write it, on public names alone. A plain prompt and one with the
pack's view take turns, memory runs out in the middle of one of them, and every result equals that
of a device that holds everything. At the end weights, settings and memory are as they were.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch as mock_patch

import pytest
import torch
from torch import Tensor, nn

import comfy.controlnet
import comfy.hooks
import comfy.ldm.modules.attention
import comfy.lora
import comfy.model_management as mm
import comfy.model_patcher
import comfy.ops
import comfy.patcher_extension as extension
import comfy.sample
import comfy.sampler_helpers
import comfy.samplers
import comfy.sd
import comfy.utils
from comfy.model_patcher import ModelPatcher, ModelPatcherDynamic
from tests.comfy.patching.test_packs_sampling import NEGATIVE, POSITIVE, close
from tests.support import tiny_checkpoint
from tests.support.accelerator import assert_untouched, snapshot

MIDDLE = "diffusion_model.middle_block.1.transformer_blocks.0."
FIRST = "diffusion_model.input_blocks.0.0.weight"
LITTLE = 500_000  # bytes; the model has about 600,000
KINDS = [ModelPatcher, ModelPatcherDynamic]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("sequences") / "tiny.safetensors")


@pytest.fixture
def model(checkpoint: Path, accelerator: Any) -> Any:
    return comfy.sd.load_checkpoint_guess_config(
        str(checkpoint), output_vae=False, output_clip=False
    )[0]


def random(*shape: int, seed: int = 0, scale: float = 0.2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def sample(view: Any, options: dict[str, Any] | None = None, steps: int = 2) -> Tensor:
    latent = torch.zeros(2, 4, 8, 8)
    noise = comfy.sample.prepare_noise(latent, 3, None)
    positive = [[POSITIVE, dict(options or {})]]
    return comfy.sample.sample(
        view, noise, steps, 4.0, "euler", "normal", positive, [[NEGATIVE, dict(options or {})]],
        latent, disable_pbar=True, seed=3,
    )  # fmt: skip


# -- image tokens in cross-attention, with an encoder beside ----------------------------------


class ImageEncoder(nn.Module):
    """A small encoder that a pack loads through a patcher of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            comfy.ops.disable_weight_init.Linear(48, 48, bias=False) for _ in range(4)
        )
        for number, layer in enumerate(self.layers):
            layer.weight = nn.Parameter(random(48, 48, seed=number), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Attn2Replace:
    """Adds attention to picture tokens; further pictures join the ones that are there."""

    def __init__(self, **kwargs: Any) -> None:
        self.parts = [kwargs]

    def add(self, **kwargs: Any) -> None:
        self.parts.append(kwargs)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Any]) -> Tensor:
        attention = comfy.ldm.modules.attention.optimized_attention
        out = attention(q, k, v, extra["n_heads"])
        sigma = extra["sigmas"].detach().cpu()[0].item()
        groups = len(extra["cond_or_uncond"])
        for part in self.parts:
            if not part["start"] >= sigma >= part["end"]:
                continue
            sides = [part["cond"] if side == 0 else part["uncond"] for side in
                     extra["cond_or_uncond"]]  # fmt: skip
            tokens = torch.cat([side.repeat(q.shape[0] // groups, 1, 1) for side in sides])
            own_k, own_v = (tokens.to(w) @ w.T for w in (part["to_k"], part["to_v"]))
            out = out + part["weight"] * attention(q, own_k.to(q), own_v.to(q), extra["n_heads"])
        return out


def image_tokens(view: Any) -> Any:
    encoder = ModelPatcher(
        ImageEncoder(), mm.text_encoder_device(), mm.text_encoder_offload_device()
    )
    sampling = view.get_model_object("model_sampling")
    for number in range(2):  # a chain of two such nodes
        mm.load_models_gpu([encoder])
        picture = random(1, 4, 48, seed=number, scale=1.0)
        tokens = encoder.model(picture.to(encoder.load_device)).to(mm.intermediate_device())
        device, dtype = mm.get_torch_device(), torch.float32
        part = {
            "weight": 0.5, "cond": tokens.to(device, dtype),
            "uncond": torch.zeros_like(tokens).to(device, dtype),
            "to_k": random(32, 48, seed=7).to(device, dtype),
            "to_v": random(32, 48, seed=8).to(device, dtype),
            "start": sampling.percent_to_sigma(0.0), "end": sampling.percent_to_sigma(1.0),
        }  # fmt: skip
        view = view.clone()
        options = view.model_options["transformer_options"].copy()
        replace = options["patches_replace"] = dict(options.get("patches_replace", {}))
        table = replace["attn2"] = dict(replace.get("attn2", {}))
        for key in (("middle", 0), ("output", 0), ("input", 3, 0)):
            if key in table:
                table[key].add(**part)
            else:
                table[key] = Attn2Replace(**part)
                if len(key) == 2:
                    view.set_model_attn2_replace(table[key], *key)
        view.model_options["transformer_options"] = options
    return view


# -- motion modules put into the network, with a patcher of their own -------------------------


class Temporal(nn.Module):
    """A layer that mixes frames; `forward_timestep_embed` is told how to call it."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.mix = comfy.ops.manual_cast.Linear(width, width)
        self.mix.weight = nn.Parameter(random(width, width, seed=seed), requires_grad=False)
        self.mix.bias = nn.Parameter(random(width, seed=seed), requires_grad=False)
        self.scale = nn.Parameter(torch.full((1,), 0.3), requires_grad=False)

    def forward(self, x: Tensor, length: int) -> Tensor:
        frames = x.reshape(-1, length, *x.shape[1:])
        mean = frames.mean(dim=1, keepdim=True).movedim(2, -1)
        return x + self.scale.to(x) * self.mix(mean).movedim(-1, 2).expand_as(frames).reshape_as(x)


class MotionNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Temporal(16, 1), Temporal(32, 2)])
        self.up = nn.ModuleList([Temporal(32, 3)])

    def places(self, unet: nn.Module) -> list[tuple[Any, Temporal]]:
        return [(unet.input_blocks[1], self.down[0]), (unet.input_blocks[3], self.down[1]),
                (unet.output_blocks[0], self.up[0])]  # fmt: skip

    def inject(self, patcher: Any) -> None:
        for block, layer in self.places(patcher.model.diffusion_model):
            block.append(layer)

    def eject(self, patcher: Any) -> None:
        for block, layer in self.places(patcher.model.diffusion_model):
            for number in reversed(range(len(block))):
                if block[number] is layer:
                    block.pop(number)


class MotionPatcher(ModelPatcher):
    """The patcher of the motion modules."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.effect = 1.0
        self.running: Any = None

    def clone(self, hooks_only: bool = False) -> MotionPatcher:
        n = super().clone()
        n.effect = self.effect
        return n

    def load(
        self, device_to: Any = None, lowvram_model_memory: int = -1, *args: Any, **kwargs: Any
    ) -> None:
        super().load(device_to, lowvram_model_memory, *args, **kwargs)
        for layer in self.model.modules():
            if isinstance(layer, Temporal) and device_to is not None:
                comfy.utils.set_attr(layer, "scale", layer.scale.to(device_to))

    def pre_run(self, model: Any = None) -> None:
        super().pre_run()
        self.running = model

    def cleanup(self) -> None:
        self.running = None
        super().cleanup()


def run_motion(layer: Temporal, x: Tensor, emb: Tensor, context: Any, options: Any,
               *_: Any) -> Tensor:  # fmt: skip
    del emb, context
    return layer(x, x.shape[0] // len(options["cond_or_uncond"]))


def motion(view: Any) -> Any:
    network = MotionNetwork()
    patcher = MotionPatcher(network, view.load_device, view.offload_device)
    patcher.add_patches({"down.0.mix.weight": (random(16, 16, seed=5),)}, 0.5)
    view = view.clone()
    view.set_additional_models("motion", [patcher])
    view.set_injections("motion", [extension.PatcherInjection(network.inject, network.eject)])
    view.set_model_forward_timestep_embed_patch((Temporal, run_motion))
    view.add_object_patch("memory_required", lambda *args, **kwargs: 1000.0)

    def outer(executor: Any, *args: Any, **kwargs: Any) -> Tensor:
        mine = executor.class_obj.model_patcher
        (own,) = mine.get_additional_models_with_key("motion")
        own.pre_run(mine)
        norm = comfy.ops.disable_weight_init.GroupNorm
        original = norm.forward_comfy_cast_weights
        norm.forward_comfy_cast_weights = lambda self, x: original(self, x)
        try:
            return executor(*args, **kwargs)
        finally:
            norm.forward_comfy_cast_weights = original
            own.cleanup()

    def windows(executor: Any, model: Any, conds: Any, x: Tensor, t: Tensor, options: Any) -> Any:
        whole = executor(model, conds, x, t, options)
        parts = [executor(model, conds, x[n : n + 1], t[n : n + 1], options) for n in range(2)]
        return [0.5 * a + 0.5 * torch.cat(b) for a, b in zip(whole, zip(*parts))]

    view.add_wrapper_with_key(extension.WrappersMP.OUTER_SAMPLE, "motion", outer)
    view.add_wrapper_with_key(extension.WrappersMP.CALC_COND_BATCH, "motion", windows)
    return view.clone()  # as a later node gets it


# -- weights of another size, concatenated inputs ---------------------------------------------


def more_channels(view: Any) -> Any:
    """Padded differences give the first convolution more inputs, which a wrapper fills."""
    view = view.clone()
    wide = random(16, 8, 3, 3, seed=2)
    patches = {FIRST: ("diff", (wide, {"pad_weight": True}))}
    patches[(MIDDLE + "attn1.to_q.weight", (0, 0, 16))] = ("diff", (random(16, 32, seed=3),))
    assert set(view.add_patches(patches, 1.0)) == set(patches)
    beside = random(1, 4, 8, 8, seed=4)

    def wrapper(apply_model: Callable[..., Tensor], args: dict[str, Any]) -> Tensor:
        x, c = args["input"], dict(args["c"])
        c["c_concat"] = beside.to(x).repeat(x.shape[0], 1, 1, 1)
        return apply_model(x, args["timestep"], **c)

    view.set_model_unet_function_wrapper(wrapper)
    return view


# -- another model as a change of this one ----------------------------------------------------


def other_model(view: Any) -> Any:
    """A view of a changed copy, merged half and half."""
    other = view.clone(force_deepcopy=True)
    other.add_patches({MIDDLE + "attn1.to_k.weight": (random(32, 32, seed=6),)})
    merged = view.clone()
    for key, change in other.get_key_patches("diffusion_model.").items():
        merged.add_patches({key: change}, 0.5, 0.5)
    return merged


# -- wrappers of samplers and guiders ---------------------------------------------------------


class TwiceGuider(comfy.samplers.CFGGuider):
    """Half of each of two guidance scales."""

    def predict_noise(
        self, x: Tensor, timestep: Tensor, model_options: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> Tensor:  # fmt: skip
        options = {} if model_options is None else model_options
        return sum(
            0.5 * comfy.samplers.sampling_function(
                self.inner_model, x, timestep, self.conds.get("negative"),
                self.conds.get("positive"), scale, model_options=options, seed=seed,
            )
            for scale in (1.0, 7.0)
        )  # fmt: skip


def sampler_wrapper(view: Any) -> Any:
    """A sampler object of a pack's own, called with guiders in a row, inside one wrapper."""
    view = view.clone()

    def outer(executor: Any, noise: Tensor, latent: Tensor, sampler: Any, sigmas: Tensor,
              *args: Any, **kwargs: Any) -> Tensor:  # fmt: skip
        if getattr(executor.class_obj, "inside", False):
            return executor(noise, latent, sampler, sigmas, *args, **kwargs)
        guider = TwiceGuider(executor.class_obj.model_patcher)
        guider.inside = True
        guider.set_conds([[POSITIVE, {}]], [[NEGATIVE, {}]])
        guider.set_cfg(3.0)
        first = guider.sample(noise, latent, sampler, sigmas[:2], disable_pbar=True, seed=1)
        rest = executor(torch.zeros_like(noise), first, sampler, sigmas[1:], *args, **kwargs)
        return 0.5 * first + 0.5 * rest

    view.add_wrapper_with_key(extension.WrappersMP.OUTER_SAMPLE, "pack", outer)
    view.set_model_sampler_cfg_function(
        lambda args: args["uncond"] + (args["cond"] - args["uncond"]) * args["cond_scale"] * 0.9
    )
    return view


def cached_blocks(view: Any) -> Any:
    """As packs that save steps: a block's forward is replaced for the time of each call."""
    view = view.clone()

    def wrapper(apply_model: Callable[..., Tensor], args: dict[str, Any]) -> Tensor:
        block = view.model.diffusion_model.middle_block[1]
        plain = block.forward

        def forward(x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
            return 0.9 * plain(x, *rest, **kwargs)

        with mock_patch.multiple(block, forward=forward):
            return apply_model(args["input"], args["timestep"], **args["c"])

    view.set_model_unet_function_wrapper(wrapper)
    return view


def model_in_the_middle(view: Any) -> Any:
    """As packs whose network runs inside a step: it is loaded as the step reaches it."""
    view = view.clone()
    beside = ModelPatcher(ImageEncoder(), view.load_device, view.offload_device)

    def wrapper(apply_model: Callable[..., Tensor], args: dict[str, Any]) -> Tensor:
        mm.load_models_gpu([beside])
        x = args["input"]
        seen = beside.model(random(1, 4, 48, seed=1).to(x.device)).mean()
        return apply_model(x, args["timestep"], **args["c"]) * (1 + seen)

    view.set_model_unet_function_wrapper(wrapper)
    return view


# -- packs that put their own methods in the place of the patcher's ---------------------------


class OwnPatching(ModelPatcher):
    """Patches and unpatches weights its own way, as patchers of quantised files do."""

    def patch_weight_to_device(
        self, key: str, device_to: Any = None, inplace_update: bool = False
    ) -> None:
        if key not in self.patches:
            return
        weight = comfy.utils.get_attr(self.model, key)
        if key not in self.backup:
            self.backup[key] = type("Saved", (), {"weight": weight, "inplace_update": False})()
        wide = mm.cast_to_device(weight, device_to or weight.device, torch.float32, copy=True)
        out = comfy.lora.calculate_weight(self.patches[key], wide, key)
        comfy.utils.set_attr_param(self.model, key, out.to(weight.dtype))

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
        if unpatch_weights:
            for key in list(self.backup):
                comfy.utils.set_attr_param(self.model, key, self.backup[key].weight)
            self.backup.clear()
        return super().unpatch_model(device_to, unpatch_weights)

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        source, self.__class__ = self.__class__, OwnPatching
        try:
            n = super().clone(*args, **kwargs)
        finally:
            self.__class__ = source
        n.__class__ = OwnPatching
        return n


def own_patching(view: Any) -> Any:
    own = OwnPatching.clone(view)
    own.add_patches({MIDDLE + "attn1.to_q.weight": (random(32, 32, seed=9),),
                     MIDDLE + "norm1.bias": (random(32, seed=9),)})  # fmt: skip
    return own


def own_kind_of_patch(view: Any) -> Any:
    """A kind of patch that only the pack's arithmetic knows; see `their_methods`."""
    view = view.clone()
    view.add_patches({MIDDLE + "attn1.to_q.weight": ("packed", (random(32, 32, seed=11) * 100,))})
    return view


@contextlib.contextmanager
def their_methods() -> Iterator[None]:
    """Methods of the patcher replaced for all models, as some packs do when they are imported."""
    patcher = comfy.model_patcher.ModelPatcher
    names = ("patch_model", "load", "calculate_weight")
    originals = {name: getattr(patcher, name) for name in names}
    arithmetic = comfy.lora.calculate_weight

    def patch_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        return originals["patch_model"](self, *args, **kwargs)

    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        return originals["load"](self, *args, **kwargs)

    def known(patches: list[Any], weight: Tensor) -> list[Any]:
        rest = []
        for patch in patches:
            if isinstance(patch[1], tuple) and patch[1][0] == "packed":
                weight += patch[0] * patch[1][1][0].to(weight) / 100
            else:
                rest.append(patch)
        return rest

    def calculate_weight(self: Any, patches: Any, weight: Tensor, key: str, *args: Any) -> Tensor:
        rest = known(patches, weight)
        return originals["calculate_weight"](self, rest, weight, key, *args) if rest else weight

    def calculate(patches: Any, weight: Tensor, key: str, *args: Any, **kwargs: Any) -> Tensor:
        rest = known(patches, weight)
        return arithmetic(rest, weight, key, *args, **kwargs) if rest else weight

    patcher.patch_model, patcher.load = patch_model, load
    patcher.calculate_weight = calculate_weight
    comfy.lora.calculate_weight = calculate
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(patcher, name, function)
        comfy.lora.calculate_weight = arithmetic


PACKS = {
    pack.__name__: pack
    for pack in (image_tokens, motion, more_channels, other_model, sampler_wrapper, cached_blocks,
                 model_in_the_middle, own_patching, own_kind_of_patch)
}  # fmt: skip


def assert_as_before(model: Any, before: dict[str, Any]) -> None:
    mm.unload_all_models()
    gc.collect()
    assert torch.accelerator.memory_allocated(0) == 0
    assert_untouched(model.model, before)
    for name, module in model.model.named_modules():
        left = [k for k in ("stream_plan", "weight_function", "forward") if module.__dict__.get(k)]
        assert not left, (name, left)


@pytest.mark.parametrize("name", PACKS)
def test_prompts_in_a_row_equal_those_of_a_device_that_holds_everything(
    model: Any, accelerator: Any, name: str
) -> None:
    pack = PACKS[name]
    before = snapshot(model.model)
    with their_methods() if name == "own_kind_of_patch" else contextlib.nullcontext():
        first = ModelPatcher(model.model, model.load_device, model.offload_device)
        plain, changed = sample(first), sample(pack(first))
        assert not close(changed, plain)
        for kind in KINDS:
            for capacity in (1 << 30, LITTLE):
                mm.unload_all_models()
                gc.collect()
                accelerator.set_capacity(capacity)
                base = kind(model.model, model.load_device, model.offload_device)
                view = pack(base)
                for number in range(2 if capacity == LITTLE else 1):
                    assert close(sample(view), changed), (kind, capacity, number)
                    assert close(sample(base), plain), (kind, capacity, number)
                    accelerator.fail_allocation(20 + 70 * number, 1 + 60 * number)
                    with contextlib.suppress(mm.OOM_EXCEPTION):
                        assert close(sample(view), changed)
                    accelerator.fail_allocation(-1)
                assert close(sample(pack(base)), changed)
                del base, view
        del first
    assert_as_before(model, before)


class Wide(nn.Module):
    """A network larger than the model that it runs beside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            comfy.ops.disable_weight_init.Linear(128, 128, bias=False) for _ in range(10)
        )
        for number, layer in enumerate(self.layers):
            layer.weight = nn.Parameter(random(128, 128, seed=number), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("how", ["load", "load and restore", "free", "unload all"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_takes_the_memory_of_its_own_model_goes_on_with_it(
    model: Any, accelerator: Any, kind: type[ModelPatcher], how: str
) -> None:
    before = snapshot(model.model)
    device = model.load_device
    wide = ModelPatcher(Wide(), device, model.offload_device)
    calls: list[int] = []

    def make_view(kind: type[ModelPatcher]) -> Any:
        view = kind(model.model, device, model.offload_device).clone()
        view.add_patches({MIDDLE + "attn1.to_q.weight": (random(32, 32, seed=9),)})

        def wrapper(apply_model: Callable[..., Tensor], args: dict[str, Any]) -> Tensor:
            x, scale = args["input"], 1.0
            others = mm.loaded_models(only_currently_used=True)
            if how == "free":
                mm.free_memory(1e30, device)
            elif how == "unload all":
                mm.unload_all_models()
            else:
                mm.load_models_gpu([wide])
                scale += wide.model(random(1, 4, 128, seed=1).to(x.device)).mean()
            calls.append(view.loaded_size())
            if how == "load and restore":
                mm.load_models_gpu(others)
            return apply_model(x, args["timestep"], **args["c"]) * scale

        view.set_model_unet_function_wrapper(wrapper)
        return view

    want = sample(make_view(ModelPatcher))
    options = {"hooks": hooks_of(random(32, 32, seed=12))}
    hooked = sample(make_view(ModelPatcher), options)
    assert not close(hooked, want)
    for capacity, rounds in ((740_000, 1), (600_000, 2)):
        mm.unload_all_models()
        accelerator.set_capacity(capacity)
        calls.clear()
        view = make_view(kind)
        for _ in range(rounds):
            assert close(sample(view), want), capacity
            assert close(sample(view, options), hooked), capacity
        assert min(calls) < view.model_size() / 2, "the model was not asked for its memory"
    del view
    calls.clear()
    assert_as_before(model, before)


def hooks_of(change: Tensor) -> Any:
    """A hook that changes one weight."""
    group = comfy.hooks.create_hook_lora({}, 1.0, 0.0)
    group.hooks[0].weights = {MIDDLE + "attn1.to_k.weight": (change,)}
    group.hooks[0].need_weight_init = False
    return group
