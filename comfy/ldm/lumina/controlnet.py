"""ControlNet of Z-Image: layers over control tokens, each of which adds to a layer of Z-Image.

There are two generations of files. The first has plain layers that refine the control tokens; in
the second the refining layers, too, add to the layers of Z-Image they stand beside, and beside the
control picture there are a mask and a picture to fill in. Early files of the second generation were
trained with the main control layers in the refining layers' place, which have no effect in them.
Source: https://github.com/aigc-apps/VideoX-Fun.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.ldm.lumina.layers import (
    Z_MODULATION_WIDTH,
    JointTransformerBlock,
    LuminaSizes,
    feed_forward_width,
)

PATCH = 2
LATENT_CHANNELS = 16
EMBEDDER = "2-1"  # patches of 2 x 2 of one frame
KEY_NAMES = (
    (".attention.to_out.0.", ".attention.out."),
    (".attention.norm_q.", ".attention.q_norm."),
    (".attention.norm_k.", ".attention.k_norm."),
)


def z_image_convert(sd: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published weights with queries, keys and values in one, under the names of our layers."""
    made: dict[str, Tensor] = {}
    for key, value in sd.items():
        stem, found, rest = key.partition(".attention.to_q.")
        if found:
            parts = [sd[f"{stem}.attention.to_{name}.{rest}"] for name in "qkv"]
            made[f"{stem}.attention.qkv.{rest}"] = torch.cat(parts)
            continue
        if ".attention.to_k." in key or ".attention.to_v." in key:
            continue
        for theirs, ours in KEY_NAMES:
            key = key.replace(theirs, ours)
        made[key] = value
    return made


class ZImageControlTransformerBlock(JointTransformerBlock):
    """A layer over control tokens; gives what is added to Z-Image, and the tokens."""

    def __init__(
        self, sizes: LuminaSizes, width: int, is_first: bool, operations: Any, **place: Any
    ) -> None:
        super().__init__(sizes, width, True, operations, **place)
        self.before_proj: nn.Module | None = None
        if is_first:
            self.before_proj = operations.Linear(sizes.dim, sizes.dim, **place)
        self.after_proj = operations.Linear(sizes.dim, sizes.dim, **place)

    def forward(  # type: ignore[override]
        self, control: Tensor, x: Tensor, freqs: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``control [B, L, D]``; ``x [B, L, D]`` are the tokens Z-Image's layer is given."""
        if self.before_proj is not None:
            control = self.before_proj(control) + x
        control = super().forward(control, None, freqs, time)
        return self.after_proj(control), control


class ZImage_Control(nn.Module):
    """Control layers for every few layers of Z-Image.

    Args:
        n_control_layers, n_refiner_layers: Number of control layers and of refining ones.
        control_in_dim, additional_in_dim: Channels of the latent shown, and of mask and picture to
            fill in beside it.
        broken: Whether the main layers act in the refining ones' place.
        refiner_control: Whether the refining layers, too, add to those of Z-Image.
        inner: Channels inside a feed-forward; None: `ffn_dim_multiplier` of the width, in whole
            multiples of `multiple_of`.
        width: Width of the time embedding.
    """

    def __init__(
        self,
        dim: int = 3840,
        n_heads: int = 30,
        n_kv_heads: int = 30,
        multiple_of: int = 256,
        ffn_dim_multiplier: float = 8 / 3,
        qk_norm: bool = True,
        n_control_layers: int = 6,
        control_in_dim: int = LATENT_CHANNELS,
        additional_in_dim: int = 0,
        broken: bool = False,
        refiner_control: bool = False,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
        *,
        n_refiner_layers: int = 2,
        inner: int | None = None,
        width: int = Z_MODULATION_WIDTH,
        **_: Any,
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        if inner is None:
            inner = feed_forward_width(dim, ffn_dim_multiplier, multiple_of)
        sizes = LuminaSizes(dim, n_heads, n_kv_heads, inner, qk_norm)
        self.additional_channels = additional_in_dim
        self.refiners_add, self.refines_with_layers = refiner_control, broken
        shown = (control_in_dim + additional_in_dim) * PATCH**2
        embedder = operations.Linear(shown, sizes.dim, **place)
        self.control_all_x_embedder = nn.ModuleDict({EMBEDDER: embedder})

        def control_layers(count: int) -> nn.ModuleList:
            return nn.ModuleList(
                ZImageControlTransformerBlock(sizes, width, number == 0, operations, **place)
                for number in range(count)
            )

        self.control_layers = control_layers(n_control_layers)
        self.control_noise_refiner = (
            control_layers(n_refiner_layers)
            if refiner_control
            else nn.ModuleList(
                JointTransformerBlock(sizes, width, True, operations, **place)
                for _ in range(n_refiner_layers)
            )
        )

    def embedded(self, latent: Tensor, freqs: Tensor, time: Tensor) -> Tensor:
        """Control tokens ``[B, L, D]`` of ``latent [B, C, H, W]``.

        Args:
            freqs: Rotations of the picture's tokens; there may be more of them.
            time: Time embedding ``[B, width]``.
        """
        padded = pad_to_patch_size(latent, (PATCH, PATCH))
        patches = rearrange(padded, "b c (h p) (w q) -> b (h w) (p q c)", p=PATCH, q=PATCH)
        control = self.control_all_x_embedder[EMBEDDER](patches)
        if not self.refiners_add:
            for layer in self.control_noise_refiner:
                control = layer(control, None, freqs[:, :, : control.shape[1]], time)
        return control

    def refined(
        self, number: int, control: Tensor, x: Tensor, freqs: Tensor, time: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """What is added after a refining layer of Z-Image, if anything, and the control tokens."""
        if not self.refiners_add:
            return None, control
        if not self.refines_with_layers:
            return self._layer(self.control_noise_refiner, number, control, x, freqs, time)
        if number == 0:
            return self._layer(self.control_layers, 0, control, x, freqs, time)
        added, control = self._layer(self.control_layers, 1, control, x, freqs, time)
        for later in range(2, len(self.control_layers)):
            _, control = self._layer(self.control_layers, later, control, x, freqs, time)
        return added, control

    def controlled(
        self, number: int, control: Tensor, x: Tensor, freqs: Tensor, time: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What a control layer adds to Z-Image, and the control tokens."""
        return self._layer(self.control_layers, number, control, x, freqs, time)

    def _layer(
        self, layers: nn.ModuleList, number: int, control: Tensor, x: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor]:
        freqs, time = rest
        length = control.shape[1]  # Z-Image fills its tokens to a multiple
        added, control = layers[number](control, x[:, :length], freqs[:, :, :length], time)
        return added, control


def _count(weights: Mapping[str, Tensor], name: str) -> int:
    return len({key.split(".")[1] for key in weights if key.startswith(f"{name}.")})


def build(weights: Mapping[str, Tensor], **place: Any) -> ZImage_Control:
    """An empty network of the sizes of a file's weights, as `z_image_convert` gives them."""
    first = "control_layers.0."
    dim, inputs = weights[f"control_all_x_embedder.{EMBEDDER}.weight"].shape
    size = weights[f"{first}attention.q_norm.weight"].shape[0]
    heads = weights[f"{first}attention.out.weight"].shape[1] // size
    groups = (weights[f"{first}attention.qkv.weight"].shape[0] // size - heads) // 2
    inner, _ = weights[f"{first}feed_forward.w1.weight"].shape
    after = weights.get("control_noise_refiner.0.after_proj.weight")
    return ZImage_Control(
        dim,
        heads,
        groups,
        inner=inner,
        n_control_layers=_count(weights, "control_layers"),
        n_refiner_layers=_count(weights, "control_noise_refiner"),
        additional_in_dim=inputs // PATCH**2 - LATENT_CHANNELS,
        width=weights[f"{first}adaLN_modulation.0.weight"].shape[1],
        refiner_control=after is not None,
        broken=after is not None and not after.any(),
        **place,
    )
