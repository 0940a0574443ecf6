"""BERT: a transformer that reads a whole text at once, with a norm after each part of a layer.

Keys follow the published files: ``bert.embeddings``, ``bert.encoder.layer.N.attention.self``,
``.attention.output``, ``.intermediate``, ``.output``.
Source: Devlin et al. 2018, https://arxiv.org/abs/1810.04805.
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
class BertConfig(NetworkConfig):
    """Sizes of one encoder; defaults are those of the Chinese RoBERTa of Hunyuan-DiT."""

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    vocab_size: int = 47020
    layer_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by "
                f"{self.num_attention_heads} attention heads"
            )


class Embeddings(nn.Module):
    """Tokens, their places and the kind of their sentence, added and normalised."""

    def __init__(self, config: BertConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        width = config.hidden_size

        def table(rows: int) -> nn.Module:
            return operations.Embedding(rows, width, **place)

        self.word_embeddings = table(config.vocab_size)
        self.position_embeddings = table(config.max_position_embeddings)
        self.token_type_embeddings = table(config.type_vocab_size)
        self.LayerNorm = operations.LayerNorm(width, eps=config.layer_norm_eps, **place)

    def forward(self, x: Tensor) -> Tensor:
        """Embedded tokens ``x [B, L, D]`` of one sentence, placed.

        Raises:
            ValueError: The text is longer than the encoder has places for.
        """
        table: Any = self.position_embeddings
        places, length = table.num_embeddings, x.shape[1]
        if length > places:
            raise ValueError(f"a text of {length} tokens for BERT, which has {places} places")
        numbers = torch.arange(length, device=x.device)
        x = x + self.position_embeddings(numbers, out_dtype=x.dtype)
        return self.LayerNorm(x + self.token_type_embeddings(numbers * 0, out_dtype=x.dtype))


class Output(nn.Module):
    """A projection, added to what it was made of, and a norm."""

    def __init__(self, config: BertConfig, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.dense = operations.Linear(inner, width, **place)
        self.LayerNorm = operations.LayerNorm(width, eps=config.layer_norm_eps, **place)

    def forward(self, made: Tensor, x: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(made) + x)


class Layer(nn.Module):
    """Attention among the tokens, and feed-forward."""

    def __init__(self, config: BertConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        names = ("query", "key", "value")
        projections = {name: operations.Linear(width, width, **place) for name in names}
        self.attention = nn.ModuleDict(
            {
                "self": nn.ModuleDict(projections),
                "output": Output(config, width, operations, **place),
            }
        )
        self.intermediate = nn.ModuleDict({"dense": operations.Linear(width, inner, **place)})
        self.output = Output(config, inner, operations, **place)
        self.heads = config.num_attention_heads

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        own: Any = self.attention["self"]
        q, k, v = own["query"](x), own["key"](x), own["value"](x)
        seen = attention.optimized_attention(q, k, v, self.heads, mask)
        x = self.attention["output"](seen, x)
        return self.output(F.gelu(self.intermediate["dense"](x)), x)


class _Bert(nn.Module):
    """The encoder without its outer name."""

    def __init__(self, config: BertConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, operations, **place)
        layers = (Layer(config, operations, **place) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})


class BertModel(nn.Module):
    """The encoder with its token table."""

    def __init__(
        self,
        config_dict: Mapping[str, Any],
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        config = self.config = BertConfig.from_options(config_dict)
        self.num_layers, self.dtype = config.num_hidden_layers, dtype
        self.bert = _Bert(config, operations, dtype=dtype, device=device)

    def get_input_embeddings(self) -> nn.Module:
        """The token table."""
        return self.bert.embeddings.word_embeddings

    def set_input_embeddings(self, embeddings: nn.Module) -> None:
        """Replace the token table."""
        self.bert.embeddings.word_embeddings = embeddings

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
        """States of tokens ``[B, L]`` or of embedded ones ``[B, L, D]``, and those after a layer
        (negative from the end; "all": stacked); there is no pooled state.
        """
        del num_tokens, embeds_info, final_layer_norm_intermediate  # layers end in their norm
        x = self.get_input_embeddings()(input_ids, out_dtype=dtype) if embeds is None else embeds
        mask = None
        if attention_mask is not None:
            hidden = (attention_mask == 0).to(x.device)[:, None, None, :]
            mask = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device)
            mask = mask.masked_fill(hidden, -torch.finfo(x.dtype).max)
        x = self.bert.embeddings(x)
        layers: Any = self.bert.encoder["layer"]
        wanted = intermediate_output
        if isinstance(wanted, int) and wanted < 0:
            wanted = len(layers) + wanted
        states: list[Tensor] = []
        for number, layer in enumerate(layers):
            if wanted == "all":
                states.append(x)
            x = layer(x, mask)
            if number == wanted:
                states.append(x)
        if wanted == "all":
            return x, torch.stack([*states, x], dim=1)
        return x, states[0] if states else None
