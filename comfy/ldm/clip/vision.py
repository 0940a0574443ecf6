"""The image towers of CLIP and SigLIP: a transformer over patches of a picture.

Keys follow the published files: ``vision_model.embeddings``, ``vision_model.encoder.layers.N``,
``visual_projection``. Sources: Radford et al. 2021, https://arxiv.org/abs/2103.00020; Zhai et al.
2023, https://arxiv.org/abs/2303.15343.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.clip.text import CLIPEncoder
from comfy.nn.config import NetworkConfig

CLIP_KIND, SIGLIP_KIND = "clip_vision_model", "siglip_vision_model"
LLAVA_WIDTH = 4096  # of the language model that takes the projected patches


@dataclass(frozen=True)
class ClipVisionConfig(NetworkConfig):
    """Sizes of one image tower; defaults are those of CLIP ViT-L/14.

    Attributes:
        model_type: CLIP_KIND has a class token and a norm before its layers; SIGLIP_KIND has
            neither.
        projection_dim: Width of the space shared with texts; None without a projection.
        projector_type: "llava3" for files that also project the patches for a language model.
    """

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 14
    hidden_act: str = "quick_gelu"
    model_type: str = CLIP_KIND
    projection_dim: int | None = None
    projector_type: str | None = None

    @property
    def is_siglip(self) -> bool:
        """Whether it is of the SigLIP kind."""
        return self.model_type == SIGLIP_KIND


class CLIPVisionEmbeddings(nn.Module):
    """Patches and their places, and for CLIP a token for the whole picture before them."""

    def __init__(self, config: ClipVisionConfig, dtype: Any, device: Any, operations: Any) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        width = config.hidden_size
        tokens = (config.image_size // config.patch_size) ** 2
        self.class_embedding: nn.Parameter | None = None
        if not config.is_siglip:
            tokens += 1
            empty = torch.empty(width, **place)
            self.class_embedding = nn.Parameter(empty, requires_grad=False)
        self.patch_embedding = operations.Conv2d(
            config.num_channels,
            width,
            config.patch_size,
            stride=config.patch_size,
            bias=config.is_siglip,
            **place,
        )
        self.position_embedding = operations.Embedding(tokens, width, **place)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        if self.class_embedding is not None:
            whole = self.class_embedding.to(x).expand(x.shape[0], 1, -1)
            x = torch.cat([whole, x], dim=1)
        places = self.position_embedding.num_embeddings
        if x.shape[1] != places:
            raise ValueError(f"a picture of {x.shape[1]} tokens; this image encoder takes {places}")
        numbers = torch.arange(places, device=x.device)
        return x + self.position_embedding(numbers, out_dtype=x.dtype)


class CLIPVision(nn.Module):
    """The tower without its projection."""

    def __init__(
        self, config_dict: Mapping[str, Any], dtype: Any, device: Any, operations: Any
    ) -> None:
        super().__init__()
        config = self.config = ClipVisionConfig.from_options(config_dict)
        place = {"dtype": dtype, "device": device}
        width = config.hidden_size
        self.embeddings = CLIPVisionEmbeddings(config, dtype, device, operations)
        if not config.is_siglip:
            self.pre_layrnorm = operations.LayerNorm(width, **place)  # the files' spelling
        self.encoder = CLIPEncoder(
            config.num_hidden_layers,
            width,
            config.num_attention_heads,
            config.intermediate_size,
            config.hidden_act,
            dtype,
            device,
            operations,
        )
        self.post_layernorm = operations.LayerNorm(width, **place)

    def forward(
        self,
        pixel_values: Tensor,
        attention_mask: Tensor | None = None,
        intermediate_output: int | str | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Final state ``[B, L, D]``, an intermediate one, and the pooled state.

        The pooled state is that of the token for the whole picture; SigLIP has none and gives all.
        """
        del attention_mask  # pictures have no padding
        x = self.embeddings(pixel_values)
        if self.config.is_siglip:
            x, between = self.encoder(x, None, intermediate_output)
            x = self.post_layernorm(x)
            return x, between, x
        x, between = self.encoder(self.pre_layrnorm(x), None, intermediate_output)
        return x, between, self.post_layernorm(x[:, 0])


class LlavaProjector(nn.Module):
    """Two linear layers from patches to tokens of a language model; the whole picture's is left
    out."""

    def __init__(self, in_dim: int, out_dim: int, dtype: Any, device: Any, operations: Any) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        self.linear_1 = operations.Linear(in_dim, out_dim, **place)
        self.linear_2 = operations.Linear(out_dim, out_dim, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(nn.functional.gelu(self.linear_1(x[:, 1:])))


class CLIPVisionModelProjection(nn.Module):
    """The tower with its projections."""

    def __init__(
        self,
        config_dict: Mapping[str, Any],
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        self.vision_model = CLIPVision(config_dict, dtype, device, operations)
        config = self.vision_model.config
        self.visual_projection: nn.Module = nn.Identity()
        if config.projection_dim is not None:
            self.visual_projection = operations.Linear(
                config.hidden_size, config.projection_dim, bias=False, dtype=dtype, device=device
            )
        self.multi_modal_projector: LlavaProjector | None = None
        if config.projector_type == "llava3":
            self.multi_modal_projector = LlavaProjector(
                config.hidden_size, LLAVA_WIDTH, dtype, device, operations
            )

    def forward(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Final state, intermediate state, projected pooled state, patches for a language model."""
        last, between, pooled = self.vision_model(*args, **kwargs)
        tokens = None
        if self.multi_modal_projector is not None and between is not None:
            tokens = self.multi_modal_projector(between)
        return last, between, self.visual_projection(pooled), tokens
