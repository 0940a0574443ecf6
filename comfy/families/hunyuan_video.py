"""HunyuanVideo (text and picture to video) and SkyReels, conditioned on Llama 3 and CLIP ViT-L."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy import conds, latent_formats, resize
from comfy.families.dit_model import TransformerModel
from comfy.families.family import (
    ClipTarget,
    StateDict,
    TransformerFamily,
)
from comfy.families.hunyuan_layout import read_hunyuan_config, usual_key
from comfy.families.model_type import ModelType
from comfy.families.text_sizes import llm_dtype
from comfy.ldm.hunyuan_video.model import HunyuanVideo as Network
from comfy.text_encoders.hunyuan_video import HunyuanVideoTokenizer, hunyuan_video_clip

USUAL_GUIDANCE = 6.0


class HunyuanVideoModel(TransformerModel):
    """Text, guidance strength, a given first frame."""

    network = Network
    usual_type = ModelType.FLOW

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """The mask of the text, the strength, the time of the first frame, a picture, too."""
        made = super().extra_conds(**kwargs)
        mask = kwargs.get("attention_mask")
        if mask is not None and bool((mask == 0).any()):
            made["attention_mask"] = conds.CONDRegular(mask)
        guidance = kwargs.get("guidance", USUAL_GUIDANCE)
        if guidance is not None:
            made["guidance"] = conds.CONDRegular(torch.tensor([float(guidance)]))
        first = kwargs.get("guiding_frame_index")
        if first is not None:
            made["guiding_frame_index"] = conds.CONDRegular(torch.tensor([float(first)]))
        seen = kwargs.get("ref_latent")
        if seen is not None:
            made["ref_latent"] = conds.CONDRegular(self.process_latent_in(seen))
        return made

    def scale_latent_inpaint(
        self, sigma: Tensor, noise: Tensor, latent_image: Tensor, **kwargs: Any
    ) -> Tensor:
        """Given frames are never noised."""
        del sigma, noise, kwargs
        return latent_image

    def _given_frames(self, image: Tensor | None, noise: Tensor) -> Tensor:
        """A picture's latent at the size of the noise, zero in the frames it has not."""
        if image is None:
            return torch.zeros_like(noise)
        size = (noise.shape[-1], noise.shape[-2])
        image = resize.common_upscale(image.to(noise), *size, "bilinear", "center")
        image = self.process_latent_in(image)[:, :, : noise.shape[2]]
        missing = noise.shape[2] - image.shape[2]
        image = torch.nn.functional.pad(image, (0, 0, 0, 0, 0, missing))
        return resize.resize_to_batch_size(image, noise.shape[0])


class HunyuanVideoI2VModel(HunyuanVideoModel):
    """A picture beside the latent, and a mask where frames are known."""

    def concat_cond(self, **kwargs: Any) -> Tensor:
        """[B, 17, T, H, W]; the mask is given as 1 where frames are to be made."""
        noise: Tensor = kwargs["noise"]
        image = self._given_frames(kwargs.get("concat_latent_image"), noise)
        mask = kwargs.get("concat_mask", kwargs.get("denoise_mask"))
        if mask is None:
            known = torch.zeros_like(noise[:, :1])
        else:
            mask = mask.to(noise).mean(dim=1, keepdim=True)
            mask = resize.common_upscale(
                mask, noise.shape[-1], noise.shape[-2], "bilinear", "center"
            )
            known = 1.0 - mask[:, :, : noise.shape[2]]
            missing = noise.shape[2] - known.shape[2]
            known = torch.nn.functional.pad(known, (0, 0, 0, 0, 0, missing))
            known = resize.resize_to_batch_size(known, noise.shape[0])
        return torch.cat([image, known], dim=1)


class SkyreelsModel(HunyuanVideoModel):
    """A picture beside the latent."""

    def concat_cond(self, **kwargs: Any) -> Tensor:
        """[B, 16, T, H, W]."""
        return self._given_frames(kwargs.get("concat_latent_image"), kwargs["noise"])


class HunyuanVideo(TransformerFamily):
    """HunyuanVideo."""

    unet_config: dict[str, Any] = {"image_model": "hunyuan_video"}
    read_config = staticmethod(read_hunyuan_config)
    sampling_settings = {"shift": 7.0}
    latent_format: Any = latent_formats.HunyuanVideo
    memory_usage_factor = 1.8
    prediction = ModelType.FLOW
    supported_inference_dtypes = [torch.bfloat16, torch.float32]
    base_model = HunyuanVideoModel

    def process_unet_state_dict(self, state_dict: StateDict) -> StateDict:
        """Published files have names of their own."""
        return {usual_key(key): value for key, value in state_dict.items()}

    def process_unet_state_dict_for_saving(self, state_dict: StateDict) -> StateDict:
        """With the prefix such files have."""
        return {f"model.model.{key}": value for key, value in state_dict.items()}

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """Llama 3 8B and CLIP ViT-L."""
        return ClipTarget(HunyuanVideoTokenizer, hunyuan_video_clip(llm_dtype(state_dict)))


class HunyuanVideoI2V(HunyuanVideo):
    """HunyuanVideo picture to video."""

    unet_config = {**HunyuanVideo.unet_config, "in_channels": 33}
    base_model = HunyuanVideoI2VModel


class HunyuanVideoSkyreelsI2V(HunyuanVideo):
    """SkyReels picture to video."""

    unet_config = {**HunyuanVideo.unet_config, "in_channels": 32}
    base_model = SkyreelsModel
