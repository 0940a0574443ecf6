"""Base models of the SDXL family: they add picture sizes to the timestep embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy.families.base import BaseModel
from comfy.families.family import ModelFamily
from comfy.families.model_type import ModelType
from comfy.families.noise_augmentation import (
    CLIPEmbeddingNoiseAugmentation,
    seed_beside,
    unclip_adm,
)
from comfy.families.sd15_model import InstructPixToPix
from comfy.nn.timesteps import timestep_embedding

POOLED_CHANNELS = 1280  # of OpenCLIP ViT-bigG, for texts and pictures
SIZE_CHANNELS = 256  # sinusoidal embedding of each number
USUAL_WIDTH, USUAL_HEIGHT = 768, 768
AESTHETIC_SCORES = {"positive": 6.0, "negative": 2.5}


def embed_numbers(numbers: list[float], like: Tensor) -> Tensor:
    """Numbers embedded one by one and joined [1, len * 256]."""
    embedded = timestep_embedding(torch.tensor(numbers), SIZE_CHANNELS)
    return embedded.reshape(1, -1).to(like.device)


def sdxl_pooled(args: Mapping[str, Any], noise_augmentor: CLIPEmbeddingNoiseAugmentation) -> Tensor:
    """Pooled text [B, D], or pictures in its place.

    Raises:
        ValueError: The conditioning has neither.
    """
    pictures = args.get("unclip_conditioning")
    if pictures:
        seed = seed_beside(args.get("seed"))
        made = unclip_adm(pictures, args["device"], noise_augmentor, seed=seed)
        return made[:, : noise_augmentor.dim]
    pooled: Tensor | None = args.get("pooled_output")
    if pooled is None:
        raise ValueError(
            "the conditioning has no pooled output, which SDXL needs; encode the text with the "
            "text encoder of an SDXL checkpoint"
        )
    return pooled


class SDXL(BaseModel):
    """SDXL base: pooled text, size of the original picture, crop and size of the result."""

    def __init__(
        self,
        model_config: ModelFamily,
        model_type: ModelType | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(model_config, model_type, device=device)
        self.noise_augmentor = CLIPEmbeddingNoiseAugmentation(timestep_dim=POOLED_CHANNELS)

    def encode_adm(self, **kwargs: Any) -> Tensor:
        """[B, 2816]: pooled text, then height, width, crop, target size."""
        pooled = sdxl_pooled(kwargs, self.noise_augmentor)
        width = kwargs.get("width", USUAL_WIDTH)
        height = kwargs.get("height", USUAL_HEIGHT)
        numbers = [
            height,
            width,
            kwargs.get("crop_h", 0),
            kwargs.get("crop_w", 0),
            kwargs.get("target_height", height),
            kwargs.get("target_width", width),
        ]
        sizes = embed_numbers(numbers, pooled).to(pooled)
        return torch.cat([pooled, sizes.expand(pooled.shape[0], -1)], dim=1)


class SDXLRefiner(SDXL):
    """SDXL refiner: pooled text, size, crop and an aesthetic score."""

    def encode_adm(self, **kwargs: Any) -> Tensor:
        """[B, 2560]: pooled text, then height, width, crop, score."""
        pooled = sdxl_pooled(kwargs, self.noise_augmentor)
        usual = AESTHETIC_SCORES.get(kwargs.get("prompt_type", ""), AESTHETIC_SCORES["positive"])
        numbers = [
            kwargs.get("height", USUAL_HEIGHT),
            kwargs.get("width", USUAL_WIDTH),
            kwargs.get("crop_h", 0),
            kwargs.get("crop_w", 0),
            kwargs.get("aesthetic_score", usual),
        ]
        sizes = embed_numbers(numbers, pooled).to(pooled)
        return torch.cat([pooled, sizes.expand(pooled.shape[0], -1)], dim=1)


class SDXL_instructpix2pix(InstructPixToPix, SDXL):
    """instruct-pix2pix on SDXL: the latent to edit is scaled like any other."""

    def process_ip2p_image_in(self, image: Tensor) -> Tensor:
        return self.process_latent_in(image)
