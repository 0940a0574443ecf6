"""ControlNets of Stable Diffusion and SDXL as the diffusers library names their weights."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from comfy.families import diffusers_layout
from comfy.weights.diffusers_unet import unet_to_diffusers
from comfy.weights.state_dict import count_parts

HINT = "controlnet_cond_embedding."
MARK = f"{HINT}conv_in.weight"
PARTS = ("weight", "bias")
# Attention weights that the library keeps outside a layer, and we in one.
PACKED = {"attn.in_proj_weight": "attn.in_proj.weight", "attn.in_proj_bias": "attn.in_proj.bias"}


def to_native(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The weights under the names of the original code; None for a file in another layout.

    Raises:
        BrokenModelError: The layout is recognised, but a weight that decides a size is missing.
    """
    if MARK not in state_dict:
        return None
    config = diffusers_layout.read_encoder_config(state_dict)
    if config is None:
        return None
    names = unet_to_diffusers({**config, "transformer_depth_output": []})
    names |= _hint_names(state_dict)
    names |= _output_names(state_dict)
    return {names.get(key, _unpacked(key)): value for key, value in state_dict.items()}


def _hint_names(state_dict: Mapping[str, Tensor]) -> dict[str, str]:
    """The convolutions over the hint; between each two of them is an activation."""
    blocks = count_parts(state_dict, f"{HINT}blocks.")
    layers = ["conv_in", *(f"blocks.{number}" for number in range(blocks)), "conv_out"]
    return {
        f"{HINT}{layer}.{part}": f"input_hint_block.{2 * number}.{part}"
        for number, layer in enumerate(layers)
        for part in PARTS
    }


def _output_names(state_dict: Mapping[str, Tensor]) -> dict[str, str]:
    """The convolutions that make the residuals."""
    count = count_parts(state_dict, "controlnet_down_blocks.")
    names = {
        f"controlnet_down_blocks.{number}.{part}": f"zero_convs.{number}.0.{part}"
        for number in range(count)
        for part in PARTS
    }
    return names | {f"controlnet_mid_block.{part}": f"middle_block_out.0.{part}" for part in PARTS}


def _unpacked(key: str) -> str:
    ending = next((old for old in PACKED if key.endswith(old)), None)
    return key if ending is None else key.removesuffix(ending) + PACKED[ending]
