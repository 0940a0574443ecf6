"""Hunyuan3D 2.1: a transformer over a set of tokens, with a picture's states and with experts.

The time is a token of its own. Layers of the second half are given the tokens of the first half,
the last ones first; the last layers choose among experts. Custom nodes reach in as into
Hunyuan-DiT.
Source: https://github.com/Tencent-Hunyuan/Hunyuan3D-2.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.hunyuan3dv2_1.layers import FinalLayer, HunYuanDiTBlock, Options, Sizes
from comfy.nn import patches
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped


class HunYuanDiTPlain(nn.Module):
    """Predicts the flow of a noisy set of tokens from a time 0..1 and a picture.

    Args:
        in_channels: Channels of a token.
        hidden_size, num_heads, mlp_ratio: Of the layers.
        context_dim: Width of the picture's states.
        depth: Layers.
        qk_norm, qkv_bias: Of the attentions.
        num_moe_layers: Layers at the end that choose among experts.
        num_experts, moe_top_k: Experts of each of them, and how many a token takes.
    """

    reads_patches = frozenset({"dit", patches.OUTPUT, patches.CROSS_OUTPUT})

    def __init__(
        self,
        in_channels: int = 64,
        hidden_size: int = 2048,
        context_dim: int = 1024,
        depth: int = 21,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        qk_norm: bool = True,
        qkv_bias: bool = False,
        num_moe_layers: int = 6,
        num_experts: int = 8,
        moe_top_k: int = 2,
        image_model: str | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **kwargs: Any,
    ) -> None:
        del image_model, kwargs  # names the family; a file's header may tell what only UNets have
        super().__init__()
        place = {"dtype": dtype, "device": device}
        self.dtype, self.in_channels, self.hidden_size = dtype, in_channels, hidden_size
        inner = int(hidden_size * mlp_ratio)
        sizes = Sizes(
            hidden_size, num_heads, inner, context_dim, qkv_bias, qk_norm, num_experts, moe_top_k
        )
        self.x_embedder = operations.Linear(in_channels, hidden_size, **place)
        layers = (
            operations.Linear(hidden_size, inner, **place),
            nn.GELU(),
            operations.Linear(inner, hidden_size, **place),
        )
        self.t_embedder = nn.ModuleDict({"mlp": nn.Sequential(*layers)})
        self.middle = depth // 2
        self.blocks = nn.ModuleList(
            HunYuanDiTBlock(
                sizes, number > self.middle, depth - number <= num_moe_layers, operations, **place
            )
            for number in range(depth)
        )
        self.final_layer = FinalLayer(hidden_size, in_channels, operations, **place)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy tokens ``[B, C, L]``.
            t: Times ``[B]`` in 0..1.
            context: States of a picture ``[B, N, D]``.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options, x, t, context, options, **kwargs
        )

    def _forward(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As of Hunyuan3D 2, the network knows the time the other way round, and the flow's sign
        with it.
        """
        del kwargs
        options = {} if transformer_options is None else transformer_options
        tokens = self.x_embedder(x.movedim(1, 2))
        tokens = torch.cat([self._time(1.0 - t, tokens), tokens], dim=1)
        made: Tensor = self.final_layer(self._run_blocks(tokens, context.to(tokens), options))
        return -made.movedim(1, 2)

    def _time(self, times: Tensor, like: Tensor) -> Tensor:
        """The token of times ``[B]``, of sines before cosines: ``[B, 1, D]``."""
        cosines, sines = timestep_embedding(times, self.hidden_size).chunk(2, dim=-1)
        waves = torch.cat([sines, cosines], dim=-1).to(like.dtype)
        made: Tensor = self.t_embedder["mlp"](waves)
        return made[:, None]

    def _run_blocks(self, tokens: Tensor, seen: Tensor, options: Options) -> Tensor:
        table = (options.get("patches_replace") or {}).get("dit") or {}
        options["total_blocks"], options["block_type"] = len(self.blocks), "double"
        skips: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            options["block_index"] = number
            skip = skips.pop() if number > self.middle else None

            def original(
                args: Options, block: nn.Module = block, skip: Tensor | None = skip
            ) -> Options:
                given = (args["img"], args["txt"], skip, args["transformer_options"])
                return {"img": block(*given)}

            args: Options = {"img": tokens, "txt": seen, "transformer_options": options}
            replacement = table.get(("double_block", number))
            if replacement is None:
                tokens = original(args)["img"]
            else:
                tokens = replacement(args, {"original_block": original})["img"]
            if number < self.middle:
                skips.append(tokens)
        return tokens
