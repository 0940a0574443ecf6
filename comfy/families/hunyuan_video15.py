"""HunyuanVideo 1.5 (text and picture to video) and its super-resolution, conditioned on Qwen 2.5 VL
7B, on ByT5 for texts to be written, and on what an image encoder saw.
"""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy import conds, latent_formats
from comfy.families.family import ClipTarget, StateDict
from comfy.families.hunyuan_image import at_size_of, has_byt5, with_noise
from comfy.families.hunyuan_video import HunyuanVideo, HunyuanVideoI2VModel
from comfy.families.text_sizes import llm_dtype
from comfy.text_encoders.hunyuan_image import HunyuanVideo15Tokenizer, hunyuan_image_clip


class HunyuanVideo15Model(HunyuanVideoI2VModel):
    """Text, texts to be written, a picture and what was seen in it."""

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """States of ByT5 and of the image encoder, too."""
        made = super().extra_conds(**kwargs)
        written = kwargs.get("conditioning_byt5small")
        if written is not None:
            made["txt_byt5"] = conds.CONDRegular(written)
        seen = kwargs.get("clip_vision_output")
        if seen is not None:
            made["clip_fea"] = conds.CONDRegular(seen.last_hidden_state)
        return made


class HunyuanVideo15SRModel(HunyuanVideo15Model):
    """The small video beside the noise, and the picture it began with."""

    def concat_cond(self, **kwargs: Any) -> Tensor:
        """[B, 66, T, H, W]: a picture, where it is, the small video, where it is."""
        noise: Tensor = kwargs["noise"]
        given = kwargs.get("concat_latent_image")
        if given is None:
            return noise.new_zeros(noise.shape[0], 2 * noise.shape[1] + 2, *noise.shape[2:])
        given = at_size_of(given, noise)
        return with_noise(given, kwargs.get("noise_augmentation", 0.0), kwargs.get("seed"))


class HunyuanVideo15(HunyuanVideo):
    """HunyuanVideo 1.5."""

    latent_format: Any = latent_formats.HunyuanVideo15
    memory_usage_factor = 4.0
    supported_inference_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    base_model = HunyuanVideo15Model

    @classmethod
    def matches(
        cls, unet_config: Mapping[str, Any], state_dict: Mapping[str, Tensor] | None = None
    ) -> bool:
        """A network that takes what an image encoder saw."""
        sees = unet_config.get("vision_in_dim") is not None
        return super().matches(unet_config, state_dict) and sees

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """Qwen 2.5 VL 7B, and ByT5 where the file holds it."""
        return ClipTarget(
            HunyuanVideo15Tokenizer, hunyuan_image_clip(has_byt5(state_dict), llm_dtype(state_dict))
        )


class HunyuanVideo15_SR_Distilled(HunyuanVideo15):
    """HunyuanVideo 1.5, super-resolution."""

    sampling_settings = {"shift": 2.0}
    base_model = HunyuanVideo15SRModel

    @classmethod
    def matches(
        cls, unet_config: Mapping[str, Any], state_dict: Mapping[str, Tensor] | None = None
    ) -> bool:
        """A network with two latents, each with a mask, beside the one it makes."""
        takes_two = unet_config.get("in_channels") == 3 * (unet_config.get("out_channels") or 0) + 2
        return super().matches(unet_config, state_dict) and takes_two
