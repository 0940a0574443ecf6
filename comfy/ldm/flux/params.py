"""Sizes and switches of the networks of FLUX and its descendants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class FluxParams:
    """Sizes and switches of one network.

    Attributes:
        in_channels, out_channels: Latent channels.
        vec_in_dim: Width of the pooled text y; None for networks without.
        context_in_dim: Width of the text tokens.
        axes_dim: Channels of a head that each position axis takes; they add up to the head's size.
        txt_ids_dims: Axes along which text tokens are numbered.
        global_modulation: One modulation for all blocks of a kind (Flux 2).
        mlp_silu_act, yak_mlp, txt_norm: Forms of the feed-forward and a norm of the text (Flux 2,
            Ovis).
        default_ref_method, ref_index_scale: How reference latents are placed when nobody says.
    """

    in_channels: int
    out_channels: int
    vec_in_dim: int | None
    context_in_dim: int
    hidden_size: int
    mlp_ratio: float
    num_heads: int
    depth: int
    depth_single_blocks: int
    axes_dim: Sequence[int]
    theta: float
    patch_size: int
    qkv_bias: bool
    guidance_embed: bool
    txt_ids_dims: Sequence[int] = ()
    global_modulation: bool = False
    mlp_silu_act: bool = False
    ops_bias: bool = True
    default_ref_method: str = "offset"
    ref_index_scale: float = 1.0
    yak_mlp: bool = False
    txt_norm: bool = False

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by {self.num_heads} heads"
            )
        if sum(self.axes_dim) != self.hidden_size // self.num_heads:
            raise ValueError(
                f"axes_dim {list(self.axes_dim)} does not add up to the head size "
                f"{self.hidden_size // self.num_heads}"
            )
