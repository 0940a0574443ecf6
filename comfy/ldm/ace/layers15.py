"""Layers that the parts of ACE-Step 1.5 share: attention as in Qwen 3, near or whole, and gates.

Source: https://github.com/ace-step/ACE-Step-1.5; https://arxiv.org/abs/2505.09388, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy.devices import memory
from comfy.ldm.llm.looks import rotate
from comfy.ldm.llm.model import RMSNorm
from comfy.nn import attention, patches

NORM_EPS = 1e-6
THETA = 1000000.0
WINDOW = 128  # tokens to each side that every other layer sees
Options = dict[str, Any]
Turn = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a stack of layers.

    Attributes:
        width: Channels of a token.
        inner: Channels inside a feed-forward.
        heads, groups: Heads of queries, and of keys and values.
        head: Channels of a head.
        layers: How many layers.
    """

    width: int
    inner: int
    heads: int
    groups: int
    head: int
    layers: int


def rotations(length: int, head: int, like: Tensor) -> Turn:
    """Cosines and sines ``[L, D]`` of places; the halves of a head turn together."""
    powers = torch.arange(0, head, 2, device=like.device, dtype=torch.float32) / head
    places = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = torch.outer(places, 1.0 / THETA**powers).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def near_mask(length: int, like: Tensor) -> Tensor | None:
    """What is added to scores ``[1, 1, L, L]`` so that tokens see near ones only; None where all
    are near.
    """
    if length <= WINDOW + 1:
        return None
    memory.require_room_for_pairs(length, "the mask of near tokens", like.device, like.dtype, 2)
    places = torch.arange(length, device=like.device)
    is_far = (places[:, None] - places[None]).abs() > WINDOW
    mask = torch.zeros(1, 1, length, length, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(is_far, torch.finfo(like.dtype).min / 4)


def mask_of_layer(number: int, near: Tensor | None) -> Tensor | None:
    """Every other layer, the first among them, sees near tokens only."""
    return None if number % 2 else near


class Attention(nn.Module):
    """Attention of tokens among each other or, given others, to those."""

    def __init__(self, sizes: LayerSizes, operations: Any, **place: Any) -> None:
        super().__init__()
        self.heads, self.groups, self.head = sizes.heads, sizes.groups, sizes.head
        self.q_proj = operations.Linear(sizes.width, sizes.heads * sizes.head, bias=False, **place)
        self.k_proj = operations.Linear(sizes.width, sizes.groups * sizes.head, bias=False, **place)
        self.v_proj = operations.Linear(sizes.width, sizes.groups * sizes.head, bias=False, **place)
        self.o_proj = operations.Linear(sizes.heads * sizes.head, sizes.width, bias=False, **place)
        self.q_norm = RMSNorm(sizes.head, NORM_EPS, **place)
        self.k_norm = RMSNorm(sizes.head, NORM_EPS, **place)

    def forward(
        self,
        x: Tensor,
        turn: Turn | None = None,
        mask: Tensor | None = None,
        told: Tensor | None = None,
        options: Options | None = None,
    ) -> Tensor:
        """Of tokens ``[B, L, D]``.

        Args:
            turn: Where the tokens are; None: places do not count.
            mask: What is added to scores.
            told: Other tokens ``[B, M, D]`` that these attend to.
        """
        seen = x if told is None else told
        q = self.q_norm(self._by_head(self.q_proj(x)))
        k = self.k_norm(self._by_head(self.k_proj(seen)))
        v = self._by_head(self.v_proj(seen))
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        shared = self.heads // self.groups
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        out = attention.optimized_attention(
            q, k, v, self.heads, mask=mask, skip_reshape=True, transformer_options=options or {}
        )
        if options is not None:
            name = patches.OUTPUT if told is None else patches.CROSS_OUTPUT
            out = patches.attention_output(out, options, self.heads, None, name)
        return self.o_proj(out)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head)).transpose(1, 2)


class MLP(nn.Module):
    """Feed-forward with a gate."""

    def __init__(self, sizes: LayerSizes, operations: Any, **place: Any) -> None:
        super().__init__()
        self.gate_proj = operations.Linear(sizes.width, sizes.inner, bias=False, **place)
        self.up_proj = operations.Linear(sizes.width, sizes.inner, bias=False, **place)
        self.down_proj = operations.Linear(sizes.inner, sizes.width, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each with a norm before and a residual connection."""

    def __init__(self, sizes: LayerSizes, operations: Any, **place: Any) -> None:
        super().__init__()
        self.self_attn = Attention(sizes, operations, **place)
        self.input_layernorm = RMSNorm(sizes.width, NORM_EPS, **place)
        self.post_attention_layernorm = RMSNorm(sizes.width, NORM_EPS, **place)
        self.mlp = MLP(sizes, operations, **place)

    def forward(self, x: Tensor, turn: Turn, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Encoder(nn.Module):
    """A projection, layers and a norm.

    Args:
        inputs: Channels of what is encoded.
    """

    def __init__(self, inputs: int, sizes: LayerSizes, operations: Any, **place: Any) -> None:
        super().__init__()
        self.head = sizes.head
        self.embed_tokens = operations.Linear(inputs, sizes.width, **place)
        self.layers = nn.ModuleList(
            EncoderLayer(sizes, operations, **place) for _ in range(sizes.layers)
        )
        self.norm = RMSNorm(sizes.width, NORM_EPS, **place)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, L, inputs]`` to ``[B, L, D]``."""
        return self.through(self.embed_tokens(x))

    def through(self, x: Tensor) -> Tensor:
        """Tokens ``[B, L, D]`` behind the layers and the norm."""
        turn, near = rotations(x.shape[1], self.head, x), near_mask(x.shape[1], x)
        for number, layer in enumerate(self.layers):
            x = layer(x, turn, mask_of_layer(number, near))
        return self.norm(x)
