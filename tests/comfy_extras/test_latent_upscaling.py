"""Latents of videos enlarged by networks from files, against the formulas in float64."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

import folder_paths
from comfy import latent_upscaling, resize
from comfy.weights.errors import WeightFileError
from comfy_extras.nodes_hunyuan import (
    HunyuanVideo15LatentUpscaleWithModel,
    LatentUpscaleModelLoader,
)
from comfy_extras.nodes_lt_upsampler import LTXVLatentUpsampler
from tests.support.accelerator import simulated_accelerator

Weights = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
CHANNELS, WIDTH, BLOCKS = 8, 32, 2


def random_weights(shapes: Shapes, seed: int = 0) -> Weights:
    """Convolutions with biases; one-dimensional and `gamma` weights scatter around 1."""
    generator = torch.Generator().manual_seed(seed)
    made: Weights = {}
    for name, shape in shapes.items():
        spread = torch.randn(shape, generator=generator)
        if name.endswith("gamma"):
            made[name] = 1 + spread * 0.1
            continue
        fan = spread[0].numel() if len(shape) > 1 else 1
        made[f"{name}.weight"] = spread / fan**0.5 if len(shape) > 1 else 1 + spread * 0.1
        made[f"{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.1
    return made


def ltx_weights(kind: str, axes: int = 3, number: int = 2) -> Weights:
    kernel = (3,) * axes
    shapes: Shapes = {}
    shapes["initial_conv"] = (WIDTH, CHANNELS, *kernel)
    shapes["initial_norm"] = (WIDTH,)
    for stage in ("res_blocks", "post_upsample_res_blocks"):
        for block in range(BLOCKS):
            for part in "12":
                shapes[f"{stage}.{block}.conv{part}"] = (WIDTH, WIDTH, *kernel)
                shapes[f"{stage}.{block}.norm{part}"] = (WIDTH,)
    upsamplers: dict[str, Shapes] = {
        "space": {"upsampler.0": (4 * WIDTH, WIDTH, 3, 3)},
        "time": {"upsampler.0": (2 * WIDTH, WIDTH, 3, 3, 3)},
        "both": {"upsampler.0": (8 * WIDTH, WIDTH, 3, 3, 3)},
        "fraction": {"upsampler.conv": (number**2 * WIDTH, WIDTH, 3, 3)},
    }
    shapes |= upsamplers[kind]
    shapes["final_conv"] = (CHANNELS, WIDTH, *kernel)
    made = random_weights(shapes)
    if kind == "fraction":
        line = torch.tensor([1.0, 4, 6, 4, 1]) / 16
        made["upsampler.blur_down.kernel"] = torch.outer(line, line)[None, None]
    return made


class LTXReference:
    """The network in float64."""

    def __init__(self, sd: Weights) -> None:
        self.sd = {key: value.double() for key, value in sd.items()}

    def conv(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.sd[f"{name}.weight"], self.sd[f"{name}.bias"]
        if weight.ndim == 5:
            return F.conv3d(x, weight, bias, padding=1)
        frames = [F.conv2d(x[:, :, n], weight, bias, padding=1) for n in range(x.shape[2])]
        return torch.stack(frames, dim=2)

    def norm(self, name: str, x: Tensor, axes: int) -> Tensor:
        """Of 32 groups; over all frames, or each alone."""
        over = tuple(range(2, x.ndim)) if axes == 3 else (3, 4)
        assert x.shape[1] == 32  # a group is a channel
        centred = x - x.mean(over, keepdim=True)
        unit = centred / (centred.square().mean(over, keepdim=True) + 1e-5).sqrt()
        scale, shift = (self.sd[f"{name}.{part}"].view(-1, 1, 1, 1) for part in ("weight", "bias"))
        return unit * scale + shift

    def blocks(self, stage: str, x: Tensor, axes: int) -> Tensor:
        for number in range(BLOCKS):
            name = f"{stage}.{number}"
            h = F.silu(self.norm(f"{name}.norm1", self.conv(f"{name}.conv1", x), axes))
            x = F.silu(self.norm(f"{name}.norm2", self.conv(f"{name}.conv2", h), axes) + x)
        return x

    def shuffled(self, x: Tensor, time: int, side: int) -> Tensor:
        batch, channels, frames, rows, columns = x.shape
        out = channels // (time * side * side)
        made = x.new_empty(batch, out, frames * time, rows * side, columns * side)
        for number in range(channels):
            place, column = divmod(number % (time * side * side), side)
            frame, row = divmod(place, side)
            target = made[:, number // (time * side * side)]
            target[:, frame::time, row::side, column::side] = x[:, number]
        return made

    def blurred(self, x: Tensor, step: int) -> Tensor:
        kernel = self.sd["upsampler.blur_down.kernel"][0, 0]
        padded = F.pad(x, (2, 2, 2, 2))
        rows, columns = x.shape[-2:]
        total = torch.zeros_like(x)
        for row in range(5):
            for column in range(5):
                seen = padded[..., row : row + rows, column : column + columns]
                total += kernel[row, column] * seen
        return total[..., ::step, ::step]

    def run(self, latent: Tensor, kind: str, axes: int, fraction: tuple[int, int]) -> Tensor:
        x = self.conv("initial_conv", latent.double())
        x = self.blocks("res_blocks", F.silu(self.norm("initial_norm", x, axes)), axes)
        if kind == "fraction":
            x = self.shuffled(self.conv("upsampler.conv", x), 1, fraction[0])
            x = self.blurred(x, fraction[1]) if fraction[1] > 1 else x
        else:
            sides = {"space": (1, 2), "time": (2, 1), "both": (2, 2)}[kind]
            x = self.shuffled(self.conv("upsampler.0", x), *sides)
            x = x[:, :, 1:] if sides[0] == 2 else x
        return self.conv("final_conv", self.blocks("post_upsample_res_blocks", x, axes))


def saved(sd: Weights, folder: Path, header: dict[str, Any] | None = None) -> str:
    path = folder / "upscaler.safetensors"
    metadata = None if header is None else {"config": json.dumps(header)}
    save_file(sd, path, metadata=metadata)
    return str(path)


def noise(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("kind", "axes", "fraction", "shape"),
    [
        ("space", 3, (2, 1), (3, 12, 10)),
        ("space", 2, (2, 1), (3, 12, 10)),
        ("time", 3, (1, 1), (5, 6, 5)),
        ("both", 3, (2, 1), (5, 12, 10)),
        ("fraction", 3, (2, 1), (3, 12, 10)),
        ("fraction", 3, (3, 2), (3, 9, 8)),
        ("fraction", 2, (3, 4), (3, 5, 4)),
    ],
)
def test_ltx_networks_of_every_kind_are_told_by_their_weights(
    kind: str, axes: int, fraction: tuple[int, int], shape: tuple[int, ...], tmp_path: Path
) -> None:
    sd = ltx_weights(kind, axes, fraction[0])
    header = {"spatial_scale": fraction[0] / fraction[1]} if fraction[1] > 1 else None
    model = latent_upscaling.load(saved(sd, tmp_path, header))
    latent = noise(2, CHANNELS, 3, 6, 5)
    made = model.resample_latent(latent)
    wanted = LTXReference(sd).run(latent, kind, axes, fraction)
    assert made.shape == (2, CHANNELS, *shape)
    torch.testing.assert_close(made.double(), wanted, atol=1e-3, rtol=1e-3)


class Statistics(torch.nn.Module):
    """Mean and deviation of each channel, as the autoencoder of LTX video knows them."""

    def un_normalize(self, x: Tensor) -> Tensor:
        return x * 2 + 1

    def normalize(self, x: Tensor) -> Tensor:
        return (x - 1) / 2


def test_the_ltx_node_enlarges_what_is_not_normalised(tmp_path: Path) -> None:
    model = latent_upscaling.load(saved(ltx_weights("space"), tmp_path))
    vae = SimpleNamespace(first_stage_model=SimpleNamespace(per_channel_statistics=Statistics()))
    latent = noise(1, CHANNELS, 3, 6, 5)
    given = {"samples": latent, "noise_mask": torch.ones(1, 1, 3, 6, 5), "batch_index": [4]}
    made = LTXVLatentUpsampler().upsample_latent(given, model, vae)[0]
    assert set(made) == {"samples", "batch_index"}
    assert "noise_mask" in given
    torch.testing.assert_close(made["samples"], (model.resample_latent(latent * 2 + 1) - 1) / 2)


def test_the_ltx_node_refuses_what_is_of_something_else(tmp_path: Path) -> None:
    model = latent_upscaling.load(saved(ltx_weights("space"), tmp_path))
    vae = SimpleNamespace(first_stage_model=SimpleNamespace(per_channel_statistics=Statistics()))
    node = LTXVLatentUpsampler()
    other = SimpleNamespace(first_stage_model=torch.nn.Identity())
    with pytest.raises(ValueError, match=r"vae: expected the autoencoder of LTX video, found"):
        node.upsample_latent({"samples": noise(1, CHANNELS, 3, 6, 5)}, model, other)
    with pytest.raises(ValueError, match=r"with 8 channels, as LTX video has.*\[1, 4, 3, 6, 5\]"):
        node.upsample_latent({"samples": noise(1, 4, 3, 6, 5)}, model, vae)
    with pytest.raises(ValueError, match=r"samples: expected a latent of a video"):
        node.upsample_latent({"samples": noise(1, CHANNELS, 6, 5)}, model, vae)


def hunyuan_720p_weights() -> Weights:
    shapes: Shapes = {"in_conv.conv": (12, CHANNELS, 3, 3, 3)}
    shapes["out_conv.conv"] = (CHANNELS, 12, 3, 3, 3)
    for block in range(2):
        for layer in (0, 2, 4):
            shapes[f"blocks.{block}.block.{layer}.conv"] = (12, 12, 3, 3, 3)
    return random_weights(shapes)


def hunyuan_1080p_weights(shortcut: str = "nin_shortcut") -> Weights:
    shapes: Shapes = {"conv_in.conv": (16, CHANNELS, 3, 3, 3)}
    for stage, (given, out) in enumerate(((16, 16), (16, 24))):
        for block in range(3):
            name, width = f"up.{stage}.block.{block}", out if block else given
            shapes[f"{name}.norm1.gamma"] = (width, 1, 1, 1)
            shapes[f"{name}.conv1.conv"] = (out, width, 3, 3, 3)
            shapes[f"{name}.norm2.gamma"] = (out, 1, 1, 1)
            shapes[f"{name}.conv2.conv"] = (out, out, 3, 3, 3)
            if width != out:
                shapes[f"{name}.{shortcut}"] = (out, width, 1, 1, 1)
    shapes["norm_out.gamma"] = (24, 1, 1, 1)
    shapes["conv_out.conv"] = (CHANNELS, 24, 3, 3, 3)
    return random_weights(shapes)


class HunyuanReference:
    """Both networks in float64."""

    def __init__(self, sd: Weights) -> None:
        self.sd = {key: value.double() for key, value in sd.items()}

    def conv(self, name: str, x: Tensor) -> Tensor:
        """Each place sees this frame and the two before, and the places around it; beyond the
        border is what is at the border."""
        frames, rows, columns = x.shape[2:]
        weight = self.sd[f"{name}.conv.weight"]
        total = self.sd[f"{name}.conv.bias"].view(-1, 1, 1, 1).expand(-1, frames, rows, columns)
        for t in range(3):
            for r in range(3):
                for c in range(3):
                    seen = x[:, :, (torch.arange(frames) + t - 2).clamp(min=0)]
                    seen = seen[:, :, :, (torch.arange(rows) + r - 1).clamp(0, rows - 1)]
                    seen = seen[..., (torch.arange(columns) + c - 1).clamp(0, columns - 1)]
                    total = total + torch.einsum("oi,bithw->bothw", weight[:, :, t, r, c], seen)
        return total

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / x.square().mean(1, keepdim=True).sqrt() * self.sd[f"{name}.gamma"]

    def smaller(self, x: Tensor) -> Tensor:
        x = self.conv("in_conv", x)
        for block in range(2):
            h = x
            for layer in (0, 2, 4):
                h = self.conv(f"blocks.{block}.block.{layer}", F.silu(h) if layer else h)
            x = x + h
        return self.conv("out_conv", x)

    def larger(self, latent: Tensor) -> Tensor:
        x = self.conv("conv_in", latent)
        x = x + latent[:, torch.arange(16) // (16 // CHANNELS)]
        for stage in range(2):
            for block in range(3):
                name = f"up.{stage}.block.{block}"
                h = self.conv(f"{name}.conv1", F.silu(self.norm(f"{name}.norm1", x)))
                h = self.conv(f"{name}.conv2", F.silu(self.norm(f"{name}.norm2", h)))
                weight = self.sd.get(f"{name}.nin_shortcut.weight")
                if weight is not None:
                    x = torch.einsum("oi,bithw->bothw", weight[:, :, 0, 0, 0], x)
                    x = x + self.sd[f"{name}.nin_shortcut.bias"].view(-1, 1, 1, 1)
                x = x + h
        return self.conv("conv_out", F.silu(self.norm("norm_out", x)))


def test_hunyuan_networks_are_told_by_their_weights(tmp_path: Path) -> None:
    latent = noise(2, CHANNELS, 3, 5, 4)
    for sd, name in ((hunyuan_720p_weights(), "smaller"), (hunyuan_1080p_weights(), "larger")):
        made = latent_upscaling.load(saved(sd, tmp_path)).resample_latent(latent)
        wanted = getattr(HunyuanReference(sd), name)(latent.double())
        torch.testing.assert_close(made.double(), wanted, atol=1e-4, rtol=1e-4)
    wrapped = latent_upscaling.load(saved(hunyuan_1080p_weights("nin_shortcut.conv"), tmp_path))
    assert torch.equal(wrapped.resample_latent(latent), made)


@pytest.mark.parametrize(
    "weights", [ltx_weights("space"), hunyuan_720p_weights(), hunyuan_1080p_weights()]
)
def test_a_device_gives_what_the_processor_gives(weights: Weights, tmp_path: Path) -> None:
    latent = noise(1, CHANNELS, 3, 6, 5)
    path = saved(weights, tmp_path)
    here = latent_upscaling.load(path).resample_latent(latent)
    with simulated_accelerator() as device:
        model = latent_upscaling.load(path)
        there = model.resample_latent(latent)
        assert there.device.type == device.NAME
        assert model.patcher.loaded_size() == model.patcher.model_size()
        torch.testing.assert_close(there.cpu(), here, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("sides", "cells"),
    [((128, 96), (6, 8)), ((0, 96), (6, 4)), ((96, 0), (7, 6)), ((16, 16), (4, 4))],
)
def test_the_hunyuan_node_interpolates_and_refines(
    sides: tuple[int, int],
    cells: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = dict(folder_paths.folder_names_and_paths)
    places["latent_upscale_models"] = ([str(tmp_path)], {".safetensors"})
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", places)
    saved(hunyuan_720p_weights(), tmp_path)
    model = LatentUpscaleModelLoader.execute("upscaler.safetensors")[0]
    latent = noise(1, CHANNELS, 3, 5, 4)
    upscale = HunyuanVideo15LatentUpscaleWithModel.execute
    made = upscale(model, {"samples": latent}, "bilinear", *sides, "disabled")[0]
    larger = resize.common_upscale(latent, cells[1], cells[0], "bilinear", "disabled")
    assert set(made) == {"samples"}
    assert made["samples"].shape == (1, CHANNELS, 3, *cells)
    assert torch.equal(made["samples"], model.resample_latent(larger))
    same = {"samples": latent}
    assert upscale(model, same, "bilinear", 0, 0, "disabled")[0] is same


def without(sd: Weights, key: str) -> Weights:
    return {name: value for name, value in sd.items() if name != key}


@pytest.mark.parametrize(
    ("sd", "header", "words"),
    [
        ({"a.lora_up.weight": torch.zeros(1)}, None, "no known latent upscaler.*a LoRA"),
        (without(ltx_weights("space"), "initial_conv.weight"), None, "lacks 'initial_conv.weight"),
        (without(ltx_weights("space"), "final_conv.bias"), None, "lacks .*final_conv.bias"),
        (
            ltx_weights("fraction", number=3),
            None,
            "spatial_scale to be a fraction of 3",
        ),
        (ltx_weights("fraction", number=3), {"spatial_scale": 2}, "fraction of 3, found 2"),
        (
            {**ltx_weights("space"), "upsampler.0.weight": torch.zeros(WIDTH, WIDTH, 3, 3)},
            None,
            "expected a shuffle of 4",
        ),
        (
            {**hunyuan_1080p_weights(), "conv_in.conv.weight": torch.zeros(16, 5, 3, 3, 3)},
            None,
            "not a multiple of the latent's 5 channels",
        ),
        (without(hunyuan_720p_weights(), "out_conv.conv.weight"), None, "lacks 'out_conv"),
        (
            without(hunyuan_720p_weights(), "blocks.1.block.2.conv.bias"),
            None,
            "lacks .*blocks.1.block.2.conv.bias",
        ),
    ],
)
def test_other_files_are_refused_with_what_is_wanted(
    sd: Weights, header: dict[str, Any] | None, words: str, tmp_path: Path
) -> None:
    path = saved(sd, tmp_path, header)
    with pytest.raises(WeightFileError, match=rf"upscaler\.safetensors: .*{words}"):
        latent_upscaling.load(path)
