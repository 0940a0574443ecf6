"""Masked, scaled, batched and nested runs against recorded ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import latent_formats
from comfy.nested_tensor import NestedTensor
from comfy.sampling import masks, noise, run
from tests.comfy.sampling.support import (
    NEGATIVE,
    POSITIVE,
    TestModel,
    conditioning,
    patcher,
)

EXACT = {"rtol": 0, "atol": 2e-5}  # float32 rounding of the largest levels


@pytest.fixture(scope="module")
def recorded(golden_tensors: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    return golden_tensors("noise_and_masks.safetensors")


def tolerance(sampler: str, kind: str) -> float:
    """3 to 4 times the largest difference found. UniPC keeps its levels in single precision, where
    those next to clean ones have few digits left: on flow levels, the last step shows it."""
    if sampler == "uni_pc":
        return 2e-4 if kind.startswith(("sd3", "flux")) else 2.5e-5
    return 1.5e-5


def threshold_by_time(strength: float) -> Callable[..., Tensor]:
    """Differential diffusion: a cell is released once the run has come down to its mask value."""

    def mask_at(sigma: Tensor, mask: Tensor, extra_options: dict[str, Any]) -> Tensor:
        sampling = extra_options["model"].inner_model.model_sampling
        levels = extra_options["sigmas"]
        end = sampling.timestep(torch.maximum(levels[-1], sampling.sigma_min))
        start, now = sampling.timestep(levels[0]), sampling.timestep(sigma[0])
        binary = (mask >= (now - end) / (start - end)).to(mask.dtype)
        return strength * binary + (1 - strength) * mask

    return mask_at


def test_masked_runs_repeat_the_recorded_ones(
    closed_form: Callable[..., Any],
    recorded: dict[str, Tensor],
    golden_json: Callable[[str], Any],
) -> None:
    inputs = {"box": "mask_in/box_1_64_64", "ramp": "mask_in/ramp_x_1_64_64"}
    latent = recorded["input/latent_image_seed7"]
    compared = 0
    for key, case in golden_json("noise_and_masks_meta.json").items():
        group, *rest = key.split("/")
        if group not in ("inpaint", "diffdiff"):
            continue
        model = closed_form(rest[0])
        if group == "diffdiff":
            model.set_model_denoise_mask_function(threshold_by_time(case["strength"]))
        seen: list[Tensor] = []
        made = run.sample(
            model, noise.prepare_noise(latent, 42), case["steps"], 3.0, case["sampler"], rest[1],
            conditioning(POSITIVE), conditioning(NEGATIVE), latent, denoise=case["denoise"],
            noise_mask=recorded[inputs[case["mask"]]], disable_pbar=True, seed=42,
            callback=lambda i, x0, x, total, seen=seen: seen.append(x0[0].clone()),
        )  # fmt: skip
        within = {"rtol": 0, "atol": tolerance(case["sampler"], rest[0])}
        torch.testing.assert_close(made, recorded[f"{key}/final"], msg=key, **within)
        assert len(seen) == case["callbacks"], key
        if f"{key}/x0" in recorded:
            estimates = recorded[f"{key}/x0"]
            torch.testing.assert_close(torch.stack(seen), estimates, msg=key, **within)
        compared += 1
    assert compared > 80


def test_masks_are_resized_as_recorded(recorded: dict[str, Tensor]) -> None:
    compared = 0
    for key, expected in recorded.items():
        if not key.startswith("mask_out/") or "_1d_" in key:
            continue
        source, target = key.removeprefix("mask_out/").split("_to_")
        shape = [int(size) for size in target.split("_")]
        made = masks.reshape_mask(recorded[f"mask_in/{source}"], shape)
        assert list(made.shape) == shape
        # Only the first channel is recorded where all are equal.
        assert torch.equal(made[:, : expected.shape[1]], expected), key
        assert torch.equal(made, made[:, :1].expand_as(made))
        compared += 1
    assert compared == 6


@pytest.mark.parametrize("shape", [(1, 4), (1, 4, 1, 1, 8, 8)])
def test_a_latent_that_cannot_be_masked_is_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="3 to 5 axes"):
        masks.reshape_mask(torch.ones(8, 8), shape)


@pytest.mark.parametrize("start", ["latent7/d0.6", "zeros/d1.0"])
@pytest.mark.parametrize("name", ["eps_sd15", "flux"])
def test_the_latent_scale_is_applied_but_not_to_an_empty_latent(
    name: str, start: str, closed_form: Callable[..., Any], recorded: dict[str, Tensor]
) -> None:
    kind, space, scheduler = {
        "eps_sd15": ("eps_sd15", latent_formats.SD15(), "karras"),
        "flux": ("flux_shift1.15", latent_formats.Flux(), "simple"),
    }[name]
    space.latent_channels = 4  # the recorded runs scale a small latent
    latent = recorded["input/latent_image_seed7"]
    latent = torch.zeros_like(latent) if "zeros" in start else latent
    seen: list[Tensor] = []
    made = run.sample(
        closed_form(kind, latent_format=space), noise.prepare_noise(latent, 42), 6, 3.0, "euler",
        scheduler, conditioning(POSITIVE), conditioning(NEGATIVE), latent,
        denoise=float(start.split("/d")[1]), disable_pbar=True, seed=42,
        callback=lambda i, x0, x, total: seen.append(x0[0].clone()),
    )  # fmt: skip
    estimates = recorded[f"latent_scale/{name}/euler/{start}/x0"]
    torch.testing.assert_close(torch.stack(seen), estimates, rtol=0, atol=4e-6)
    expected = recorded[f"latent_scale/{name}/euler/{start}/final"]
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sampler", ["euler_ancestral", "dpmpp_2m_sde"])
def test_a_batch_repeats_its_recorded_run(
    sampler: str, closed_form: Callable[..., Any], recorded: dict[str, Tensor]
) -> None:
    latent = recorded["input/latent_b3_seed9"]
    made = run.sample(
        closed_form("eps_sd15"), noise.prepare_noise(latent, 42), 5, 3.0, sampler, "karras",
        conditioning(POSITIVE), conditioning(NEGATIVE), latent, denoise=0.8, disable_pbar=True,
        seed=42,
    )  # fmt: skip
    expected = recorded[f"batch3/eps_sd15/{sampler}/final"]
    torch.testing.assert_close(made, expected, **EXACT)


class QuarterModel(TestModel):
    """The estimate is a quarter of the input, whatever its shape."""

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        return {}

    def apply_model(self, x: Tensor, t: Tensor, **kwargs: Any) -> Tensor:
        return 0.25 * x


def test_nested_latents_are_sampled_together(recorded: dict[str, Tensor]) -> None:
    model = patcher(QuarterModel("FLOW", {"shift": 3.0}))
    latent = NestedTensor([recorded["nested/in0"], recorded["nested/in1"]])
    made = run.sample(
        model, noise.prepare_noise(latent, 42), 4, 1.0, "euler", "simple",
        conditioning(POSITIVE), conditioning(NEGATIVE), latent, denoise=0.7, disable_pbar=True,
        seed=42,
    )  # fmt: skip
    for part, name in zip(made.unbind(), ("nested/out0", "nested/out1")):
        torch.testing.assert_close(part, recorded[name], **EXACT)


def test_an_empty_latent_is_fitted_to_the_model() -> None:
    space = SimpleNamespace(latent_channels=16, latent_dimensions=3, spacial_downscale_ratio=16)
    model = SimpleNamespace(get_model_object=lambda name: space)
    made = run.fix_empty_latent_channels(model, torch.zeros(2, 4, 8, 12), 8)
    assert made.shape == (2, 16, 1, 4, 6)
    drawn = torch.ones(2, 16, 3, 8, 12)
    assert run.fix_empty_latent_channels(model, drawn) is drawn


def test_a_drawn_picture_is_the_only_moment_of_a_video() -> None:
    space = SimpleNamespace(latent_channels=16, latent_dimensions=3, spacial_downscale_ratio=16)
    model = SimpleNamespace(get_model_object=lambda name: space)
    drawn = torch.rand(2, 16, 8, 12)
    assert torch.equal(run.fix_empty_latent_channels(model, drawn), drawn[:, :, None])
