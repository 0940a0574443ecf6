"""The whole of a sampling run as nodes call it: latent and noise in, finished latent out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from comfy import resize
from comfy.devices import placement
from comfy.sampling import checks, samplers


def fix_empty_latent_channels(
    model: Any, latent_image: Any, downscale_ratio_spacial: int | None = None
) -> Any:
    """Fit an empty latent to the model's channels and cell size, and a picture's to the axes of a
    video, as its only moment; others pass unchanged.

    Args:
        model: A MODEL.
        latent_image: [B, C, ...]; zeros throughout mean "empty".
        downscale_ratio_spacial: Pixels to a cell that the empty latent was made for, if known.

    Raises:
        ValueError: It is no latent, or has no cells.
    """
    if getattr(latent_image, "is_nested", False):
        return latent_image
    checks.check_is_latent(latent_image)
    latent_format = model.get_model_object("latent_format")
    if torch.count_nonzero(latent_image) == 0:
        latent_image = _fit_empty(latent_image, latent_format, downscale_ratio_spacial)
    if latent_format.latent_dimensions == 3 and latent_image.ndim == 4:
        latent_image = latent_image.unsqueeze(2)
    return latent_image


def _fit_empty(latent_image: Tensor, latent_format: Any, downscale_ratio: int | None) -> Tensor:
    if latent_format.latent_channels != latent_image.shape[1]:
        latent_image = resize.repeat_to_batch_size(
            latent_image, latent_format.latent_channels, dim=1
        )
    wanted = getattr(latent_format, "spacial_downscale_ratio", None)
    if downscale_ratio is not None and wanted and wanted != downscale_ratio:
        ratio = downscale_ratio / wanted
        height, width = (round(size * ratio) for size in latent_image.shape[-2:])
        latent_image = resize.common_upscale(
            latent_image, width, height, "nearest-exact", crop="disabled"
        )
    return latent_image


def _finished(samples: Any) -> Any:
    return samples.to(device=placement.intermediate_device(), dtype=placement.intermediate_dtype())


def sample(
    model: Any,
    noise: Any,
    steps: int,
    cfg: float,
    sampler_name: str,
    scheduler: str,
    positive: Any,
    negative: Any,
    latent_image: Any,
    denoise: float = 1.0,
    disable_noise: bool = False,  # noqa: ARG001 - public signature; the noise says it
    start_step: int | None = None,
    last_step: int | None = None,
    force_full_denoise: bool = False,
    noise_mask: Any = None,
    sigmas: Tensor | None = None,
    callback: Callable[..., None] | None = None,
    disable_pbar: bool = False,
    seed: int | None = None,
) -> Any:
    """A KSampler run; the result lies on the intermediate device."""
    front = samplers.KSampler(
        model, steps=steps, device=model.load_device, sampler=sampler_name, scheduler=scheduler,
        denoise=denoise, model_options=model.model_options,
    )  # fmt: skip
    samples = front.sample(
        noise, positive, negative, cfg=cfg, latent_image=latent_image, start_step=start_step,
        last_step=last_step, force_full_denoise=force_full_denoise, denoise_mask=noise_mask,
        sigmas=sigmas, callback=callback, disable_pbar=disable_pbar, seed=seed,
    )  # fmt: skip
    return _finished(samples)


def sample_custom(
    model: Any,
    noise: Any,
    cfg: float,
    sampler: Any,
    sigmas: Tensor,
    positive: Any,
    negative: Any,
    latent_image: Any,
    noise_mask: Any = None,
    callback: Callable[..., None] | None = None,
    disable_pbar: bool = False,
    seed: int | None = None,
) -> Any:
    """A run with a sampler object and levels of one's own; the result as of `sample`."""
    samples = samplers.sample(
        model, noise, positive, negative, cfg, model.load_device, sampler, sigmas,
        model_options=model.model_options, latent_image=latent_image, denoise_mask=noise_mask,
        callback=callback, disable_pbar=disable_pbar, seed=seed,
    )  # fmt: skip
    return _finished(samples)
