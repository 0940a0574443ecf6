"""Chroma Radiance: Chroma on pixels, without an autoencoder, for the flow or the clean picture."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy import latent_formats
from comfy.families import dit_model
from comfy.families.chroma import Chroma
from comfy.families.dit_layout import (
    CHROMA_MARK,
    RADIANCE_MARK,
    Shapes,
    modulation_maker_sizes,
    stream_sizes,
)
from comfy.families.family import BrokenModelError, StateDict
from comfy.ldm.chroma_radiance.layers import MATRICES
from comfy.ldm.chroma_radiance.model import WIDE_MARK, X0_MARK
from comfy.ldm.chroma_radiance.model import ChromaRadiance as Network

WIDE_PATCH = 32  # pixels of a patch's side, where a file has the mark
FIRST = "img_in_patch.weight"


def read_radiance_config(
    state_dict: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Any] | None:
    """Configuration of the network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing or
            impossible.
    """
    if any(prefix + key not in state_dict for key in (CHROMA_MARK, RADIANCE_MARK)):
        return None
    shapes = Shapes(state_dict, prefix, "Chroma Radiance")
    width, channels, kernel, _ = shapes[FIRST]
    patch = WIDE_PATCH if WIDE_MARK in shapes else kernel
    if patch % kernel:
        raise BrokenModelError(
            f"{prefix}{WIDE_MARK} says patches of {WIDE_PATCH} pixels, which {prefix}{FIRST}, over "
            f"{kernel} pixels, does not divide"
        )
    return {
        "image_model": "chroma_radiance",
        "in_channels": channels,
        "out_channels": channels,
        "patch_size": patch,
        "patch_kernel": kernel,
        "vec_in_dim": None,
        **stream_sizes(shapes, width, FIRST),
        "txt_ids_dims": [],
        **modulation_maker_sizes(shapes),
        **_field_sizes(shapes, channels),
        "use_x0": X0_MARK in shapes,
    }


def _field_sizes(shapes: Shapes, channels: int) -> dict[str, Any]:
    """Sizes of the layers that work pixel by pixel."""
    embedder = "nerf_image_embedder.embedder.0.weight"
    generator = "nerf_blocks.0.param_generator.weight"
    hidden, told = shapes[embedder]
    frequencies = math.isqrt(max(0, told - channels))
    ratio, rest = divmod(shapes[generator][0], MATRICES * hidden**2)
    if frequencies**2 != told - channels or rest:
        raise BrokenModelError(
            f"{shapes.prefix}{embedder} tells {channels} colours and a square of frequencies in "
            f"{told} numbers, and {shapes.prefix}{generator} makes a multiple of {MATRICES} times "
            f"{hidden} times {hidden} weights in {shapes[generator][0]} rows: one does not fit"
        )
    is_conv = "nerf_final_layer_conv.norm.scale" in shapes
    return {
        "nerf_hidden_size": hidden,
        "nerf_mlp_ratio": ratio,
        "nerf_depth": shapes.count("nerf_blocks."),
        "nerf_max_freqs": frequencies,
        "nerf_final_head_type": "conv" if is_conv else "linear",
    }


class ChromaRadianceModel(dit_model.Chroma):
    """As Chroma, on pixels."""

    network = Network


class ChromaRadiance(Chroma):
    """Chroma Radiance."""

    unet_config: dict[str, Any] = {"image_model": "chroma_radiance"}
    read_config = staticmethod(read_radiance_config)
    latent_format = latent_formats.ChromaRadiance
    memory_usage_factor = 0.044
    base_model = ChromaRadianceModel

    def process_vae_state_dict(self, state_dict: StateDict) -> StateDict:
        """Files need not say that latents are pixels."""
        return state_dict or {"pixel_space_vae": torch.ones(())}
