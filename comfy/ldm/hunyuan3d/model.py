"""Hunyuan3D 2: the blocks of FLUX over a set of latent tokens and the states of a picture.

The tokens are a set, so nothing has a position. Custom nodes reach in as into FLUX.
Source: https://github.com/Tencent-Hunyuan/Hunyuan3D-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comfy import ops
from comfy.ldm.flux.model import Flux
from comfy.nn import patches

Options = dict[str, Any]


class Hunyuan3Dv2(Flux):
    """Predicts the flow of a noisy set of tokens from a time 0..1 and a picture.

    Args:
        in_channels: Channels of a token.
        context_in_dim: Width of the picture's states.
        guidance_embed: Whether it was taught a guidance strength (turbo).
        The others: as of FLUX.
    """

    max_period = 1000
    reads_patches = frozenset({"dit", patches.OUTPUT})

    def __init__(
        self,
        in_channels: int = 64,
        context_in_dim: int = 1536,
        hidden_size: int = 1024,
        mlp_ratio: float = 4.0,
        num_heads: int = 16,
        depth: int = 16,
        depth_single_blocks: int = 32,
        qkv_bias: bool = True,
        guidance_embed: bool = False,
        image_model: str | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **kwargs: Any,
    ) -> None:
        del kwargs  # a file's header may tell what only UNets have
        super().__init__(
            image_model, in_channels=in_channels, out_channels=in_channels, vec_in_dim=None,
            context_in_dim=context_in_dim, hidden_size=hidden_size, mlp_ratio=mlp_ratio,
            num_heads=num_heads, depth=depth, depth_single_blocks=depth_single_blocks,
            axes_dim=(hidden_size // num_heads,), theta=1.0, patch_size=1, qkv_bias=qkv_bias,
            guidance_embed=guidance_embed, dtype=dtype, device=device, operations=operations,
        )  # fmt: skip
        self.latent_in, self.cond_in = self.img_in, self.txt_in
        del self.img_in, self.txt_in

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        guidance: Tensor | None = None,
        ref_latents: Sequence[Tensor] | None = None,
        control: Options | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Noisy tokens ``[B, C, L]`` and states ``[B, N, D]``.

        The network was trained with time running from noise to shape, the other way round than
        here, so the time is turned about and the flow's sign with it.
        """
        del y, ref_latents, kwargs
        options = {} if transformer_options is None else transformer_options
        tokens = self.latent_in(x.movedim(1, 2))
        seen = self.cond_in(context)
        vec = self._vector(1.0 - timestep, guidance, None, tokens)
        shared = {"pe": None, "attn_mask": None, "transformer_options": options}
        tokens, seen = self._double_stream(tokens, seen, vec, control, shared)
        both = torch.cat([seen, tokens], dim=1)
        both = self._single_stream(both, seen.shape[1], vec, control, shared)
        flow: Tensor = self.final_layer(both[:, seen.shape[1] :], vec)
        return -flow.movedim(1, 2)
