"""Where loaders put models: on the device that their node names, with the same picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import folder_paths
import nodes
from comfy import ops, progress
from comfy.control.networks import ControlNet
from comfy.devices import placement, residency
from comfy.devices.policies import MemoryPolicy
from comfy.devices.runtime import build_runtime, install_runtime
from comfy.ldm.unet import controlnet
from comfy_extras.nodes_hidream import QuadrupleCLIPLoader
from comfy_extras.nodes_sd3 import TripleCLIPLoader
from tests.support import tiny_checkpoint
from tests.support.accelerator import simulated_accelerator

PREFIXES = {"diffusion_models": "model.diffusion_model.", "vae": "first_stage_model.",
            "text_encoders": "cond_stage_model.transformer."}  # fmt: skip


@pytest.fixture
def accelerator() -> Iterator[Any]:
    """The simulated accelerator's controls, with it as the primary device."""
    with simulated_accelerator() as fakegpu:
        yield fakegpu


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tiny checkpoint, and its parts in files of their own."""
    root = tmp_path_factory.mktemp("placed")
    patch = pytest.MonkeyPatch()
    for name in ("checkpoints", "embeddings", *PREFIXES):
        (root / name).mkdir()
        entry = ([str(root / name)], folder_paths.supported_pt_extensions)
        patch.setitem(folder_paths.folder_names_and_paths, name, entry)
    patch.setattr(progress, "PROGRESS_BAR_ENABLED", False)
    tiny_checkpoint.write(root / "checkpoints" / "tiny.safetensors")
    tensors = tiny_checkpoint.weights()
    for folder, prefix in PREFIXES.items():
        alone = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
        save_file(alone, root / folder / "alone.safetensors", metadata=tiny_checkpoint.HEADER)
    yield root
    patch.undo()
    folder_paths.filename_list_cache.clear()


HALF = 0.05
"""Devices compute in half precision what the CPU computes in float32."""


def names(accelerator: Any) -> list[str]:
    return [f"{accelerator.NAME}:{index}" for index in range(2)]


def picture(model: Any, clip: Any, vae: Any) -> torch.Tensor:
    with torch.inference_mode():
        texts = [nodes.CLIPTextEncode().encode(clip, text)[0] for text in ("a red circle", "")]
        latent = nodes.EmptyLatentImage().generate(64, 64)[0]
        made = nodes.KSampler().sample(model, 1, 3, 4.0, "euler", "normal", *texts, latent)[0]
        return nodes.VAEDecode().decode(vae, made)[0]


def held() -> list[int]:
    return [torch.accelerator.memory_allocated(index) for index in range(2)]


@pytest.fixture
def plain(models: Path) -> torch.Tensor:
    """The picture that one device, the CPU, makes."""
    residency.unload_all_models()
    install_runtime(build_runtime(MemoryPolicy(cpu=True)))
    return picture(*nodes.CheckpointLoaderSimple().load_checkpoint("tiny.safetensors"))


@pytest.mark.parametrize("index", [0, 1])
def test_a_checkpoint_runs_on_the_device_its_node_names(
    plain: torch.Tensor, accelerator: Any, index: int
) -> None:
    accelerator.set_device_count(2)
    name = names(accelerator)[index]
    parts = nodes.CheckpointLoaderSimple().load_checkpoint("tiny.safetensors", device=name)
    got = picture(*parts)
    torch.testing.assert_close(got, plain, rtol=0, atol=HALF)
    default = nodes.CheckpointLoaderSimple().load_checkpoint("tiny.safetensors")
    residency.unload_all_models()
    assert torch.equal(got, picture(*default))
    residency.unload_all_models()
    assert torch.equal(got, picture(*parts))
    assert got.device.type == "cpu"
    assert held()[index] > 0
    assert held()[1 - index] == 0
    assert {row["device"] for row in residency.memory_report()} == {name}
    residency.unload_all_models()
    assert held() == [0, 0]


@pytest.mark.parametrize("places", list(itertools.permutations([0, 1, "cpu"])))
def test_each_part_runs_where_its_own_loader_says(
    plain: torch.Tensor, accelerator: Any, places: tuple[Any, ...]
) -> None:
    accelerator.set_device_count(2)
    model_at, clip_at, vae_at = (
        "cpu" if place == "cpu" else names(accelerator)[place] for place in places
    )
    (model,) = nodes.UNETLoader().load_unet("alone.safetensors", "default", device=model_at)
    (clip,) = nodes.CLIPLoader().load_clip("alone.safetensors", device=clip_at)
    (vae,) = nodes.VAELoader().load_vae("alone.safetensors", device=vae_at)
    assert [str(p.load_device) for p in (model, clip.patcher, vae.patcher)] == [
        model_at, clip_at, vae_at,
    ]  # fmt: skip
    torch.testing.assert_close(picture(model, clip, vae), plain, rtol=0, atol=HALF)
    residency.unload_all_models()
    assert held() == [0, 0]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_widget_names_accelerators_where_there_is_a_choice(
    models: Path, accelerator: Any, count: int
) -> None:
    accelerator.set_device_count(count)
    several = [f"{accelerator.NAME}:{index}" for index in range(count)] if count > 1 else []
    for node in (nodes.CLIPLoader, nodes.DualCLIPLoader):
        assert node.INPUT_TYPES()["optional"]["device"][0] == ["default", "cpu", *several]
    for node in (nodes.UNETLoader, nodes.VAELoader, nodes.CheckpointLoaderSimple):
        offered = node.INPUT_TYPES().get("optional", {})
        assert ("device" in offered) is (count > 1)
    for node in (TripleCLIPLoader, QuadrupleCLIPLoader):
        inputs = {entry.id: entry for entry in node.define_schema().inputs}
        assert ("device" in inputs) is (count > 1)
        if count > 1:
            assert inputs["device"].options == ["default", "cpu", *several]


@pytest.mark.parametrize("place", [1, "cpu"])
def test_a_control_network_runs_beside_the_model_it_controls(
    models: Path, accelerator: Any, place: Any
) -> None:
    accelerator.set_device_count(2)
    config = {k: v for k, v in tiny_checkpoint.UNET.items()
              if k not in ("out_channels", "transformer_depth_output")}  # fmt: skip
    network = controlnet.ControlNet(
        **config, hint_channels=3, dtype=torch.float32, operations=ops.manual_cast
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    control = ControlNet(network.eval(), load_device=torch.device(names(accelerator)[0]))
    pictures = []
    for name in ("default", "cpu" if place == "cpu" else names(accelerator)[place], "default"):
        model, clip, vae = nodes.CheckpointLoaderSimple().load_checkpoint("tiny.safetensors", name)
        with torch.inference_mode():
            text = nodes.CLIPTextEncode().encode(clip, "a circle")[0]
            hint = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(1))
            (text,) = nodes.ControlNetApply().apply_controlnet(text, control, hint, 0.8)
            latent = nodes.EmptyLatentImage().generate(64, 64)[0]
            made = nodes.KSampler().sample(model, 1, 2, 1.0, "euler", "normal", text, text, latent)
            pictures.append(nodes.VAEDecode().decode(vae, made[0])[0])
    assert torch.equal(pictures[0], pictures[2])
    torch.testing.assert_close(pictures[1], pictures[0], rtol=0, atol=HALF)
    residency.unload_all_models()
    assert held() == [0, 0]


def test_a_device_that_is_not_there_is_named_with_those_that_are(
    models: Path, accelerator: Any
) -> None:
    accelerator.set_device_count(2)
    with pytest.raises(ValueError, match=r"'cuda:9'.*default, cpu, fakegpu:0, fakegpu:1"):
        nodes.VAELoader().load_vae("alone.safetensors", device="cuda:9")


def test_a_model_too_large_for_its_device_streams_there(
    plain: torch.Tensor, accelerator: Any
) -> None:
    accelerator.set_device_count(2)
    name = names(accelerator)[1]
    (model,) = nodes.UNETLoader().load_unet("alone.safetensors", "default", device=name)
    _, clip, vae = nodes.CheckpointLoaderSimple().load_checkpoint("tiny.safetensors")
    accelerator.set_capacity(model.model_size(), 1)
    torch.testing.assert_close(picture(model, clip, vae), plain, rtol=0, atol=HALF)
    assert 0 < model.loaded_size() < model.model_size()
    assert placement.get_torch_device() == torch.device(names(accelerator)[0])
    assert torch.accelerator.current_device_index() == 0
