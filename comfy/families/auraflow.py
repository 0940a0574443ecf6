"""AuraFlow: text to picture, conditioned on Pile-T5 XL."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from comfy import conds, latent_formats
from comfy.families.base import BaseModel
from comfy.families.dit_layout import Shapes
from comfy.families.family import ClipTarget, StateDict, TransformerFamily
from comfy.families.model_type import ModelType
from comfy.families.text_sizes import t5_dtype
from comfy.ldm.aura.mmdit import MMDiT, feed_forward_width
from comfy.text_encoders import t5_alone
from comfy.text_encoders.pile_t5 import AURAFLOW

MARK = "double_layers.0.attn.w1q.weight"
HEAD = 256  # channels of a head in every published network
PATCH = 2
USUAL_SIZES = {"dim": 3072, "n_heads": 12, "in_channels": 4, "out_channels": 4}


def read_auraflow_config(
    state_dict: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Any] | None:
    """Configuration of the AuraFlow network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing.
    """
    if prefix + MARK not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "AuraFlow")
    dim, patch_channels = shapes["init_x_linear.weight"]
    inner = shapes["double_layers.0.mlpX.c_fc1.weight"][0]
    doubles = shapes.count("double_layers.")
    sizes = {
        "dim": dim,
        "n_heads": max(1, dim // HEAD),
        "in_channels": patch_channels // PATCH**2,
        "out_channels": shapes["final_linear.weight"][0] // PATCH**2,
    }
    config = {
        "image_model": "auraflow",
        "max_seq": shapes["positional_encoding"][1],
        "cond_seq_dim": shapes["cond_seq_linear.weight"][1],
        "n_double_layers": doubles,
        "n_layers": doubles + shapes.count("single_layers."),
        **{name: size for name, size in sizes.items() if size != USUAL_SIZES[name]},
    }
    if inner != feed_forward_width(dim):
        config["inner_dim"] = inner
    return config


class AuraFlowModel(BaseModel):
    """Text of its own length."""

    network = MMDiT
    usual_type = ModelType.FLOW
    text_width = "cond_seq_dim"

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Text tokens, not repeated to match others."""
        made = super().extra_conds(**kwargs)
        if kwargs.get("cross_attn") is not None:
            made["c_crossattn"] = conds.CONDRegular(kwargs["cross_attn"])
        return made


class AuraFlow(TransformerFamily):
    """AuraFlow."""

    unet_config: dict[str, Any] = {"image_model": "auraflow"}
    read_config = staticmethod(read_auraflow_config)
    sampling_settings = {"multiplier": 1.0, "shift": 1.73}
    latent_format: Any = latent_formats.SDXL
    prediction = ModelType.FLOW
    base_model = AuraFlowModel

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """Pile-T5 XL."""
        return ClipTarget(
            t5_alone.t5_alone_tokenizer(AURAFLOW),
            t5_alone.t5_alone_clip(AURAFLOW, t5_dtype(state_dict)),
        )
