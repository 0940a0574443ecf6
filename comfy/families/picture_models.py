"""Base models of UNets that are shown a picture: unCLIP, the x4 upscaler, Lotus, Stable Video
Diffusion, SV3D and Zero123.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from comfy import conds, resize
from comfy.families.base import BaseModel
from comfy.families.family import ModelFamily
from comfy.families.model_type import ModelType
from comfy.families.noise_augmentation import (
    CLIPEmbeddingNoiseAugmentation,
    NoiseAugmentation,
    linear_alphas,
    seed_beside,
    unclip_adm,
)
from comfy.nn.timesteps import timestep_embedding

MERGED_AUGMENTATION = 0.05  # noise on the sum of several pictures' embeddings
NUMBER_CHANNELS, ANGLE_CHANNELS = 256, 512
UPSCALER_LEVELS = 350
USUAL_FPS, USUAL_MOTION = 6, 127


class SD21UNCLIP(BaseModel):
    """Stable Diffusion 2.1 unCLIP: image embeddings beside the timestep."""

    usual_type = ModelType.V_PREDICTION

    def __init__(
        self,
        model_config: ModelFamily,
        model_type: ModelType | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(model_config, model_type, device=device)
        facts = model_config.noise_aug_config or {}
        self.noise_augmentor = CLIPEmbeddingNoiseAugmentation(**facts)

    def encode_adm(self, **kwargs: Any) -> Tensor:
        """[1, 2 D]: the noisy embeddings' sum by strength, and how noisy they are."""
        pictures = kwargs.get("unclip_conditioning")
        device = kwargs["device"]
        if not pictures:
            return torch.zeros(1, self.adm_channels, device=device)
        seed = seed_beside(kwargs.get("seed"))
        merge = kwargs.get("unclip_noise_augment_merge", MERGED_AUGMENTATION)
        return unclip_adm(pictures, device, self.noise_augmentor, merge, seed)


class Lotus(BaseModel):
    """Lotus, told to estimate, and not to copy, the picture it is given for a noisy latent."""

    def encode_adm(self, **kwargs: Any) -> Tensor:
        """[1, 4]: sines and cosines of the task's two marks, 1 and 0."""
        marks = torch.tensor([[1.0, 0.0]], device=kwargs["device"])
        return torch.cat([marks.sin(), marks.cos()], dim=1)


class SD_X4Upscaler(BaseModel):
    """The x4 upscaler: the small picture beside the latent, and how noisy it was made."""

    usual_type = ModelType.V_PREDICTION

    def __init__(
        self,
        model_config: ModelFamily,
        model_type: ModelType | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(model_config, model_type, device=device)
        self.noise_augmentor = NoiseAugmentation(linear_alphas, UPSCALER_LEVELS)

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Picture, noise level and text."""
        noise: Tensor = kwargs["noise"]
        amount = kwargs.get("noise_augmentation", 0.0)
        image = kwargs.get("concat_image")
        if image is None:
            image = torch.zeros_like(noise[:, :3])
        image = fitted(image.to(kwargs["device"]), noise)
        level = torch.tensor([round(self.noise_augmentor.max_noise_level * amount)])
        if amount > 0:
            seed = seed_beside(kwargs.get("seed"))
            image = self.noise_augmentor.noised(image, level, seed)
        made: dict[str, Any] = {
            "c_concat": conds.CONDNoiseShape(resize.resize_to_batch_size(image, noise.shape[0])),
            "y": conds.CONDRegular(level),
        }
        if kwargs.get("cross_attn") is not None:
            made["c_crossattn"] = conds.CONDCrossAttn(kwargs["cross_attn"])
        return made


class SVD_img2vid(BaseModel):
    """Stable Video Diffusion: the batch is the time; the picture to go on from lies beside it."""

    usual_type = ModelType.V_PREDICTION_EDM

    def encode_adm(self, **kwargs: Any) -> Tensor:
        """[1, 768]: frames a second, amount of motion, noise on the picture."""
        numbers = (
            kwargs.get("fps", USUAL_FPS) - 1,  # as in training
            kwargs.get("motion_bucket_id", USUAL_MOTION),
            kwargs.get("augmentation_level", 0),
        )
        embedded = timestep_embedding(torch.tensor(numbers, dtype=torch.float32), NUMBER_CHANNELS)
        return embedded.reshape(1, -1)

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Facts, picture, image embedding and the number of frames."""
        noise: Tensor = kwargs["noise"]
        image = kwargs.get("concat_latent_image")
        if image is None:
            image = torch.zeros_like(noise)
        image = fitted(image, noise)
        made: dict[str, Any] = {
            "c_concat": conds.CONDNoiseShape(resize.resize_to_batch_size(image, noise.shape[0])),
            "num_video_frames": conds.CONDConstant(noise.shape[0]),
        }
        facts = self.encode_adm(**kwargs)
        made["y"] = conds.CONDRegular(facts)
        if kwargs.get("cross_attn") is not None:
            made["c_crossattn"] = conds.CONDCrossAttn(kwargs["cross_attn"])
        if "time_conditioning" in kwargs:
            made["time_context"] = conds.CONDCrossAttn(kwargs["time_conditioning"])
        return made


class SV3D_u(SVD_img2vid):
    """SV3D with a camera path of its own choice."""

    def encode_adm(self, **kwargs: Any) -> Tensor:
        """[1, 256]: noise on the picture."""
        amount = float(kwargs.get("augmentation_level", 0))
        return timestep_embedding(torch.tensor([amount]), NUMBER_CHANNELS)


class SV3D_p(SVD_img2vid):
    """SV3D with given camera angles."""

    def encode_adm(self, **kwargs: Any) -> Tensor:
        """[frames, 1280]: noise on the picture, polar angle and azimuth of each frame."""
        frames = kwargs["noise"].shape[0]
        amount = torch.tensor([float(kwargs.get("augmentation_level", 0))])
        polar = torch.deg2rad(90 - _numbers(kwargs.get("elevation", 0)))
        azimuth = torch.deg2rad(_numbers(kwargs.get("azimuth", 0))) % (2 * math.pi)
        parts = [
            timestep_embedding(amount, NUMBER_CHANNELS),
            timestep_embedding(polar, ANGLE_CHANNELS),
            timestep_embedding(azimuth, ANGLE_CHANNELS),
        ]
        return torch.cat([resize.resize_to_batch_size(part, frames) for part in parts], dim=1)


class Stable_Zero123(BaseModel):
    """Stable Zero123: image embedding and camera, projected to the context's width.

    Args:
        cc_projection_weight, cc_projection_bias: The projection [context, embedding + 4].
    """

    def __init__(
        self,
        model_config: ModelFamily,
        model_type: ModelType | None = None,
        device: torch.device | str | None = None,
        cc_projection_weight: Tensor | None = None,
        cc_projection_bias: Tensor | None = None,
    ) -> None:
        super().__init__(model_config, model_type, device=device)
        if cc_projection_weight is None or cc_projection_bias is None:
            raise ValueError("Stable Zero123 needs the weights cc_projection.weight and .bias")
        rows, columns = cc_projection_weight.shape
        self.cc_projection = nn.Linear(columns, rows, device="meta")
        self.cc_projection.weight = nn.Parameter(cc_projection_weight.float(), requires_grad=False)
        self.cc_projection.bias = nn.Parameter(cc_projection_bias.float(), requires_grad=False)

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Picture and projected context; one that has its width already is passed on."""
        noise: Tensor = kwargs["noise"]
        made: dict[str, Any] = {}
        image = kwargs.get("concat_latent_image")
        image = torch.zeros_like(noise) if image is None else fitted(image, noise)
        image = resize.resize_to_batch_size(image, noise.shape[0])
        made["c_concat"] = conds.CONDNoiseShape(image)
        context = kwargs.get("cross_attn")
        if context is not None:
            if context.shape[-1] == self.cc_projection.in_features:
                weight = self.cc_projection.weight
                context = self.cc_projection(context.to(weight)).to(context.dtype)
            made["c_crossattn"] = conds.CONDCrossAttn(context)
        return made


def fitted(image: Tensor, like: Tensor) -> Tensor:
    """Rows and columns of a latent, cropping what does not fit its proportions."""
    if image.shape[-2:] == like.shape[-2:]:
        return image
    return resize.common_upscale(image, like.shape[-1], like.shape[-2], "bilinear", "center")


def _numbers(value: Any) -> Tensor:
    """One number or a list of them as a tensor [N]."""
    numbers = value if isinstance(value, (list, tuple)) else [value]
    return torch.tensor(numbers, dtype=torch.float32)
