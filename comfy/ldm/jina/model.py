"""The text tower of Jina CLIP v2: XLM-RoBERTa whose tokens are placed by rotations.

A token reads the whole text; each layer is normalised behind. Keys follow the published files:
``embeddings``, ``emb_ln``, ``encoder.layers.N.mixer`` and ``.mlp``.
Source: Koukounas et al. 2024, https://arxiv.org/abs/2412.08802, and Sturua et al. 2024,
https://arxiv.org/abs/2409.10173.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.nn import attention
from comfy.nn.config import NetworkConfig


@dataclass(frozen=True)
class JinaConfig(NetworkConfig):
    """Sizes of one encoder; defaults are those of Jina CLIP v2."""

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    type_vocab_size: int = 1
    vocab_size: int = 250002
    rotary_emb_base: float = 20000.0
    layer_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} does not make heads of an even number of channels "
                f"for {self.num_attention_heads} attention heads"
            )


def rotations(length: int, head: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles ``place * base^(-2i / head)``, ``[length, head / 2]``."""
    steps = torch.arange(0, head, 2, dtype=torch.float32, device=device) / head
    places = torch.arange(length, dtype=torch.float32, device=device)
    angles = places[:, None] * (1.0 / base**steps)
    return angles.cos(), angles.sin()


def turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """``x [B, heads, L, D]`` with channel i turned against channel i + D / 2."""
    cos, sin = (part.to(x.dtype) for part in turns)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Mixer(nn.Module):
    """Attention among the tokens."""

    def __init__(self, config: JinaConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.Wqkv = operations.Linear(width, 3 * width, **place)
        self.out_proj = operations.Linear(width, width, **place)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Tokens ``[B, L, D]``; ``mask`` is added to the scores."""
        q, k, v = self.Wqkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = attention.optimized_attention(
            turned(q, turns), turned(k, turns), v, self.heads, mask, skip_reshape=True
        )
        made: Tensor = self.out_proj(seen)
        return made


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, config: JinaConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        self.fc1 = operations.Linear(config.hidden_size, config.intermediate_size, **place)
        self.fc2 = operations.Linear(config.intermediate_size, config.hidden_size, **place)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return made


class Layer(nn.Module):
    """Attention and feed-forward, each added and then normalised."""

    def __init__(self, config: JinaConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        self.mixer = Mixer(config, operations, **place)
        self.norm1 = _norm(config, operations, place)
        self.mlp = FeedForward(config, operations, **place)
        self.norm2 = _norm(config, operations, place)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        x = self.norm1(self.mixer(x, turns, mask) + x)
        made: Tensor = self.norm2(self.mlp(x) + x)
        return made


class _Tower(nn.Module):
    """The encoder without its outer name."""

    def __init__(self, config: JinaConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        rows = {"word": config.vocab_size, "token_type": config.type_vocab_size}
        tables = {
            f"{name}_embeddings": operations.Embedding(count, config.hidden_size, **place)
            for name, count in rows.items()
        }
        self.embeddings = nn.ModuleDict(tables)
        self.emb_ln = _norm(config, operations, place)
        layers = (Layer(config, operations, **place) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})


class JinaTextModel(nn.Module):
    """The encoder with its token table."""

    def __init__(
        self,
        config_dict: Mapping[str, Any],
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        config = self.config = JinaConfig.from_options(config_dict)
        self.num_layers, self.dtype = config.num_hidden_layers, dtype
        self.model = _Tower(config, operations, dtype=dtype, device=device)

    def get_input_embeddings(self) -> Any:
        """The token table."""
        return self.model.embeddings["word_embeddings"]

    def set_input_embeddings(self, embeddings: nn.Module) -> None:
        """Replace the token table."""
        self.model.embeddings["word_embeddings"] = embeddings

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
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """States of tokens ``[B, L]`` or of embedded ones ``[B, L, D]``, those after a layer
        (negative from the end; "all": stacked), and the mean of those that are no padding
        ``[B, D]``.
        """
        del num_tokens, embeds_info, final_layer_norm_intermediate  # layers end in their norm
        x = self.get_input_embeddings()(input_ids, out_dtype=dtype) if embeds is None else embeds
        only = torch.zeros(1, dtype=torch.long, device=x.device)  # texts are of one kind
        kinds: Any = self.model.embeddings["token_type_embeddings"]
        x = self.model.emb_ln(x + kinds(only, out_dtype=x.dtype))
        mask = None if attention_mask is None else _added_to_scores(attention_mask, x)
        layers: Any = self.model.encoder["layers"]
        config, wanted = self.config, intermediate_output
        head = config.hidden_size // config.num_attention_heads
        turns = rotations(x.shape[1], head, config.rotary_emb_base, x.device)
        states: list[Tensor] = []
        for number, layer in enumerate(layers):
            if wanted == "all":
                states.append(x)
            x = layer(x, turns, mask)
            if isinstance(wanted, int) and number == wanted % len(layers):
                states.append(x)
        between = torch.stack([*states, x], dim=1) if wanted == "all" else None
        if between is None and states:
            between = states[0]
        return x, between, _mean(x, attention_mask)


def _added_to_scores(mask: Tensor, like: Tensor) -> Tensor:
    """``[B, 1, 1, L]``: 0 where a text's mask ``[B, L]`` has 1, and very low where it has 0."""
    hidden = (mask == 0).to(like.device)[:, None, None]
    return torch.zeros_like(hidden, dtype=like.dtype).masked_fill(
        hidden, -torch.finfo(like.dtype).max
    )


def _mean(states: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return states.mean(dim=1)
    shares = mask.to(states)
    return (states * shares[..., None]).sum(dim=1) / shares.sum(dim=-1, keepdim=True)


def _norm(config: JinaConfig, operations: Any, place: Mapping[str, Any]) -> Any:
    return operations.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, **place)
