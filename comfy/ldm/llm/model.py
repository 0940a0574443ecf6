"""Decoder language models as text encoders: Llama 3, Mistral, Qwen 2.5 and 3, Gemma 2 and 3.

Each token sees those before it. Keys follow the published files:
``model.embed_tokens``, ``model.layers.N.self_attn``, ``.mlp``, ``model.norm``, ``lm_head``.
They also continue texts: then what layers keep of earlier tokens is in a `KeyValueCache`.
Source: https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2505.09388,
https://arxiv.org/abs/2503.19786.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.common_dit import rms_norm
from comfy.ldm.llm.cache import DeltaCache, KeyValueCache, LayerCache
from comfy.ldm.llm.config import LLMConfig as LLMConfig
from comfy.ldm.llm.deepstack import DeepRows, with_deep
from comfy.ldm.llm.delta import DeltaSizes, GatedDelta
from comfy.ldm.llm.looks import mask_behind, mask_of, rotate, rotations
from comfy.nn import attention
from comfy.ops.cast import cast_bias_weight, uncast_bias_weight

Intermediate = int | str | Sequence[int] | None


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
    return RMSNorm(dim, config.rms_norm_eps, config.counts_norms_from_one, **place)


class Attention(nn.Module):
    """Attention with fewer heads of keys and values than of queries."""

    def __init__(self, config: LLMConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.score_cap = config.score_cap
        width, inner = config.hidden_size, config.head_dim
        self.is_gated = config.is_gated
        asked = self.heads * (2 if self.is_gated else 1)
        for name, heads in (("q", asked), ("k", self.groups), ("v", self.groups)):
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

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        turn: tuple[Tensor, Tensor],
        cache: LayerCache | None = None,
    ) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)), None
        if self.is_gated:
            q, gate = q.chunk(2, dim=-1)
        q = q.transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        q, k = rotate(self.q_norm(q), turn), rotate(self.k_norm(k), turn)
        if cache is not None:
            out = self._seen(q, *cache.extend(k, v), mask)
        else:
            shared = self.heads // self.groups
            k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
            out = attention.optimized_attention(q, k, v, self.heads, mask=mask, skip_reshape=True)
        return self.o_proj(out if gate is None else out * gate.flatten(2).sigmoid())

    def _seen(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """What tokens ``[B, heads, L, D]`` see of all until them ``[B, groups, M, D]``."""
        if self.score_cap is not None:
            return _capped(q, k, v, mask, self.score_cap)
        if q.shape[2] > 1:
            return attention.optimized_attention(q, k, v, self.heads, mask=mask, skip_reshape=True)
        # One token: the heads that share keys are rows of one product, and no key is repeated.
        rows = q.unflatten(1, (self.groups, -1)).squeeze(3)
        out = attention.optimized_attention(
            rows, k, v, self.groups, mask=mask, skip_reshape=True, skip_output_reshape=True
        )
        return out.flatten(1)[:, None]


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cap: float) -> Tensor:
    """Attention whose scores stay within ``-cap..cap``.

    Source: https://arxiv.org/abs/2408.00118, section 2.
    """
    rows = q.unflatten(1, (k.shape[1], -1))
    scores = rows @ k[:, :, None].transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = cap * (scores / cap).tanh()
    if mask is not None:
        scores = scores + mask[:, :, None]
    seen = scores.float().softmax(dim=-1).to(v.dtype) @ v[:, :, None]
    return seen.flatten(1, 2).transpose(1, 2).flatten(2)


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

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        turn: tuple[Tensor, Tensor],
        cache: LayerCache | None = None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask, turn, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class GemmaLayer(Layer):
    """Attention and feed-forward, each between two norms, and a residual connection."""

    def __init__(self, config: LLMConfig, operations: Any, **place: Any) -> None:
        super().__init__(config, operations, **place)
        self.pre_feedforward_layernorm = norm_of(config.hidden_size, config, **place)
        self.post_feedforward_layernorm = norm_of(config.hidden_size, config, **place)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        turn: tuple[Tensor, Tensor],
        cache: LayerCache | None = None,
    ) -> Tensor:
        seen = self.self_attn(self.input_layernorm(x), mask, turn, cache)
        x = x + self.post_attention_layernorm(seen)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class DeltaLayer(nn.Module):
    """Attention by the gated delta rule, and feed-forward, like `Layer`."""

    def __init__(self, config: LLMConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        width, sizes = config.hidden_size, config.delta or DeltaSizes()
        self.linear_attn = GatedDelta(width, sizes, config.rms_norm_eps, operations, **place)
        self.mlp = MLP(config, operations, **place)
        self.input_layernorm = norm_of(width, config, **place)
        self.post_attention_layernorm = norm_of(width, config, **place)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        turn: tuple[Tensor, Tensor],
        cache: DeltaCache | None = None,
    ) -> Tensor:
        del mask, turn  # it only knows what came before
        x = x + self.linear_attn(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token table, layers, last norm."""

    def __init__(self, config: LLMConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = operations.Embedding(config.vocab_size, config.hidden_size, **place)
        usual = GemmaLayer if config.is_gemma else Layer
        kinds: list[type[nn.Module]] = [
            DeltaLayer if number in config.delta_layers else usual
            for number in range(config.num_hidden_layers)
        ]
        self.layers = nn.ModuleList(kind(config, operations, **place) for kind in kinds)
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
        deep: Sequence[DeepRows] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Final states ``[B, L, D]`` and others.

        Args:
            wanted: A number: the states after that layer (negative from the end). "all", or some
                numbers: those before each layer and the final ones, stacked ``[B, n, L, D]``.
            places: ``[3, L]`` in time, height and width; None: tokens are counted.
            deep: What is added to states of the first text.
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
            x = with_deep(layer(x, *looks[self.config.window(number)]), number, deep)
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

    def new_cache(self, most: int) -> KeyValueCache:
        """What layers keep of a text of so many tokens at most, before the first."""
        return KeyValueCache(len(self.layers), most, self.config.delta_layers)

    def extend(
        self,
        x: Tensor,
        cache: KeyValueCache,
        places: Tensor | None = None,
        blocks: Sequence[tuple[int, int]] = (),
        deep: Sequence[DeepRows] = (),
    ) -> Tensor:
        """Normed states ``[1, L, D]`` of tokens that follow those of a cache, which takes them in.

        Args:
            x: Rows of the token table, ``[1, L, D]``.
            places: Where the tokens are, as in `forward`; None: behind what came before.
            blocks: Begin and end, among these tokens, of those that all see each other.
            deep: What is added to states, at places among these tokens.
        """
        if places is None:
            places = torch.arange(cache.next_place, cache.next_place + x.shape[1])
        if self.config.is_gemma:
            x = x * self.config.hidden_size**0.5
        past = cache.length
        looks = {
            window: (mask_behind(x, past, window, blocks), self._turn(x, places, window))
            for window in {self.config.window(number) for number in range(len(self.layers))}
        }
        for number, layer in enumerate(self.layers):
            seen = layer(x, *looks[self.config.window(number)], cache.layers[number])
            x = with_deep(seen, number, deep)
        cache.next_place = int(places.max()) + 1
        return self.norm(x)

    def _turn(self, x: Tensor, places: Tensor, window: int) -> tuple[Tensor, Tensor]:
        return rotations(places.to(x.device), self.config, x.dtype, is_near=window > 0)

    def _looks(
        self, x: Tensor, attention_mask: Tensor | None, places: Tensor | None
    ) -> dict[int, tuple[Tensor, tuple[Tensor, Tensor]]]:
        """Mask and rotations of the layers, by how many tokens they see."""
        if places is None:
            places = torch.arange(x.shape[1])
        windows = {self.config.window(number) for number in range(len(self.layers))}
        return {
            window: (
                mask_of(x, attention_mask, window),
                self._turn(x, places, window),
            )
            for window in windows
        }


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
        self.lm_head: nn.Module | None = None
        if config.lm_head:
            sizes = config.hidden_size, config.vocab_size
            head: Any = operations.Linear(*sizes, bias=False, dtype=dtype, device=device)
            head.seldom_used = True  # by those who write, not by those who encode
            self.lm_head = head

    def scores(self, states: Tensor) -> Tensor:
        """Scores of all words ``[..., words]`` float32 to come next, by normed states
        ``[..., D]``.
        """
        if self.lm_head is not None:
            scores = self.lm_head(states)
        else:
            table = self.model.embed_tokens
            weight, _, token = cast_bias_weight(table, states, offloadable=True)
            scores = functional.linear(states, weight)
            uncast_bias_weight(table, weight, None, token)
        scores = scores.float()
        cap = self.config.word_cap
        return scores if cap is None else cap * (scores / cap).tanh()

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
            self.deep_rows(embeds_info),
        )

    def blocks(self, embeds_info: Any) -> list[tuple[int, int]]:
        """Begin and end of rows that all see each other, in models that take more than text."""
        del embeds_info
        return []

    def deep_rows(self, embeds_info: Any) -> list[DeepRows]:
        """What pictures add to states of the first layers, in models that have that."""
        del embeds_info
        return []

    def places(self, embeds_info: Any, length: int) -> Tensor | None:
        """Places of tokens for `Decoder`, in models that take more than text."""
        del embeds_info, length
        return None
