"""Reads the configuration of diffusion transformers from the keys and shapes of their weights.

FLUX: `double_blocks.N` hold a picture and a text stream, `single_blocks.N` both in one. Stable
Diffusion 3: `joint_blocks.N`. What shapes cannot tell (positions, frequencies) is the same for
every network of a layout, or follows from the size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from comfy.families.family import BrokenModelError
from comfy.families.unet_layout import count_consecutive

MMDIT_HEAD = 64  # channels of a head in every network of the layout
FLUX_MARK = "double_blocks.0.img_attn.norm.key_norm.scale"
MMDIT_MARK = "joint_blocks.0.context_block.attn.qkv.weight"
CHROMA_MARK = "distilled_guidance_layer.norms.0.scale"
FLUX2_MARK = "double_stream_modulation_img.lin.weight"
RADIANCE_MARK = "nerf_blocks.0.norm.scale"
# Keys of relatives of FLUX that have the mark too and are other networks.
FLUX_RELATIVES = (
    CHROMA_MARK,
    "distilled_guidance_layer.0.norms.0.scale",
    FLUX2_MARK,
)


class Shapes:
    """Shapes of one network's weights by key without prefix."""

    def __init__(self, state_dict: Mapping[str, Tensor], prefix: str, layout: str) -> None:
        self._shapes = {
            key[len(prefix) :]: tuple(value.shape)
            for key, value in state_dict.items()
            if key.startswith(prefix)
        }
        self.prefix, self._layout = prefix, layout

    def __contains__(self, key: str) -> bool:
        return key in self._shapes

    def __getitem__(self, key: str) -> tuple[int, ...]:
        """Shape of a weight that the layout cannot do without."""
        if key not in self._shapes:
            raise BrokenModelError(
                f"the file has the layout of {self._layout}, but {self.prefix + key} is missing; "
                "fetch the file again"
            )
        return self._shapes[key]

    def count(self, pattern: str) -> int:
        """How many of pattern + "0.", pattern + "1.", ... start some key."""
        return count_consecutive(self._shapes, pattern)


def position_axes(head_size: int) -> list[int]:
    """Channels of a head for index, row and column of a patch: 16, 56 and 56 of 128.

    Rows and columns share alike what the index leaves, and each takes pairs of channels.
    """
    index = max(2, head_size // 8)
    index += index % 2
    while (head_size - index) % 4:
        index += 2
    return [index, (head_size - index) // 2, (head_size - index) // 2]


def read_flux_config(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any] | None:
    """Configuration of the FLUX.1 network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing.
    """
    is_flux = prefix + FLUX_MARK in state_dict and prefix + "img_in.weight" in state_dict
    if not is_flux or any(prefix + key in state_dict for key in FLUX_RELATIVES):
        return None
    return _read_flux_sizes(state_dict, prefix, "FLUX")


def read_chroma_config(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any] | None:
    """As `read_flux_config`, of Chroma; the channels are those of a patch."""
    if prefix + CHROMA_MARK not in state_dict or prefix + RADIANCE_MARK in state_dict:
        return None
    config = _read_flux_sizes(state_dict, prefix, "Chroma")
    for name in ("in_channels", "out_channels"):
        config[name] *= config["patch_size"] ** 2
    for name in ("guidance_embed", "yak_mlp", "txt_norm"):
        del config[name]
    maker = modulation_maker_sizes(Shapes(state_dict, prefix, "Chroma"))
    return {**config, "image_model": "chroma", **maker}


def modulation_maker_sizes(shapes: Shapes) -> dict[str, int]:
    """Sizes of the network that makes Chroma's modulation."""
    maker = "distilled_guidance_layer."
    hidden, inputs = shapes[f"{maker}in_proj.weight"]
    return {
        "in_dim": inputs,
        "out_dim": shapes[f"{maker}out_proj.weight"][0],
        "hidden_dim": hidden,
        "n_layers": shapes.count(f"{maker}layers."),
    }


def read_flux2_config(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any] | None:
    """As `read_flux_config`, of FLUX.2: no biases, one modulation for all blocks of a kind."""
    if prefix + FLUX2_MARK not in state_dict or prefix + "img_in.weight" not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "FLUX.2")
    width, channels = shapes["img_in.weight"]
    head_size = shapes[FLUX_MARK][0]
    if width % head_size or head_size % 8:
        raise BrokenModelError(
            f"{prefix}img_in.weight makes {width} channels in heads of {head_size} "
            f"({prefix}{FLUX_MARK}); heads must divide them and have a multiple of 8 channels"
        )
    return {
        "image_model": "flux2",
        "in_channels": channels,
        "out_channels": shapes["final_layer.linear.weight"][0],
        "patch_size": 1,
        "vec_in_dim": None,
        "context_in_dim": shapes["txt_in.weight"][1],
        "hidden_size": width,
        "mlp_ratio": shapes["double_blocks.0.img_mlp.2.weight"][1] / width,
        "num_heads": width // head_size,
        "depth": shapes.count("double_blocks."),
        "depth_single_blocks": shapes.count("single_blocks."),
        "axes_dim": [head_size // 4] * 4,
        "theta": 2000,
        "qkv_bias": False,
        "ops_bias": False,
        "global_modulation": True,
        "mlp_silu_act": True,
        "guidance_embed": "guidance_in.in_layer.weight" in shapes,
        "txt_ids_dims": [3],
        "default_ref_method": "index",
        "ref_index_scale": 10.0,
        "yak_mlp": False,
        "txt_norm": False,
    }


def _read_flux_sizes(state_dict: Mapping[str, Tensor], prefix: str, layout: str) -> dict[str, Any]:
    shapes = Shapes(state_dict, prefix, layout)
    patch = 2
    width, patch_channels = shapes["img_in.weight"]
    gated = "double_blocks.0.img_mlp.gate_proj.weight" in shapes
    channels = patch_channels // patch**2
    made = channels
    if "final_layer.linear.weight" in shapes:  # control networks have none
        made = shapes["final_layer.linear.weight"][0] // patch**2
    has_vector = "vector_in.in_layer.weight" in shapes
    has_text_norm = "txt_norm.scale" in shapes
    return {
        "image_model": "flux",
        "in_channels": channels,
        "out_channels": made,
        "patch_size": patch,
        "vec_in_dim": shapes["vector_in.in_layer.weight"][1] if has_vector else None,
        **stream_sizes(shapes, width, "img_in.weight", "gate_proj" if gated else "0"),
        "guidance_embed": "guidance_in.in_layer.weight" in shapes,
        "txt_ids_dims": [1, 2] if gated and has_text_norm else [],
        "yak_mlp": gated,
        "txt_norm": has_text_norm,
    }


def stream_sizes(shapes: Shapes, width: int, maker: str, widening: str = "0") -> dict[str, Any]:
    """Sizes of the blocks that FLUX.1 and its relatives have alike.

    Args:
        width: Channels of a token, which the weight `maker` makes.
        widening: Name of the first layer of a feed-forward.
    Raises:
        BrokenModelError: A weight is missing, or heads do not divide the channels.
    """
    text_width = shapes["txt_in.weight"][1]
    head_size = shapes[FLUX_MARK][0]
    inner = shapes[f"double_blocks.0.img_mlp.{widening}.weight"][0]
    if width % head_size:
        raise BrokenModelError(
            f"{shapes.prefix}{maker} makes {width} channels, which heads of {head_size} channels "
            f"({shapes.prefix}{FLUX_MARK}) do not divide"
        )
    return {
        "context_in_dim": text_width,
        "hidden_size": width,
        "mlp_ratio": inner / width,
        "num_heads": width // head_size,
        "depth": shapes.count("double_blocks."),
        "depth_single_blocks": shapes.count("single_blocks."),
        "axes_dim": position_axes(head_size),
        "theta": 10000,
        "qkv_bias": True,
    }


def read_mmdit_config(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any] | None:
    """Configuration of the Stable Diffusion 3 network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing or
            impossible.
    """
    if prefix + MMDIT_MARK not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "Stable Diffusion 3")
    width, channels, patch, _ = shapes["x_embedder.proj.weight"]
    if width % MMDIT_HEAD:
        raise BrokenModelError(
            f"{prefix}x_embedder.proj.weight makes {width} channels, which heads of {MMDIT_HEAD} "
            "channels do not divide"
        )
    blocks = shapes.count("joint_blocks.")
    config: dict[str, Any] = {
        "in_channels": channels,
        "patch_size": patch,
        "depth": width // MMDIT_HEAD,
        "num_blocks": blocks,
        "mlp_ratio": shapes["joint_blocks.0.x_block.mlp.fc1.weight"][0] / width,
        "input_size": None,
        "pos_embed_scaling_factor": None,
        "x_block_self_attn_layers": [
            number
            for number in range(blocks)
            if f"joint_blocks.{number}.x_block.attn2.qkv.weight" in shapes
        ],
    }
    if "final_layer.linear.weight" in shapes:
        config["out_channels"] = shapes["final_layer.linear.weight"][0] // patch**2
    if "y_embedder.mlp.0.weight" in shapes:
        config["adm_in_channels"] = shapes["y_embedder.mlp.0.weight"][1]
    if "context_embedder.weight" in shapes:
        rows, columns = shapes["context_embedder.weight"]
        sizes = {"in_features": columns, "out_features": rows}
        config["context_embedder_config"] = {"target": "torch.nn.Linear", "params": sizes}
    if "pos_embed" in shapes:
        config["num_patches"] = shapes["pos_embed"][1]
        config["pos_embed_max_size"] = round(math.sqrt(config["num_patches"]))
    if "joint_blocks.0.context_block.attn.ln_q.weight" in shapes:
        config["qk_norm"] = "rms"
    return config
