"""Latent spaces against recorded constants and conversions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import latent_formats

CONSTANTS = (
    "scale_factor",
    "latent_channels",
    "latent_dimensions",
    "taesd_decoder_name",
    "latent_rgb_factors",
    "latent_rgb_factors_bias",
)


@pytest.fixture(scope="module")
def facts(golden_json: Callable[[str], Any]) -> dict[str, Any]:
    return golden_json("latent_formats.json")


@pytest.fixture(scope="module")
def recorded(golden_tensors: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    return golden_tensors("latent_formats.safetensors")


def test_constants_are_the_recorded_ones(facts: dict[str, Any]) -> None:
    for name, fact in facts.items():
        space = getattr(latent_formats, name)()
        assert {key: getattr(space, key) for key in CONSTANTS} == {
            key: fact[key] for key in CONSTANTS
        }, name
        assert (space.latent_rgb_factors_reshape is not None) == bool(
            fact["latent_rgb_factors_reshape"]
        )


def test_conversions_are_the_recorded_ones(
    facts: dict[str, Any], recorded: dict[str, Tensor]
) -> None:
    for name in facts:
        space = getattr(latent_formats, name)()
        inward = space.process_in(recorded[f"{name}/x"])
        torch.testing.assert_close(inward, recorded[f"{name}/process_in"], rtol=1e-6, atol=1e-6)
        outward = space.process_out(recorded[f"{name}/z"])
        torch.testing.assert_close(outward, recorded[f"{name}/process_out"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(space.process_out(inward), recorded[f"{name}/x"])


def test_preview_factors_give_the_recorded_pictures(
    facts: dict[str, Any], recorded: dict[str, Tensor]
) -> None:
    compared = 0
    for name in facts:
        if f"{name}/preview_rgb_u8" not in recorded:
            continue
        space, latent = getattr(latent_formats, name)(), recorded[f"{name}/z"]
        if space.latent_rgb_factors_reshape is not None:
            latent = space.latent_rgb_factors_reshape(latent)
        cells = (latent[0] if latent.ndim == 4 else latent[0, :, 0]).movedim(0, -1)
        bias = torch.tensor(space.latent_rgb_factors_bias or [0.0, 0.0, 0.0])
        picture = cells @ torch.tensor(space.latent_rgb_factors) + bias
        picture = ((picture + 1) / 2).clamp(0, 1).mul(255).to(torch.uint8)
        difference = picture.int() - recorded[f"{name}/preview_rgb_u8"].int()
        assert int(difference.abs().max()) <= 1, name
        compared += 1
    assert compared == 18


def test_a_latent_keeps_its_dtype_and_device() -> None:
    half = torch.ones(1, 16, 2, 3, 3, dtype=torch.float16)
    assert latent_formats.Wan21().process_in(half).dtype == torch.float16
