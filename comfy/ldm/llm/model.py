"""Decoder language models as text encoders: Llama 3, Mistral, Qwen 2.5 and 3, Gemma 2 and 3.

Each token sees those before it. Keys follow the published files:
``model.embed_tokens``, ``model.layers.N.self_attn``, ``.mlp``, ``model.norm``.
Source: https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2505.09388,
https://arxiv.org/abs/2503.19786.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.common_dit import rms_norm
from comfy.nn import attention
from comfy.nn.config import NetworkConfig

Intermediate = int | str | Sequence[int] | None


@dataclass(frozen=True)
class LLMConfig(NetworkConfig):
    """Sizes of one model; defaults are those of Qwen 3 4B.

    Attributes:
        num_key_value_heads: Heads of keys and values; several heads of queries share one.
        qkv_bias: Whether the projections have biases (Qwen 2.5).
        qk_norm: Whether queries and keys are normed (Qwen 3).
        rope_dims: Angles of a head that follow a token's place in time, height and width, for
            models that take pictures; None: all follow one number.
        final_norm: Whether the last states are normed (not where the last layers were cut off).
        transformer_type: "gemma2" and "gemma3" also norm what attention and feed-forward give,
            count the weights of norms from 1, have GELU for SiLU, and multiply embeddings by the
            root of their width.
        rope_theta, rope_scale: Longest wave of places, and what they are divided by; two of each
            where layers that see all tokens and layers that see near ones differ.
        sliding_attention: How many tokens a layer sees, False for all; repeated over the layers.
    """

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float | Sequence[float] = 1000000.0
    rope_scale: Sequence[float] | None = None
    qkv_bias: bool = False
    qk_norm: bool = True
    rope_dims: Sequence[int] | None = None
    final_norm: bool = True
    transformer_type: str = "llama"
    sliding_attention: Sequence[int | bool] | None = None

    @property
    def is_gemma(self) -> bool:
        """Whether this is a Gemma 2 or 3."""
        return self.transformer_type.startswith("gemma")

    def window(self, layer: int) -> int:
        """How many tokens a layer sees; 0 for all."""
        windows = self.sliding_attention
        return int(windows[layer % len(windows)]) if windows else 0

    def waves(self, is_near: bool) -> tuple[float, float]:
        """Longest wave and divisor of places, in layers that see near tokens or all."""
        theta, scale = self.rope_theta, self.rope_scale
        longest = theta if isinstance(theta, (int, float)) else theta[is_near]
        return float(longest), 1.0 if scale is None else scale[is_near]

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} heads cannot share {self.num_key_value_heads} heads "
                "of keys"
            )
        if self.rope_dims is not None and 2 * sum(self.rope_dims) != self.head_dim:
            raise ValueError(
                f"rope_dims {list(self.rope_dims)} do not add up to half of head_dim "
                f"{self.head_dim}"
            )


class RMSNorm(nn.Module):
    """Division by the root mean square, times a weight."""

    def __init__(self, dim: int, eps: float, counts_from_one: bool = False, **place: Any) -> None:
        super().__init__()
        self.eps, self.counts_from_one = eps, counts_from_one
        self.weight = nn.Parameter(torch.empty(dim, **place))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x)
        return rms_norm(x, weight + 1 if self.counts_from_one else weight, self.eps)


def norm_of(dim: int, config: LLMConfig, **place: Any) -> RMSNorm:
    """A norm as a model has it."""
    return RMSNorm(dim, config.rms_norm_eps, config.is_gemma, **place)


def rotations(
    places: Tensor, config: LLMConfig, dtype: torch.dtype, is_near: bool = False
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[L, D]`` of places; the halves of a head turn together.

    Args:
        places: ``[L]``, or ``[3, L]`` in time, height and width.
        is_near: Whether they are for layers that see near tokens only.
    """
    theta, scale = config.waves(is_near)
    powers = torch.arange(0, config.head_dim, 2, device=places.device).float() / config.head_dim
    angles = places.float()[..., None] * (1.0 / theta**powers / scale)
    if angles.ndim == 3:
        parts = angles.split(list(config.rope_dims or ()), dim=-1)
        angles = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn ``x [B, heads, L, D]``: its first half with its second."""
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat([-second, first], dim=-1) * turn[1]


class Attention(nn.Module):
    """Attention with fewer heads of keys and values than of queries."""

    def __init__(self, config: LLMConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        width, inner = config.hidden_size, config.head_dim
        for name, heads in (("q", self.heads), ("k", self.groups), ("v", self.groups)):
            layer = operations.Linear(width, heads * inner, bias=config.qkv_bias, **place)
            setattr(self, f"{name}_proj", layer)
        self.o_proj = operations.Linear(self.heads * inner, width, bias=False, **place)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.q_norm = norm_of(inner, config, **place)
            self.k_norm = norm_of(inner, config, **place)

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module

    def forward(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        q, k = rotate(self.q_norm(q), turn), rotate(self.k_norm(k), turn)
        shared = self.heads // self.groups
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        out = attention.optimized_attention(q, k, v, self.heads, mask=mask, skip_reshape=True)
        return self.o_proj(out)


class MLP(nn.Module):
    """Feed-forward with a gate."""

    def __init__(self, config: LLMConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.act = nn.GELU(approximate="tanh") if config.is_gemma else nn.SiLU()
        self.gate_proj = operations.Linear(width, inner, bias=False, **place)
        self.up_proj = operations.Linear(width, inner, bias=False, **place)
        self.down_proj = operations.Linear(inner, width, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each with a norm before and a residual connection."""

    def __init__(self, config: LLMConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        self.self_attn = Attention(config, operations, **place)
        self.mlp = MLP(config, operations, **place)
        self.input_layernorm = norm_of(config.hidden_size, config, **place)
        self.post_attention_layernorm = norm_of(config.hidden_size, config, **place)

    def forward(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask, turn)
        return x + self.mlp(self.post_attention_layernorm(x))


class GemmaLayer(Layer):
    """Attention and feed-forward, each between two norms, and a residual connection."""

    def __init__(self, config: LLMConfig, operations: Any, **place: Any) -> None:
        super().__init__(config, operations, **place)
        self.pre_feedforward_layernorm = norm_of(config.hidden_size, config, **place)
        self.post_feedforward_layernorm = norm_of(config.hidden_size, config, **place)

    def forward(self, x: Tensor, mask: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        seen = self.self_attn(self.input_layernorm(x), mask, turn)
        x = x + self.post_attention_layernorm(seen)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Decoder(nn.Module):
    """Token table, layers, last norm."""

    def __init__(self, config: LLMConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = operations.Embedding(config.vocab_size, config.hidden_size, **place)
        kind = GemmaLayer if config.is_gemma else Layer
        self.layers = nn.ModuleList(
            kind(config, operations, **place) for _ in range(config.num_hidden_layers)
        )
        self.norm: nn.Module = nn.Identity()
        if config.final_norm:
            self.norm = norm_of(config.hidden_size, config, **place)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        wanted: Intermediate,
        norm_intermediate: bool,
        places: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Final states ``[B, L, D]`` and others.

        Args:
            wanted: A number: the states after that layer (negative from the end). "all", or some
                numbers: those before each layer and the final ones, stacked ``[B, n, L, D]``.
            places: ``[3, L]`` in time, height and width; None: tokens are counted.
        """
        count = len(self.layers)
        chosen = set(range(count + 1)) if wanted == "all" else set()
        after: int | None = None
        if isinstance(wanted, int):
            after = wanted + count if wanted < 0 else wanted
        elif wanted is not None and wanted != "all":
            chosen = {int(number) for number in wanted}
        stacked: list[Tensor] = []
        kept: Tensor | None = None
        if self.config.is_gemma:
            x = x * self.config.hidden_size**0.5
        looks = self._looks(x, attention_mask, places)
        for number, layer in enumerate(self.layers):
            if number in chosen:
                stacked.append(x)
            x = layer(x, *looks[self.config.window(number)])
            if number == after:
                kept = x
        x = self.norm(x)
        if count in chosen:
            stacked.append(x)
        if stacked:
            kept = torch.stack(stacked, dim=1)
        if kept is not None and norm_intermediate:
            kept = self.norm(kept)
        return x, kept

    def _looks(
        self, x: Tensor, attention_mask: Tensor | None, places: Tensor | None
    ) -> dict[int, tuple[Tensor, tuple[Tensor, Tensor]]]:
        """Mask and rotations of the layers, by how many tokens they see."""
        if places is None:
            places = torch.arange(x.shape[1])
        places = places.to(x.device)
        windows = {self.config.window(number) for number in range(len(self.layers))}
        return {
            window: (
                _mask(x, attention_mask, window),
                rotations(places, self.config, x.dtype, is_near=window > 0),
            )
            for window in windows
        }


def _mask(x: Tensor, attention_mask: Tensor | None, window: int = 0) -> Tensor:
    """What is added to scores ``[B or 1, 1, L, L]``: nothing later and no padding is seen, and of
    what was before a window of the latest tokens (0: all).
    """
    length = x.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    hidden = later[None, None]
    if 0 < window < length:
        hidden = hidden | torch.ones_like(later).tril(-window)[None, None]
    if attention_mask is not None:
        hidden = hidden | (attention_mask == 0).to(x.device)[:, None, None, :]
    mask = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device)
    return mask.masked_fill_(hidden, torch.finfo(x.dtype).min / 4)


class DecoderLLM(nn.Module):
    """The model, with the interface of text encoders."""

    def __init__(
        self,
        config_dict: Mapping[str, Any],
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        config = self.config = LLMConfig.from_options(config_dict)
        self.num_layers, self.dtype = config.num_hidden_layers, dtype
        self.model = Decoder(config, operations, dtype=dtype, device=device)

    def get_input_embeddings(self) -> nn.Module:
        """The token table."""
        return self.model.embed_tokens

    def set_input_embeddings(self, embeddings: nn.Module) -> None:
        """Replace the token table."""
        self.model.embed_tokens = embeddings

    def forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        embeds: Tensor | None = None,
        num_tokens: Any = None,
        intermediate_output: Intermediate = None,
        final_layer_norm_intermediate: bool = True,
        dtype: torch.dtype = torch.float32,
        embeds_info: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """States of tokens ``[B, L]`` or of embedded ones ``[B, L, D]``."""
        del num_tokens  # of encoders with an end to pool at
        x = embeds
        if x is None:
            x = self.model.embed_tokens(input_ids, out_dtype=dtype)
        return self.model(
            x,
            attention_mask,
            intermediate_output,
            final_layer_norm_intermediate,
            self.places(embeds_info, x.shape[1]),
        )

    def places(self, embeds_info: Any, length: int) -> Tensor | None:
        """Places of tokens for `Decoder`, in models that take more than text."""
        del embeds_info, length
        return None
