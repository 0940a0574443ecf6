"""The encoder of T5: a transformer that knows positions only by learned biases on distances.

Keys follow the published files: ``shared``, ``encoder.block.N.layer.0.SelfAttention``,
``.layer.1.DenseReluDense``, ``encoder.final_layer_norm``. UMT5 has a bias table in every block, T5
in the first.
Source: Raffel et al. 2019, https://arxiv.org/abs/1910.10683.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.devices import memory
from comfy.ldm.clip.text import tanh_gelu
from comfy.ldm.common_dit import rms_norm
from comfy.nn import attention
from comfy.nn.config import NetworkConfig

BUCKETS, FARTHEST = 32, 128  # kinds of distance, and the distance from which all are one kind
NORM_EPS = 1e-6
BIAS_COPIES = 3  # of a bias, which live at once while it is made and masked
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": tanh_gelu,
    "relu": F.relu,
}


@dataclass(frozen=True)
class T5Config(NetworkConfig):
    """Sizes of one encoder; defaults are those of T5-XXL v1.1.

    Attributes:
        d_kv: Channels of a head; num_heads * d_kv need not be d_model.
        model_type: "t5" or "umt5" (a bias table in every block).
        is_gated_act: Whether the feed-forward has a gate.
    """

    d_model: int = 4096
    d_kv: int = 64
    d_ff: int = 10240
    num_heads: int = 64
    num_layers: int = 24
    vocab_size: int = 32128
    model_type: str = "t5"
    is_gated_act: bool = True
    dense_act_fn: str = "gelu_pytorch_tanh"

    def __post_init__(self) -> None:
        if self.dense_act_fn not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"unknown activation {self.dense_act_fn!r}; known: {known}")


class T5LayerNorm(nn.Module):
    """Division by the root mean square, times a weight."""

    def __init__(self, width: int, dtype: Any, device: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x.device), NORM_EPS)


class T5DenseActDense(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, config: T5Config, operations: Any, **place: Any) -> None:
        super().__init__()
        self.wi = operations.Linear(config.d_model, config.d_ff, bias=False, **place)
        self.wo = operations.Linear(config.d_ff, config.d_model, bias=False, **place)
        self.act = ACTIVATIONS[config.dense_act_fn]

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.act(self.wi(x)))


class T5DenseGatedActDense(nn.Module):
    """The same with a gate: ``wo(act(wi_0 x) * wi_1 x)``."""

    def __init__(self, config: T5Config, operations: Any, **place: Any) -> None:
        super().__init__()
        self.wi_0 = operations.Linear(config.d_model, config.d_ff, bias=False, **place)
        self.wi_1 = operations.Linear(config.d_model, config.d_ff, bias=False, **place)
        self.wo = operations.Linear(config.d_ff, config.d_model, bias=False, **place)
        self.act = ACTIVATIONS[config.dense_act_fn]

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.act(self.wi_0(x)) * self.wi_1(x))


class T5LayerFF(nn.Module):
    """Feed-forward with a norm before and a residual connection."""

    def __init__(self, config: T5Config, operations: Any, **place: Any) -> None:
        super().__init__()
        kind = T5DenseGatedActDense if config.is_gated_act else T5DenseActDense
        self.DenseReluDense = kind(config, operations, **place)
        self.layer_norm = T5LayerNorm(config.d_model, **place)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.DenseReluDense(self.layer_norm(x))


class T5Attention(nn.Module):
    """Self-attention without the usual scale, with a bias on distances."""

    def __init__(self, config: T5Config, has_bias: bool, operations: Any, **place: Any) -> None:
        super().__init__()
        inner = config.d_kv * config.num_heads
        self.num_heads, self.d_kv = config.num_heads, config.d_kv
        self.q = operations.Linear(config.d_model, inner, bias=False, **place)
        self.k = operations.Linear(config.d_model, inner, bias=False, **place)
        self.v = operations.Linear(config.d_model, inner, bias=False, **place)
        self.o = operations.Linear(inner, config.d_model, bias=False, **place)
        self.relative_attention_bias: nn.Module | None = None
        if has_bias:
            self.relative_attention_bias = operations.Embedding(BUCKETS, self.num_heads, **place)

    def compute_bias(self, length: int, like: Tensor) -> Tensor:
        """Bias ``[1, heads, L, L]`` of each pair of positions."""
        memory.require_room_for_pairs(
            length, "the bias of a text", like.device, like.dtype, BIAS_COPIES * self.num_heads
        )
        places = torch.arange(length, device=like.device)
        buckets = distance_buckets(places[None] - places[:, None])
        assert self.relative_attention_bias is not None
        bias = self.relative_attention_bias(buckets, out_dtype=like.dtype)
        return bias.permute(2, 0, 1)[None].contiguous()

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        k = self.k(x) * math.sqrt(self.d_kv)  # cancels the scale of the attention function
        out = attention.optimized_attention(self.q(x), k, self.v(x), self.num_heads, bias)
        return self.o(out)


def distance_buckets(distance: Tensor) -> Tensor:
    """The kind of each distance (other minus own position): half of them for each direction.

    Near distances have a kind each, far ones share kinds that grow logarithmically up to FARTHEST.
    """
    half = BUCKETS // 2
    exact = half // 2
    steps = distance.abs()
    far = torch.log(steps.float().clamp(min=1) / exact) / math.log(FARTHEST / exact)
    far = (exact + (far * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(steps < exact, steps, far) + half * (distance > 0).long()


class T5LayerSelfAttention(nn.Module):
    """Self-attention with a norm before and a residual connection."""

    def __init__(self, config: T5Config, has_bias: bool, operations: Any, **place: Any) -> None:
        super().__init__()
        self.SelfAttention = T5Attention(config, has_bias, operations, **place)
        self.layer_norm = T5LayerNorm(config.d_model, **place)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + self.SelfAttention(self.layer_norm(x), bias)


class T5Block(nn.Module):
    """One layer."""

    def __init__(self, config: T5Config, has_bias: bool, operations: Any, **place: Any) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            [
                T5LayerSelfAttention(config, has_bias, operations, **place),
                T5LayerFF(config, operations, **place),
            ]
        )

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.layer[1](self.layer[0](x, bias))


class T5Stack(nn.Module):
    """All layers and the last norm."""

    def __init__(self, config: T5Config, operations: Any, **place: Any) -> None:
        super().__init__()
        everywhere = config.model_type == "umt5"
        self.block = nn.ModuleList(
            T5Block(config, everywhere or number == 0, operations, **place)
            for number in range(config.num_layers)
        )
        self.final_layer_norm = T5LayerNorm(config.d_model, **place)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        intermediate_output: int | str | None = None,
        final_layer_norm_intermediate: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Final state ``[B, L, D]`` and that after a layer (negative from the end; "all":
        stacked)."""
        wanted = intermediate_output
        if isinstance(wanted, int) and wanted < 0:
            wanted = len(self.block) + wanted
        states: list[Tensor] = []
        bias: Tensor | None = None
        for number, block in enumerate(self.block):
            if wanted == "all":
                states.append(x)
            own = cast(T5LayerSelfAttention, cast(T5Block, block).layer[0]).SelfAttention
            if own.relative_attention_bias is not None:
                bias = _masked(own.compute_bias(x.shape[1], x), attention_mask)
            x = block(x, bias)
            if number == wanted:
                states.append(x)
        x = self.final_layer_norm(x)
        if not states:
            return x, None
        if wanted == "all":
            return x, torch.stack([*states, x], dim=1)
        return x, self.final_layer_norm(states[0]) if final_layer_norm_intermediate else states[0]


def _masked(bias: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The bias with positions whose mask ``[B, L]`` is 0 hidden from all."""
    if attention_mask is None:
        return bias
    hidden = (attention_mask == 0).to(bias.device)[:, None, None, :]
    shape = (attention_mask.shape[0], *bias.shape[1:])
    return bias.expand(shape).masked_fill(hidden, -torch.finfo(bias.dtype).max)


class T5(nn.Module):
    """The encoder with its token table."""

    def __init__(
        self,
        config_dict: Mapping[str, Any],
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        config = self.config = T5Config.from_options(config_dict)
        place = {"dtype": dtype, "device": device}
        self.num_layers, self.dtype = config.num_layers, dtype
        self.encoder = T5Stack(config, operations, **place)
        self.shared = operations.Embedding(config.vocab_size, config.d_model, **place)

    def get_input_embeddings(self) -> nn.Module:
        """The token table."""
        return self.shared

    def set_input_embeddings(self, embeddings: nn.Module) -> None:
        """Replace the token table."""
        self.shared = embeddings

    def forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        embeds: Tensor | None = None,
        num_tokens: Any = None,
        intermediate_output: int | str | None = None,
        final_layer_norm_intermediate: bool = True,
        dtype: torch.dtype = torch.float32,
        embeds_info: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """States of tokens ``[B, L]`` or of embedded ones ``[B, L, D]``; there is no pooled
        state."""
        del num_tokens, embeds_info  # of encoders with an end to pool at, or with images
        x = self.shared(input_ids, out_dtype=dtype) if embeds is None else embeds
        if self.dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
            x = torch.nan_to_num(x)  # float8 tables hold NaN where rows are not used
        return self.encoder(x, attention_mask, intermediate_output, final_layer_norm_intermediate)
