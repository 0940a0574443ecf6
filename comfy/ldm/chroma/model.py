"""Chroma: FLUX.1 with one small network that makes the modulation of all blocks.

Custom nodes reach in as into FLUX.
Source: https://huggingface.co/lodestones/Chroma.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.chroma.layers import (
    Approximator,
    DoubleStreamBlock,
    ModulatedLastLayer,
    SingleStreamBlock,
)
from comfy.ldm.flux.layers import ModulationOut, timestep_embedding
from comfy.ldm.flux.model import Flux

TIME_WAVES, PLACE_WAVES = 16, 32  # of time and guidance each; of the place of a modulation
TRIPLE = 3  # shift, scale and gate
STREAMS = 2
PLACES = 344  # 19 double and 38 single blocks, and shift and scale of the last layer


class Chroma(Flux):
    """Predicts the flow of a noisy latent from a time 0..1 and text tokens.

    Args:
        in_channels, out_channels: Channels of a patch, not of a latent.
        in_dim, out_dim, hidden_dim, n_layers: Sizes of the network that makes the modulation.
        **kwargs: As of FLUX.
    """

    def __init__(
        self,
        in_channels: int = 64,
        out_channels: int = 64,
        in_dim: int = 64,
        out_dim: int = 3072,
        hidden_dim: int = 5120,
        n_layers: int = 5,
        patch_size: int = 2,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **kwargs: Any,
    ) -> None:
        parts = {"dtype": dtype, "device": device, "operations": operations}
        needed = TRIPLE * (kwargs["depth_single_blocks"] + 2 * STREAMS * kwargs["depth"]) + 2
        if needed > PLACES or out_dim != kwargs["hidden_size"]:
            raise ValueError(
                f"the blocks need {needed} modulations of width {kwargs['hidden_size']}, but there "
                f"are {PLACES} of width {out_dim}"
            )
        cells = patch_size**2
        sizes = {"in_channels": in_channels // cells, "out_channels": out_channels // cells}
        own = {"vec_in_dim": None, "guidance_embed": False, "patch_size": patch_size}
        super().__init__(final_layer=False, **{**kwargs, **own, **sizes}, **parts)
        del self.time_in
        self.distilled_guidance_layer = Approximator(in_dim, out_dim, hidden_dim, n_layers, **parts)
        self.final_layer = ModulatedLastLayer(
            self.hidden_size, patch_size, self.out_channels, **parts
        )

    def _build_blocks(self, params: Any, parts: dict[str, Any]) -> None:
        sizes = (self.hidden_size, self.num_heads, params.mlp_ratio)
        self.double_blocks = nn.ModuleList(
            DoubleStreamBlock(*sizes, params.qkv_bias, modulation=False, **parts)
            for _ in range(params.depth)
        )
        self.single_blocks = nn.ModuleList(
            SingleStreamBlock(*sizes, modulation=False, **parts)
            for _ in range(params.depth_single_blocks)
        )

    def _vector(
        self, times: Tensor, guidance: Tensor | None, y: Tensor | None, like: Tensor
    ) -> Tensor:
        """All modulation vectors ``[B, 344, D]``: of the single blocks, of the picture's and the
        text's streams of the double blocks, and in the end of the last layer. A smaller network
        leaves those before the last two unused.
        """
        del y  # there is no pooled text
        strength = torch.zeros_like(times) if guidance is None else guidance
        seen = torch.cat(
            [timestep_embedding(given, TIME_WAVES) for given in (times, strength)], dim=1
        )
        places = timestep_embedding(torch.arange(PLACES, device=like.device).float(), PLACE_WAVES)
        batch = times.shape[0]
        whole = torch.cat(
            [seen[:, None].expand(-1, PLACES, -1), places[None].expand(batch, -1, -1)], dim=-1
        )
        made: Tensor = self.distilled_guidance_layer(whole.to(like.dtype))
        return made

    def double_vectors(self, vec: Tensor) -> list[Any]:
        """Modulation of attention and feed-forward, of both streams, for each block."""
        count, each = len(self.double_blocks), 2 * TRIPLE
        start = TRIPLE * len(self.single_blocks)
        streams = vec[:, start : start + STREAMS * each * count].split(each * count, dim=1)
        made = []
        for number in range(count):
            parts = [stream[:, each * number : each * (number + 1)] for stream in streams]
            made.append(tuple((_triple(part, 0), _triple(part, TRIPLE)) for part in parts))
        return made

    def single_vectors(self, vec: Tensor) -> list[Any]:
        """Modulation of each block."""
        return [_triple(vec, TRIPLE * number) for number in range(len(self.single_blocks))]


def _triple(vec: Tensor, start: int) -> ModulationOut:
    return ModulationOut(*(vec[:, place : place + 1] for place in range(start, start + TRIPLE)))
