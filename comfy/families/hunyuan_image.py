"""HunyuanImage 2.1 and its refiner, conditioned on Qwen 2.5 VL 7B and, for texts to be written, on
ByT5.
"""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy import conds, latent_formats, resize
from comfy.families.base import BaseModel
from comfy.families.family import ClipTarget, StateDict
from comfy.families.hunyuan_video import HunyuanVideo, HunyuanVideoModel
from comfy.families.text_sizes import llm_dtype
from comfy.text_encoders.hunyuan_image import HunyuanImageTokenizer, hunyuan_image_clip

KEPT_OF_GIVEN = 0.75  # of a latent to refine, that the refiner was trained with
SEED_STEP = -10  # from a run's seed to that of the noise on a given latent


def with_noise(latent: Tensor, amount: float, seed: int | None) -> Tensor:
    """A given latent as refiners want it: weaker, and with noise of its own.

    Args:
        amount: How strong the noise is, 0..1.
        seed: That of the run.
    """
    if amount <= 0:
        return KEPT_OF_GIVEN * latent
    generator = torch.Generator().manual_seed((seed or 0) + SEED_STEP)
    noise = torch.randn(latent.shape, generator=generator, dtype=latent.dtype).to(latent.device)
    return amount * noise + min(1.0 - amount, KEPT_OF_GIVEN) * latent


def at_size_of(latent: Tensor, noise: Tensor) -> Tensor:
    """A given latent at the rows, columns and batch of the noise."""
    size = (noise.shape[-1], noise.shape[-2])
    latent = resize.common_upscale(latent.to(noise), *size, "bilinear", "center")
    return resize.resize_to_batch_size(latent, noise.shape[0])


class HunyuanImage21Model(HunyuanVideoModel):
    """Text, texts to be written, guidance strength."""

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """States of ByT5, too."""
        made = super().extra_conds(**kwargs)
        written = kwargs.get("conditioning_byt5small")
        if written is not None:
            made["txt_byt5"] = conds.CONDRegular(written)
        return made

    def scale_latent_inpaint(
        self, sigma: Tensor, noise: Tensor, latent_image: Tensor, **kwargs: Any
    ) -> Tensor:
        """Known regions are noised, as in other models of pictures."""
        return BaseModel.scale_latent_inpaint(self, sigma, noise, latent_image, **kwargs)


class HunyuanImage21RefinerModel(HunyuanVideoModel):
    """The latent to refine beside the noise."""

    def concat_cond(self, **kwargs: Any) -> Tensor:
        """[B, 64, T, H, W]; zeros where no latent is given."""
        noise: Tensor = kwargs["noise"]
        image = kwargs.get("concat_latent_image")
        if image is None:
            return torch.zeros_like(noise)
        image = at_size_of(self.process_latent_in(image), noise)
        return with_noise(image, kwargs.get("noise_augmentation", 0.0), kwargs.get("seed"))

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """The time a step goes to is not told."""
        made = super().extra_conds(**kwargs)
        made["disable_time_r"] = conds.CONDConstant(True)
        return made


class HunyuanImage21(HunyuanVideo):
    """HunyuanImage 2.1."""

    unet_config: dict[str, Any] = {**HunyuanVideo.unet_config, "vec_in_dim": None}
    sampling_settings = {"shift": 5.0}
    latent_format: Any = latent_formats.HunyuanImage21
    memory_usage_factor = 8.7
    base_model = HunyuanImage21Model

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """Qwen 2.5 VL 7B, and ByT5 where the file holds it."""
        return ClipTarget(
            HunyuanImageTokenizer, hunyuan_image_clip(has_byt5(state_dict), llm_dtype(state_dict))
        )


class HunyuanImage21Refiner(HunyuanVideo):
    """HunyuanImage 2.1, refiner."""

    unet_config: dict[str, Any] = {**HunyuanImage21.unet_config, "patch_size": [1, 1, 1]}
    sampling_settings = {"shift": 4.0}
    latent_format = latent_formats.HunyuanImage21Refiner
    base_model = HunyuanImage21RefinerModel


def has_byt5(state_dict: Mapping[str, Any] | None) -> bool:
    """Whether a file holds ByT5 beside the language model; without a file it is wanted."""
    return state_dict is None or any("byt5_small." in key for key in state_dict)
