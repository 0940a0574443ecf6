"""The layers of Hunyuan3D 2.1; `comfy.ldm.hunyuan3dv2_1.hunyuandit` puts them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy.ldm.common_dit import RMSNorm
from comfy.nn import attention, patches
from comfy.nn.experts import MoEGate, mixed

NORM_EPS = 1e-6
Options = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes that all layers share.

    Attributes:
        width, heads, inner: Of the layers; inner is the width of a feed-forward.
        seen_width: Width of the picture's states.
        qkv_bias, qk_norm: Whether projections of the attentions have a bias, and whether queries
            and keys are normed head by head.
        experts, chosen: Feed-forwards of a layer that has several, and how many a token takes.
    """

    width: int
    heads: int
    inner: int
    seen_width: int
    qkv_bias: bool
    qk_norm: bool
    experts: int
    chosen: int

    def __post_init__(self) -> None:
        if self.width % self.heads or not 0 < self.chosen <= self.experts:
            raise ValueError(
                f"heads divide the width, and a token takes some of the experts; got {self.heads} "
                f"heads of {self.width} channels, {self.chosen} of {self.experts} experts"
            )


class Attention(nn.Module):
    """Attention of the tokens to each other, or to a picture's states.

    What the projections make is put side by side and then cut into heads: of a head's channels the
    first third is its query, the next its key, the last its value, whichever projection made them.
    Of states only keys and values come, in halves. The network was trained so.
    """

    def __init__(self, sizes: Sizes, seen_width: int | None, operations: Any, **place: Any) -> None:
        super().__init__()
        width, self.heads, self.is_cross = sizes.width, sizes.heads, seen_width is not None
        bias = {"bias": sizes.qkv_bias, **place}
        self.to_q = operations.Linear(width, width, **bias)
        self.to_k = operations.Linear(seen_width or width, width, **bias)
        self.to_v = operations.Linear(seen_width or width, width, **bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if sizes.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(width // sizes.heads, NORM_EPS, **place) for _ in range(2)
            )
        self.out_proj = operations.Linear(width, width, **place)

    def forward(self, x: Tensor, seen: Tensor | None, options: Options) -> Tensor:
        """Tokens ``[B, L, D]``, states ``[B, N, S]`` where it looks at some."""
        if self.is_cross:
            q = self._heads(self.to_q(x))
            k, v = self._heads(self.to_k(seen), self.to_v(seen)).chunk(2, dim=-1)
        else:
            q, k, v = self._heads(self.to_q(x), self.to_k(x), self.to_v(x)).chunk(3, dim=-1)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        made = attention.optimized_attention(
            q, k, v, self.heads, skip_reshape=True, transformer_options=options
        )
        name = patches.CROSS_OUTPUT if self.is_cross else patches.OUTPUT
        shapes = (1, x.shape[1])  # the first token is the time
        made = patches.attention_output(made, options, self.heads, shapes, name)
        projected: Tensor = self.out_proj(made)
        return projected

    def _heads(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, dim=-1).unflatten(-1, (self.heads, -1))


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, sizes: Sizes, operations: Any, **place: Any) -> None:
        super().__init__()
        self.fc1 = operations.Linear(sizes.width, sizes.inner, **place)
        self.fc2 = operations.Linear(sizes.inner, sizes.width, **place)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.fc2(functional.gelu(self.fc1(x)))
        return made


class Projection(nn.Module):
    """A linear layer under the published key ``proj``, and GELU."""

    def __init__(self, width_in: int, width_out: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.proj = operations.Linear(width_in, width_out, **place)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.proj(x))


class Expert(nn.Module):
    """As `FeedForward`, under the keys that experts have."""

    def __init__(self, sizes: Sizes, operations: Any, **place: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(
            Projection(sizes.width, sizes.inner, operations, **place),
            nn.Identity(),  # where training drops channels
            operations.Linear(sizes.inner, sizes.width, **place),
        )

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.net(x)
        return made


class MoEBlock(nn.Module):
    """Feed-forwards of which each token takes some, and one that all take."""

    def __init__(self, sizes: Sizes, operations: Any, **place: Any) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            Expert(sizes, operations, **place) for _ in range(sizes.experts)
        )
        self.gate = MoEGate(sizes.width, sizes.experts, sizes.chosen, **place)
        self.shared_experts = Expert(sizes, operations, **place)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = mixed(x, self.gate, self.experts) + self.shared_experts(x)
        return made


class HunYuanDiTBlock(nn.Module):
    """Attention among the tokens, attention to the picture and a feed-forward.

    Args:
        has_skip: Whether it is given the tokens of an earlier layer, too.
        has_experts: Whether its feed-forward is a choice of several.
    """

    compiles_alone = True

    def __init__(
        self, sizes: Sizes, has_skip: bool, has_experts: bool, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        width = sizes.width
        self.norm1, self.norm2, self.norm3 = (_norm(width, operations, place) for _ in range(3))
        self.attn1 = Attention(sizes, None, operations, **place)
        self.attn2 = Attention(sizes, sizes.seen_width, operations, **place)
        self.skip_linear: nn.Module | None = None
        if has_skip:
            self.skip_norm = _norm(width, operations, place)
            self.skip_linear = operations.Linear(2 * width, width, **place)
        if has_experts:
            self.moe = MoEBlock(sizes, operations, **place)
        else:
            self.mlp = FeedForward(sizes, operations, **place)
        self.has_experts = has_experts

    def forward(self, x: Tensor, seen: Tensor, skip: Tensor | None, options: Options) -> Tensor:
        """Tokens ``[B, 1 + L, D]``, states ``[B, N, S]``, tokens of an earlier layer or None."""
        if self.skip_linear is not None:
            if skip is None:
                raise ValueError("this layer takes the tokens of an earlier one, and got none")
            x = self.skip_norm(self.skip_linear(torch.cat([skip, x], dim=-1)))
        x = x + self.attn1(self.norm1(x), None, options)
        x = x + self.attn2(self.norm2(x), seen, options)
        made: Tensor = (self.moe if self.has_experts else self.mlp)(self.norm3(x))
        return x + made


class FinalLayer(nn.Module):
    """A norm and the projection to what tokens consist of; the token of the time ends here."""

    def __init__(self, width: int, channels: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.norm_final = _norm(width, operations, place)
        self.linear = operations.Linear(width, channels, **place)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 1 + L, D]`` to ``[B, L, C]``."""
        made: Tensor = self.linear(self.norm_final(x)[:, 1:])
        return made


def _norm(width: int, operations: Any, place: Options) -> Any:
    return operations.LayerNorm(width, eps=NORM_EPS, **place)
