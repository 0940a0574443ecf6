"""The text tower of CLIP: a causal transformer whose state at the end token describes the text.

Keys follow the published files: ``text_model.embeddings``, ``text_model.encoder.layers.N``,
``text_model.final_layer_norm``, ``text_projection``.
Source: Radford et al. 2021, https://arxiv.org/abs/2103.00020.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.nn import attention
from comfy.nn.config import NetworkConfig

DEFAULT_POSITIONS = 77


def quick_gelu(x: Tensor) -> Tensor:
    """``x * sigmoid(1.702 x)``, the approximation OpenAI's CLIP was trained with."""
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": tanh_gelu,
}


@dataclass(frozen=True)
class ClipTextConfig(NetworkConfig):
    """Sizes of one text tower; defaults are those of CLIP ViT-L/14."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    hidden_act: str = "quick_gelu"
    max_position_embeddings: int = DEFAULT_POSITIONS
    vocab_size: int = 49408
    eos_token_id: int = 49407

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by "
                f"{self.num_attention_heads} attention heads"
            )
        if self.hidden_act not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"unknown activation {self.hidden_act!r}; known: {known}")


class CLIPAttention(nn.Module):
    """Multi-head self-attention with biases."""

    def __init__(self, width: int, heads: int, dtype: Any, device: Any, operations: Any) -> None:
        super().__init__()
        self.heads = heads

        def linear() -> nn.Module:
            return operations.Linear(width, width, bias=True, dtype=dtype, device=device)

        self.q_proj, self.k_proj, self.v_proj = linear(), linear(), linear()
        self.out_proj = linear()

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        optimized_attention: attention.AttentionFunction | None = None,
    ) -> Tensor:
        attend = optimized_attention or attention.optimized_attention
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.out_proj(attend(q, k, v, self.heads, mask))


class CLIPMLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(
        self, width: int, inner: int, activation: str, dtype: Any, device: Any, operations: Any
    ) -> None:
        super().__init__()
        self.fc1 = operations.Linear(width, inner, bias=True, dtype=dtype, device=device)
        self.activation = ACTIVATIONS[activation]
        self.fc2 = operations.Linear(inner, width, bias=True, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class CLIPLayer(nn.Module):
    """Attention and MLP, each normalised before and added after."""

    def __init__(
        self,
        width: int,
        heads: int,
        inner: int,
        activation: str,
        dtype: Any,
        device: Any,
        operations: Any,
    ) -> None:
        super().__init__()
        place = (dtype, device, operations)
        self.layer_norm1 = operations.LayerNorm(width, dtype=dtype, device=device)
        self.self_attn = CLIPAttention(width, heads, *place)
        self.layer_norm2 = operations.LayerNorm(width, dtype=dtype, device=device)
        self.mlp = CLIPMLP(width, inner, activation, *place)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        optimized_attention: attention.AttentionFunction | None = None,
    ) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), mask, optimized_attention)
        return x + self.mlp(self.layer_norm2(x))


class CLIPEncoder(nn.Module):
    """The layers, with a look at the state after one of them (or all)."""

    def __init__(
        self,
        num_layers: int,
        width: int,
        heads: int,
        inner: int,
        activation: str,
        dtype: Any,
        device: Any,
        operations: Any,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            CLIPLayer(width, heads, inner, activation, dtype, device, operations)
            for _ in range(num_layers)
        )

    def forward(
        self, x: Tensor, mask: Tensor | None = None, intermediate_output: int | str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Final state and that after layer ``intermediate_output`` (negative counts from the end).

        With ``"all"`` the second is every layer's input and the final state, stacked ``[B, n, L,
        D]``.
        """
        attend = attention.optimized_attention_for_device(
            x.device, mask=mask is not None, small_input=True
        )
        wanted = intermediate_output
        if isinstance(wanted, int) and wanted < 0:
            wanted = len(self.layers) + wanted
        states: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            if wanted == "all":
                states.append(x)
            x = layer(x, mask, attend)
            if number == wanted:
                states.append(x.clone())
        if wanted == "all":
            return x, torch.stack([*states, x], dim=1)
        return x, states[0] if states else None


class CLIPEmbeddings(nn.Module):
    """Token and position embeddings, added."""

    def __init__(
        self, width: int, vocabulary: int, positions: int, dtype: Any, device: Any, operations: Any
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        self.token_embedding = operations.Embedding(vocabulary, width, **place)
        self.position_embedding = operations.Embedding(positions, width, **place)

    def forward(self, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.place(self.token_embedding(tokens, out_dtype=dtype))

    def place(self, x: Tensor) -> Tensor:
        """Add positions to embedded tokens ``[B, L, D]``; raises ValueError when L is too long."""
        positions = self.position_embedding.num_embeddings
        if x.shape[1] > positions:
            raise ValueError(
                f"{x.shape[1]} tokens in a chunk, but this text encoder has {positions} positions"
            )
        numbers = torch.arange(x.shape[1], device=x.device)
        return x + self.position_embedding(numbers, out_dtype=x.dtype)


class CLIPTextTransformer(nn.Module):
    """The tower without its projection."""

    def __init__(self, config: ClipTextConfig, dtype: Any, device: Any, operations: Any) -> None:
        super().__init__()
        self.config = config
        self.embeddings = CLIPEmbeddings(
            config.hidden_size,
            config.vocab_size,
            config.max_position_embeddings,
            dtype,
            device,
            operations,
        )
        self.encoder = CLIPEncoder(
            config.num_hidden_layers,
            config.hidden_size,
            config.num_attention_heads,
            config.intermediate_size,
            config.hidden_act,
            dtype,
            device,
            operations,
        )
        self.final_layer_norm = operations.LayerNorm(config.hidden_size, dtype=dtype, device=device)

    def forward(
        self,
        input_tokens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        embeds: Tensor | None = None,
        num_tokens: Sequence[int] | None = None,
        intermediate_output: int | str | None = None,
        final_layer_norm_intermediate: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Final state ``[B, L, D]``, an intermediate one (or None) and the pooled state ``[B,
        D]``."""
        if embeds is not None:
            x = self.embeddings.place(embeds.to(dtype))
        else:
            x = self.embeddings(input_tokens, dtype)
        mask = _mask(attention_mask, x)
        x, between = self.encoder(x, mask, intermediate_output)
        x = self.final_layer_norm(x)
        if between is not None and final_layer_norm_intermediate:
            between = self.final_layer_norm(between)
        return (
            x,
            between,
            x[torch.arange(x.shape[0], device=x.device), self._ends(input_tokens, num_tokens, x)],
        )

    def _ends(self, tokens: Tensor | None, num_tokens: Sequence[int] | None, x: Tensor) -> Tensor:
        """Position of each text's end token."""
        if num_tokens is not None:
            return torch.tensor([count - 1 for count in num_tokens], device=x.device)
        if tokens is None:
            raise ValueError("embeds come without num_tokens: the end of each text is unknown")
        is_end = tokens.to(device=x.device) == self.config.eos_token_id
        return is_end.int().argmax(dim=-1)


def _mask(attention_mask: Tensor | None, x: Tensor) -> Tensor:
    """Additive mask: no position sees a later one, nor one whose ``attention_mask [B, L]`` is 0."""
    length, floor = x.shape[1], -torch.finfo(x.dtype).max
    causal = torch.full((length, length), floor, dtype=x.dtype, device=x.device).triu_(1)
    if attention_mask is None:
        return causal
    hidden = attention_mask.to(x.device)[:, None, None, :] == 0
    return causal.expand(x.shape[0], 1, length, length).masked_fill(hidden, floor)


class CLIPTextModel(nn.Module):
    """The text tower with the projection of its pooled state into the space shared with images."""

    def __init__(
        self,
        config_dict: Mapping[str, Any],
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        self.config = ClipTextConfig.from_options(config_dict)
        self.num_layers = self.config.num_hidden_layers
        self.text_model = CLIPTextTransformer(self.config, dtype, device, operations)
        width = self.config.hidden_size
        self.text_projection = operations.Linear(
            width, width, bias=False, dtype=dtype, device=device
        )
        self.dtype = dtype
        if self.text_projection.weight.device.type != "meta":
            nn.init.eye_(self.text_projection.weight)  # files of plain encoders have none

    def get_input_embeddings(self) -> nn.Module:
        """The token table."""
        return self.text_model.embeddings.token_embedding

    def set_input_embeddings(self, embeddings: nn.Module) -> None:
        """Replace the token table."""
        self.text_model.embeddings.token_embedding = embeddings

    def forward(
        self, *args: Any, embeds_info: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Final state, intermediate state, projected pooled state, pooled state."""
        del embeds_info  # of encoders that take images
        last, between, pooled = self.text_model(*args, **kwargs)
        return last, between, self.text_projection(pooled), pooled
