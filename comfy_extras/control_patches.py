"""Patches that add the ControlNets of Qwen-Image and Z-Image after the layers of those networks.

A patch is called in every model call. The picture is encoded once for each size of latent; models
that this takes off the device come back afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from comfy.devices import residency
from comfy.latent_formats import Flux, Wan21
from comfy.ldm.qwen_image.controlnet import with_mask
from comfy.resize import common_upscale, repeat_to_batch_size

GREY = 0.5


def fitted(images: Tensor, width: int, height: int) -> Tensor:
    """Pictures ``[B, H, W, C]`` cut and resized to a size."""
    return common_upscale(images.movedim(-1, 1), width, height, "area", "center").movedim(1, -1)


class ControlPatch(ABC):
    """What both kinds share.

    Args:
        model_patch: The control network in its patcher.
        vae: Autoencoder of the model's latents.
        image: Control picture ``[B, H, W, 3]``, or None.
        strength: Factor of what is added.
        mask: 1 where the picture is known, 0 where it is to be made, ``[B, 1, H, W]``, or None.
        inpaint_image: Picture to fill in, or None.
    """

    def __init__(
        self,
        model_patch: Any,
        vae: Any,
        image: Tensor | None,
        strength: float,
        mask: Tensor | None = None,
        inpaint_image: Tensor | None = None,
    ) -> None:
        self.model_patch, self.vae = model_patch, vae
        self.image, self.inpaint_image, self.mask = image, inpaint_image, mask
        self.strength = strength
        self.encoded_image: Tensor | None = None
        self.encoded_image_size: tuple[int, int] | None = None

    def to(self, device_or_dtype: Any) -> ControlPatch:
        """Moves what was encoded along with the model."""
        if isinstance(device_or_dtype, torch.device) and self.encoded_image is not None:
            self.encoded_image = self.encoded_image.to(device_or_dtype)
        return self

    def models(self) -> list[Any]:
        """Patchers that have to be on the device as well."""
        return [self.model_patch]

    def shown(self, x: Tensor, like: Tensor) -> Tensor:
        """What the network is shown, for a latent ``x``, with the batch and type of tokens."""
        cells = self.vae.spacial_compression_encode()
        size = (x.shape[-2] * cells, x.shape[-1] * cells)
        if self.encoded_image is None or self.encoded_image_size != size:
            loaded = residency.loaded_models(only_currently_used=True)
            latent = self._encoded(*size)
            residency.load_for_run(loaded)
            self.encoded_image, self.encoded_image_size = self._prepared(latent.to(like)), size
        return repeat_to_batch_size(self.encoded_image.to(like), like.shape[0])

    @abstractmethod
    def _encoded(self, height: int, width: int) -> Tensor:
        """Latent of the pictures at a size, with what stands beside it."""

    def _prepared(self, latent: Tensor) -> Tensor:
        """What of the network's work is the same in every call."""
        return latent

    def _mask(self, width: int, height: int, method: str, crop: str) -> Tensor | None:
        if self.mask is None:
            return None
        return common_upscale(self.mask, width, height, method, crop)


class DiffSynthCnetPatch(ControlPatch):
    """Behind every block of Qwen-Image."""

    def __call__(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        img: Tensor = kwargs["img"]
        number, network = kwargs["block_index"], self.model_patch.model
        if number >= len(network.controlnet_blocks):
            return kwargs
        control = self.shown(kwargs["x"], img)
        length = control.shape[1]  # pictures to look at come after it
        added = network.control_block(img[:, :length], control, number) * self.strength
        return {**kwargs, "img": torch.cat([img[:, :length] + added, img[:, length:]], dim=1)}

    def _encoded(self, height: int, width: int) -> Tensor:
        image = fitted(_given(self.image), width, height)
        # One by one: for this autoencoder a batch is a video.
        latent = torch.cat([_with_time(self.vae.encode(one[None])) for one in image])
        channels = self.model_patch.model.mask_channels
        known = self._mask(latent.shape[-1], latent.shape[-2], "bilinear", "none")
        if known is not None:
            known = repeat_to_batch_size(known, latent.shape[0])
        return with_mask(Wan21().process_in(latent), known, channels)

    def _prepared(self, latent: Tensor) -> Tensor:
        tokens: Tensor = self.model_patch.model.process_input_latent_image(latent)
        return tokens


class ZImageControlPatch(ControlPatch):
    """Behind the refining layers and every few main layers of Z-Image."""

    control: Tensor | None = None  # tokens on their way through the control layers

    def __call__(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        img, network = kwargs["img"], self.model_patch.model
        number, refines = kwargs["block_index"], kwargs["block_type"] == "noise_refiner"
        rest = (kwargs["pe"], kwargs["vec"])
        if self.control is None or (refines and number == 0):
            self.control = network.embedded(self.shown(kwargs["x"], img), *rest)
        added: Tensor | None = None
        if refines:
            added, self.control = network.refined(number, self.control, kwargs["img_input"], *rest)
        else:
            total = kwargs["transformer_options"]["total_blocks"]
            count = len(network.control_layers)
            step = max(1, round(total / count))
            if number % step == 0 and number // step < count:
                added, self.control = network.controlled(
                    number // step, self.control, kwargs["img_input"], *rest
                )
            if number == total - 1:
                self.control = None
        if added is None:
            return {}
        length = added.shape[1]
        whole = torch.cat([img[:, :length] + added * self.strength, img[:, length:]], dim=1)
        return {"img": whole}

    def _encoded(self, height: int, width: int) -> Tensor:
        shown = self.image if self.image is not None else self.inpaint_image
        grey = torch.full_like(fitted(_given(shown), width, height), GREY)
        image = grey if self.image is None else fitted(self.image, width, height)
        latent = self._latent(image)
        if not self.model_patch.model.additional_channels:
            return latent
        known = self._mask(width, height, "bilinear", "center")
        inpaint = grey
        if self.inpaint_image is not None:
            inpaint = fitted(self.inpaint_image, width, height)
            if known is not None:
                whole = repeat_to_batch_size(known.movedim(1, -1).round(), inpaint.shape[0])
                inpaint = (inpaint - GREY) * whole.to(inpaint) + GREY
        behind = self._latent(inpaint)
        cells = self._mask(latent.shape[-1], latent.shape[-2], "nearest", "center")
        if cells is None:
            cells = torch.zeros_like(latent[:, :1])
        parts = [latent, cells.to(latent), behind]
        most = max(part.shape[0] for part in parts)
        return torch.cat([repeat_to_batch_size(part, most) for part in parts], dim=1)

    def _latent(self, images: Tensor) -> Tensor:
        return Flux().process_in(self.vae.encode(images))


def _given(image: Tensor | None) -> Tensor:
    if image is None:
        raise ValueError("no picture to control by: connect an image or an inpaint_image")
    return image


def _with_time(latent: Tensor) -> Tensor:
    return latent if latent.ndim == 5 else latent[:, :, None]
