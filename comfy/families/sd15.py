"""Stable Diffusion 1.x: UNet with cross-attention to CLIP ViT-L, epsilon prediction, 8x smaller
latents of 4 channels.

Full size: 320 channels, levels 1-2-4-4, context 768, 8 heads, norms of 32 groups. Smaller networks
of the same layout belong here too; what their shapes cannot tell stands in the file's header (see
`header.py`).
"""

# ruff: noqa: ARG002, RUF012 - hooks of the base; class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy import latent_formats
from comfy.families import sd15_model
from comfy.families.family import (
    ClipTarget,
    StateDict,
    UNetFamily,
    add_prefix,
    replace_prefixes,
)
from comfy.families.unet_layout import read_unet_config
from comfy.text_encoders.sd1 import SD1ClipModel, SD1Tokenizer


class SD15(UNetFamily):
    """Stable Diffusion 1.x."""

    unet_config = {
        "use_linear_in_transformer": False,
        "adm_in_channels": None,
        "use_temporal_attention": False,
    }
    unet_extra_config = {"num_heads": 8, "num_head_channels": -1}
    read_config = staticmethod(read_unet_config)
    latent_format = latent_formats.SD15
    memory_usage_factor = 1.0

    @classmethod
    def matches(
        cls, unet_config: Mapping[str, Any], state_dict: Mapping[str, Tensor] | None = None
    ) -> bool:
        """Convolutional projections around its transformers and no class embedding.

        Stable Zero123 has the same network and a projection of its own in front; it is another
        family.
        """
        has_projection = state_dict is not None and "cc_projection.weight" in state_dict
        has_context = unet_config.get("context_dim") is not None
        return super().matches(unet_config, state_dict) and has_context and not has_projection

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """CLIP ViT-L."""
        return ClipTarget(SD1Tokenizer, SD1ClipModel)

    def process_clip_state_dict(self, state_dict: StateDict) -> StateDict:
        """Names the encoder `clip_l`; early files leave out the `text_model` level."""
        root = "cond_stage_model."
        renames = {
            f"{root}transformer.{part}.": f"clip_l.transformer.text_model.{part}."
            for part in ("embeddings", "encoder", "final_layer_norm")
        }
        renames[root] = "clip_l."
        renamed = replace_prefixes(state_dict, renames)
        positions = "clip_l.transformer.text_model.embeddings.position_ids"
        if positions in renamed and renamed[positions].dtype.is_floating_point:
            # Some merging tools average the position numbers 0, 1, 2, ... along with the weights.
            renamed[positions] = renamed[positions].round().to(torch.int64)
        return renamed

    def process_clip_state_dict_for_saving(self, state_dict: StateDict) -> StateDict:
        """Back to the names of the original checkpoints."""
        inner = replace_prefixes(state_dict, {"clip_l.": ""})
        return add_prefix(inner, "cond_stage_model.")


class SD15_instructpix2pix(SD15):
    """Stable Diffusion 1.x, instruct-pix2pix (the latent to edit enters beside the noisy one)."""

    unet_config = {**SD15.unet_config, "in_channels": 8}
    base_model = sd15_model.SD15_instructpix2pix
