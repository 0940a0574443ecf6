"""Blank latents of every family have the shape its network takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_extras import (
    nodes_ace,
    nodes_chroma_radiance,
    nodes_cosmos,
    nodes_hunyuan,
    nodes_hunyuan3d,
    nodes_lt,
    nodes_mochi,
    nodes_qwen,
    nodes_sd3,
    nodes_stable_cascade,
)
from comfy_extras.audio import latents as audio_latents

SHAPES: dict[str, tuple[Any, tuple[Any, ...], tuple[int, ...]]] = {
    "sd3": (nodes_sd3.EmptySD3LatentImage, (64, 48, 2), (2, 16, 6, 8)),
    "mochi": (nodes_mochi.EmptyMochiLatentVideo, (64, 48, 13, 1), (1, 12, 3, 6, 8)),
    "stable audio": (audio_latents.EmptyLatentAudio, (47.6, 2), (2, 64, 1024)),
    "hunyuan video": (nodes_hunyuan.EmptyHunyuanLatentVideo, (64, 32, 9, 1), (1, 16, 3, 4, 8)),
    "hunyuan 1.5": (nodes_hunyuan.EmptyHunyuanVideo15Latent, (64, 32, 9, 1), (1, 32, 3, 2, 4)),
    "hunyuan image": (nodes_hunyuan.EmptyHunyuanImageLatent, (64, 96, 2), (2, 64, 3, 2)),
    "hunyuan 3d": (nodes_hunyuan3d.EmptyLatentHunyuan3Dv2, (7, 2), (2, 64, 7)),
    "cosmos": (nodes_cosmos.EmptyCosmosLatentVideo, (64, 32, 17, 1), (1, 16, 3, 4, 8)),
    "ltxv": (nodes_lt.EmptyLTXVLatentVideo, (64, 96, 17, 1), (1, 128, 3, 3, 2)),
    "qwen layers": (nodes_qwen.EmptyQwenImageLayeredLatentImage, (32, 16, 3, 2), (2, 16, 4, 2, 4)),
    "ace": (nodes_ace.EmptyAceStepLatentAudio, (10.0, 1), (1, 8, 16, 107)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_blank_latent_has_the_shape_of_its_family(name: str) -> None:
    node, arguments, shape = SHAPES[name]
    samples = node.execute(*arguments)[0]["samples"]
    assert tuple(samples.shape) == shape
    assert not samples.any()


def test_chroma_radiance_works_on_pixels() -> None:
    node = nodes_chroma_radiance.EmptyChromaRadianceLatentImage
    assert node.execute(width=64, height=32, batch_size=2)[0]["samples"].shape == (2, 3, 32, 64)


def test_cascade_has_a_latent_for_each_stage() -> None:
    made = nodes_stable_cascade.StableCascade_EmptyLatentImage.execute(1024, 512, 42, 2)
    assert made[0]["samples"].shape == (2, 16, 12, 24)
    assert made[1]["samples"].shape == (2, 4, 128, 256)


class FakeVAE:
    """Every eighth pixel, as a latent of four channels."""

    downscale_ratio = 8

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        latent = pixels[:, ::8, ::8].movedim(-1, 1)
        return torch.cat([latent, latent[:, :1]], dim=1)


def test_a_picture_becomes_the_latent_of_stage_c() -> None:
    picture = torch.rand(1, 100, 210, 3)
    c, b = nodes_stable_cascade.StableCascade_StageC_VAEEncode.execute(picture, FakeVAE(), 42)
    # 210 x 100 pixels are 5 x 2 cells of 42, encoded from 8 pixels a cell.
    assert c["samples"].shape[-2:] == (2, 5)
    assert b["samples"].shape == (1, 4, 24, 52)


def test_stage_b_is_told_the_result_of_stage_c() -> None:
    prior = torch.rand(1, 16, 2, 2)
    conditioning = [[torch.zeros(1, 2, 3), {}]]
    node = nodes_stable_cascade.StableCascade_StageB_Conditioning
    made = node.execute(conditioning, {"samples": prior})[0]
    assert made[0][1]["stable_cascade_prior"] is prior
    assert conditioning[0][1] == {}
