"""Base models of the Stable Diffusion 1.x family that differ from the general one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy import resize
from comfy.families.base import BaseModel


class InstructPixToPix:
    """Mixin: the latent of the picture to edit is concatenated to the noisy latent."""

    def concat_cond(self, **kwargs: Any) -> Tensor:
        """Latent to edit, at the size and batch of the noise; zeros where none was given."""
        noise: Tensor = kwargs["noise"]
        image: Tensor | None = kwargs.get("concat_latent_image")
        if image is None:
            return torch.zeros_like(noise)
        if image.shape[1:] != noise.shape[1:]:
            image = resize.common_upscale(
                image, noise.shape[-1], noise.shape[-2], "bilinear", "center"
            )
        return self.process_ip2p_image_in(resize.resize_to_batch_size(image, noise.shape[0]))

    def process_ip2p_image_in(self, image: Tensor) -> Tensor:
        """Scaling of the latent to edit; Stable Diffusion 1.x takes it as the autoencoder gives
        it.
        """
        return image


class SD15_instructpix2pix(InstructPixToPix, BaseModel):
    """instruct-pix2pix on Stable Diffusion 1.x."""
