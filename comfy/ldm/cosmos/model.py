"""Cosmos 1: a transformer over the cells of a video.

It is built as Cosmos Predict 2 is, and differs in what it knows of places: beside the turns of
queries and keys, each layer adds a learned vector of a cell's frame, row and column, and the turns
of frames follow the rate. Custom nodes reach in at the same places.
Source: Agarwal et al. 2025, https://arxiv.org/abs/2501.03575.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.cosmos.layers import GPT2FeedForward, TimestepEmbedding, modulation, turn
from comfy.ldm.cosmos.transformer import CosmosConfig, CosmosTransformer, Options
from comfy.nn import attention, patches
from comfy.nn.timesteps import timestep_embedding

NORM_EPS = 1e-6
USUAL_RATE = 24  # frames a second for which turns are not changed
PLACES_EPS = 1e-6


class Attention(nn.Module):
    """Attention of the video with itself or, given the text's width, with the text."""

    def __init__(
        self, width: int, heads: int, context: int | None, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.heads, self.is_cross = heads, context is not None
        source = context or width

        def normed(inputs: int) -> nn.Sequential:
            norm = operations.RMSNorm(width // heads, eps=NORM_EPS, **place)
            return nn.Sequential(operations.Linear(inputs, width, bias=False, **place), norm)

        self.to_q, self.to_k = normed(width), normed(source)
        self.to_v = nn.Sequential(operations.Linear(source, width, bias=False, **place))
        self.to_out = nn.Sequential(operations.Linear(width, width, bias=False, **place))

    def forward(
        self, x: Tensor, context: Tensor | None, angles: Tensor | None, options: Options
    ) -> Tensor:
        """``x [B, L, D]`` at ``angles [L, D / heads / 2]``."""
        source = x if context is None else context
        heads = (self.heads, -1)
        q, k = (
            part[1](part[0](tokens).unflatten(-1, heads)).transpose(1, 2)
            for part, tokens in ((self.to_q, x), (self.to_k, source))
        )
        v = self.to_v(source).unflatten(-1, heads).transpose(1, 2)
        if angles is not None:
            q, k = turn(q, angles), turn(k, angles)
        seen = attention.optimized_attention(
            q, k, v, self.heads, skip_reshape=True, transformer_options=options
        )
        name = patches.CROSS_OUTPUT if self.is_cross else patches.OUTPUT
        return self.to_out(patches.attention_output(seen, options, self.heads, None, name))


class VideoAttention(nn.Module):
    """An attention under the name that files have for it."""

    def __init__(self, *sizes: Any, **parts: Any) -> None:
        super().__init__()
        self.attn = Attention(*sizes, **parts)

    def forward(self, *given: Any) -> Tensor:
        return self.attn(*given)


class Part(nn.Module):
    """One of a layer's three parts: a modulated norm before it, a gate after it."""

    def __init__(
        self, width: int, lora_dim: int | None, block: nn.Module, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        norm = {"elementwise_affine": False, "eps": NORM_EPS, **place}
        self.norm_state = operations.LayerNorm(width, **norm)
        self.block = block
        self.adaLN_modulation = modulation(width, lora_dim, 3, operations, **place)

    def forward(self, x: Tensor, vec: Tensor, shared: Tensor | float, *others: Any) -> Tensor:
        shift, scale, gate = (self.adaLN_modulation(vec) + shared).chunk(3, dim=-1)
        return x + gate * self.block(self.norm_state(x) * (1 + scale) + shift, *others)


class Block(nn.Module):
    """A layer: the video with itself, with the text, and cell by cell."""

    compiles_alone = True

    def __init__(
        self,
        width: int,
        heads: int,
        context: int,
        mlp_ratio: float,
        lora_dim: int | None,
        operations: Any,
        **place: Any,
    ) -> None:
        super().__init__()
        parts = {"operations": operations, **place}
        inner = int(width * mlp_ratio + 1e-6)  # a ratio read from weights may round down
        made: list[nn.Module] = [
            VideoAttention(width, heads, None, **parts),
            VideoAttention(width, heads, context, **parts),
            GPT2FeedForward(width, inner, **parts),
        ]
        self.blocks = nn.ModuleList(Part(width, lora_dim, part, **parts) for part in made)

    def forward(
        self,
        x: Tensor,
        vec: Tensor,
        shared: Tensor | float,
        context: Tensor,
        angles: Tensor,
        places: Tensor | None,
        options: Options,
    ) -> Tensor:
        """``x [B, L, D]``; ``vec`` and ``shared`` are the time ``[B, 1, D]`` and what all layers
        add to their changes ``[B, 1, 3 D]``, ``places [L, D]`` the vectors of cells.
        """
        x = x if places is None else x + places
        x = self.blocks[0](x, vec, shared, None, angles, options)
        x = self.blocks[1](x, vec, shared, context, None, options)
        return self.blocks[2](x, vec, shared)


class FinalLayer(nn.Module):
    """A modulated norm and a projection to cells."""

    def __init__(
        self, width: int, out: int, lora_dim: int | None, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        norm = {"elementwise_affine": False, "eps": NORM_EPS, **place}
        self.norm_final = operations.LayerNorm(width, **norm)
        self.linear = operations.Linear(width, out, bias=False, **place)
        self.adaLN_modulation = modulation(width, lora_dim, 2, operations, **place)

    def forward(self, x: Tensor, vec: Tensor, shared: Tensor | float) -> Tensor:
        part = shared[..., : 2 * x.shape[-1]] if isinstance(shared, Tensor) else shared
        shift, scale = (self.adaLN_modulation(vec) + part).chunk(2, dim=-1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class Places(nn.Module):
    """Learned vectors of frames, rows and columns."""

    def __init__(self, sizes: Sequence[int], width: int, **place: Any) -> None:
        super().__init__()
        frames, rows, columns = sizes
        self.pos_emb_h = nn.Parameter(torch.empty(rows, width, **place))
        self.pos_emb_w = nn.Parameter(torch.empty(columns, width, **place))
        self.pos_emb_t = nn.Parameter(torch.empty(frames, width, **place))

    def forward(self, sizes: Sequence[int], like: Tensor) -> Tensor:
        """Their sum ``[T * H * W, D]``, each of length sqrt(D).

        Raises:
            ValueError: The video is larger than any the network was made for.
        """
        tables = (self.pos_emb_t, self.pos_emb_h, self.pos_emb_w)
        limits = tuple(len(table) for table in tables)
        if any(size > limit for size, limit in zip(sizes, limits)):
            raise ValueError(
                f"a latent of {tuple(sizes)} cells (frames, rows, columns) for Cosmos 1, which has "
                f"places for {limits}; make it smaller"
            )
        frames, rows, columns = (
            table[:size].to(like.device, torch.float32) for table, size in zip(tables, sizes)
        )
        summed = frames[:, None, None] + rows[None, :, None] + columns[None, None]
        length = torch.linalg.vector_norm(summed, dim=-1, keepdim=True)
        made = summed / (PLACES_EPS + length / summed.shape[-1] ** 0.5)
        return made.flatten(0, 2).to(like.dtype)


class GeneralDIT(CosmosTransformer):
    """Predicts a noisy video from a time and text tokens.

    Args:
        sizes: As `CosmosConfig` has them.
    """

    def __init__(
        self,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **sizes: Any,
    ) -> None:
        usual = {"model_channels": 4096, "num_heads": 32}
        config = CosmosConfig.from_options({**usual, **sizes})
        width, lora_dim = config.model_channels, config.lora_dim
        place = {"dtype": dtype, "device": device}
        parts = {"operations": operations, **place}
        super().__init__(config, **parts)
        self.extra_pos_embedder = None
        if config.extra_per_block_abs_pos_emb:
            largest = (config.max_frames, config.max_img_h, config.max_img_w)
            counts = [size // patch for size, patch in zip(largest, config.patch)]
            self.extra_pos_embedder = Places(counts, width, **place)
        embedding = TimestepEmbedding(width, config.use_adaln_lora, **parts)
        self.t_embedder = nn.Sequential(nn.Identity(), embedding)
        text = config.crossattn_emb_channels
        self.blocks = nn.ModuleDict(
            {
                f"block{number}": Block(
                    width, config.num_heads, text, config.mlp_ratio, lora_dim, **parts
                )
                for number in range(config.num_blocks)
            }
        )
        self.final_layer = FinalLayer(width, config.cell * config.out_channels, lora_dim, **parts)
        self.affline_norm = operations.RMSNorm(width, eps=NORM_EPS, **place)

    def embedded_time(self, timesteps: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | float]:
        """Of times ``[B]``."""
        waves = timestep_embedding(timesteps, tokens.shape[-1]).to(tokens.dtype)[:, None]
        made = self.t_embedder(waves)
        vec, shared = (waves, made) if self.has_lora else (made, 0.0)
        return self.affline_norm(vec), shared

    def layers(self) -> Iterable[nn.Module]:
        """See the base class."""
        return self.blocks.values()

    def pace(self, fps: Any) -> float:
        """Time from a frame to the next, in that of the training."""
        return 1.0 if fps is None else USUAL_RATE / float(fps)

    def places(self, sizes: Sequence[int], tokens: Tensor) -> tuple[Tensor | None, ...]:
        """Learned vectors of the cells, where the network has them."""
        return (
            None if self.extra_pos_embedder is None else self.extra_pos_embedder(sizes, tokens),
        )
