"""Base models of the diffusion transformers: Stable Diffusion 3, FLUX.1, FLUX.2 and Chroma."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import conds, resize
from comfy.families.base import BaseModel
from comfy.families.model_type import ModelType
from comfy.families.references import reference_conds, reference_shapes
from comfy.ldm.chroma.model import Chroma as ChromaNetwork
from comfy.ldm.flux.model import Flux as FluxNetwork
from comfy.ldm.mmdit.model import OpenAISignatureMMDITWrapper
from comfy.ops.encoded import weight_shape

USUAL_GUIDANCE = 3.5
FLUX2_TOKENS = 512
MASK_CELL = 8  # pixels of a mask's side that share a latent cell


class TransformerModel(BaseModel):
    """What both have in common: pooled text as the vector, text tokens of one length."""

    def encode_adm(self, **kwargs: Any) -> Tensor | None:
        """Pooled text [B, D]; None where the conditioning has none."""
        return kwargs.get("pooled_output")

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Texts of different length are not repeated to match: positions would no longer fit."""
        made = super().extra_conds(**kwargs)
        if kwargs.get("cross_attn") is not None:
            made["c_crossattn"] = conds.CONDRegular(kwargs["cross_attn"])
        return made


class SD3(TransformerModel):
    """Stable Diffusion 3 and 3.5."""

    network = OpenAISignatureMMDITWrapper
    usual_type = ModelType.FLOW


class Flux(TransformerModel):
    """FLUX.1: text, guidance and reference pictures; channels beside the latent for fill, depth
    and canny.
    """

    usual_guidance = USUAL_GUIDANCE  # where the conditioning says nothing
    network: ClassVar[type[nn.Module]] = FluxNetwork
    usual_type = ModelType.FLUX
    memory_usage_factor_conds = ("ref_latents",)

    def input_channels(self) -> int:
        """Latent channels the network takes; a LoRA may have widened its first layer."""
        columns = weight_shape(self.diffusion_model.img_in)[1]
        return columns // int(self.diffusion_model.patch_size) ** 2

    def concat_cond(self, **kwargs: Any) -> Tensor | None:
        """The picture to look at, and for fill models the mask, cell by cell in 64 channels."""
        channels, plain = self.input_channels(), int(self.model_config.unet_config["out_channels"])
        if channels <= plain:
            return None
        noise: Tensor = kwargs["noise"]
        image = kwargs.get("concat_latent_image")
        if image is None:
            image = torch.zeros_like(noise)
        image = resize.common_upscale(
            image.to(noise), noise.shape[-1], noise.shape[-2], "bilinear", "center"
        )
        image = resize.resize_to_batch_size(image, noise.shape[0])
        image = self.process_latent_in(image)
        if channels <= 2 * plain:
            return image
        mask = kwargs.get("concat_mask", kwargs.get("denoise_mask"))
        return torch.cat([image, self._mask_cells(mask, noise)], dim=1)

    @staticmethod
    def _mask_cells(mask: Tensor | None, noise: Tensor) -> Tensor:
        """A mask at eight times the latent's size, its pixels as channels [B, 64, H, W]."""
        if mask is None:
            mask = torch.ones_like(noise[:, :1])
        mask = mask.to(noise).mean(dim=1, keepdim=True)
        width, height = noise.shape[-1] * MASK_CELL, noise.shape[-2] * MASK_CELL
        mask = resize.common_upscale(mask, width, height, "bilinear", "center")
        cells = functional.pixel_unshuffle(mask, MASK_CELL)
        return resize.resize_to_batch_size(cells, noise.shape[0])

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Text, guidance strength, reference latents and an attention mask."""
        made = super().extra_conds(**kwargs)
        mask = kwargs.get("attention_mask")
        if mask is not None:
            made["attention_mask"] = conds.CONDRegular(self._attention_mask(mask, kwargs))
        guidance = kwargs.get("guidance", self.usual_guidance)
        if guidance is not None:
            made["guidance"] = conds.CONDRegular(torch.tensor([float(guidance)]))
        return made | reference_conds(self, kwargs)

    def _attention_mask(self, mask: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """The mask for as many patches as the latent has."""
        patch = int(self.diffusion_model.patch_size)
        rows, columns = (math.ceil(side / patch) for side in kwargs["noise"].shape[2:4])
        described = tuple(kwargs.get("attention_mask_img_shape", (1, 1)))
        return resize.upscale_dit_mask(mask, described, (rows, columns))

    def extra_conds_shapes(self, **kwargs: Any) -> dict[str, list[int]]:
        """Those of the reference latents."""
        return reference_shapes(self, kwargs)


class Flux2(Flux):
    """FLUX.2: texts shorter than those of its training have zeros before them."""

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """As FLUX.1, with the text filled up to 512 tokens."""
        text = kwargs.get("cross_attn")
        if text is not None and text.shape[1] < FLUX2_TOKENS:
            missing = FLUX2_TOKENS - text.shape[1]
            kwargs["cross_attn"] = functional.pad(text, (0, 0, missing, 0))
        return super().extra_conds(**kwargs)


class Chroma(Flux):
    """Chroma: it runs with classifier-free guidance, so the distilled one is 0."""

    usual_guidance = 0.0
    network: ClassVar[type[nn.Module]] = ChromaNetwork

    def concat_cond(self, **kwargs: Any) -> Tensor | None:
        """Nothing: there are no kinds with more input channels."""
        del kwargs
        return None
