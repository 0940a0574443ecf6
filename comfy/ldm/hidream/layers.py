"""The layers of HiDream; `comfy.ldm.hidream.model` puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy.ldm.common_dit import RMSNorm
from comfy.ldm.flux.math import apply_rope
from comfy.nn import attention, patches
from comfy.nn.experts import MoEGate, mixed

NORM_EPS, HEAD_EPS = 1e-6, 1e-5
INNER_MULTIPLE = 256
Options = dict[str, Any]


def inner_width(hidden: int) -> int:
    """Channels inside a feed-forward with a gate, in whole blocks of 256."""
    return -(-int(2 * hidden / 3) // INNER_MULTIPLE) * INNER_MULTIPLE


class FeedForwardSwiGLU(nn.Module):
    """Feed-forward with a gate."""

    def __init__(self, width: int, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.w1 = operations.Linear(width, inner, bias=False, **place)
        self.w2 = operations.Linear(inner, width, bias=False, **place)
        self.w3 = operations.Linear(width, inner, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class MOEFeedForwardSwiGLU(nn.Module):
    """Experts of which each token takes some, and one that all take."""

    def __init__(
        self,
        width: int,
        inner: int,
        shared: int,
        experts: int,
        chosen: int,
        operations: Any,
        **place: Any,
    ) -> None:
        super().__init__()
        self.shared_experts = FeedForwardSwiGLU(width, shared, operations, **place)
        self.experts = nn.ModuleList(
            FeedForwardSwiGLU(width, inner, operations, **place) for _ in range(experts)
        )
        self.gate = MoEGate(width, experts, chosen, **place)

    def forward(self, x: Tensor) -> Tensor:
        return mixed(x, self.gate, self.experts) + self.shared_experts(x)


class HiDreamAttention(nn.Module):
    """Attention of one or two streams; weights of the text's end in ``_t``."""

    to_out: nn.Module
    to_out_t: nn.Module

    def __init__(
        self, width: int, heads: int, has_text: bool, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.heads, self.has_text = heads, has_text
        for ending in ("", "_t") if has_text else ("",):
            for name in ("to_q", "to_k", "to_v", "to_out"):
                setattr(self, name + ending, operations.Linear(width, width, **place))
            for name in ("q_rms_norm", "k_rms_norm"):
                setattr(self, name + ending, RMSNorm(width, HEAD_EPS, **place))

    def _projected(self, x: Tensor, ending: str) -> tuple[Tensor, ...]:
        def part(name: str) -> Tensor:
            out: Tensor = getattr(self, name + ending)(x)
            return out

        q = getattr(self, f"q_rms_norm{ending}")(part("to_q"))
        k = getattr(self, f"k_rms_norm{ending}")(part("to_k"))
        return tuple(t.unflatten(-1, (self.heads, -1)) for t in (q, k, part("to_v")))

    def forward(
        self,
        img: Tensor,
        txt: Tensor | None,
        freqs: Tensor,
        options: Options,
        picture: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        """``img [B, L, D]`` and ``txt [B, M, D]`` at rotations ``freqs``.

        Args:
            picture: Start and stop of the picture's tokens.
        """
        parts = [self._projected(img, "")]
        if txt is not None:
            parts.append(self._projected(txt, "_t"))
        q, k, v = (torch.cat(some, dim=1).transpose(1, 2) for some in zip(*parts))
        q, k = apply_rope(q, k, freqs)
        seen = attention.optimized_attention(
            q, k, v, self.heads, skip_reshape=True, transformer_options=options
        )
        seen = patches.attention_output(seen, options, self.heads, picture)
        if txt is None:
            return self.to_out(seen), None
        of_picture, of_text = seen.split([img.shape[1], txt.shape[1]], dim=1)
        return self.to_out(of_picture), self.to_out_t(of_text)


class Sizes:
    """Sizes that all layers share."""

    def __init__(
        self, width: int, heads: int, experts: int, chosen: int, inner: int, shared: int
    ) -> None:
        self.width, self.heads, self.experts, self.chosen = width, heads, experts, chosen
        self.inner, self.shared = inner, shared


class _Block(nn.Module):
    compiles_alone = True

    def __init__(self, sizes: Sizes, has_text: bool, operations: Any, **place: Any) -> None:
        super().__init__()
        width, norm = sizes.width, {"elementwise_affine": False, "eps": NORM_EPS, **place}
        self.changes = 12 if has_text else 6
        linear = operations.Linear(width, self.changes * width, **place)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), linear)
        self.norm1_i, self.norm3_i = (operations.LayerNorm(width, **norm) for _ in range(2))
        self.attn1 = HiDreamAttention(width, sizes.heads, has_text, operations, **place)
        self.ff_i = MOEFeedForwardSwiGLU(
            width, sizes.inner, sizes.shared, sizes.experts, sizes.chosen, operations, **place
        )
        if has_text:
            self.norm1_t, self.norm3_t = (operations.LayerNorm(width, **norm) for _ in range(2))
            self.ff_t = FeedForwardSwiGLU(width, sizes.inner, operations, **place)


class HiDreamImageSingleTransformerBlock(_Block):
    """A layer over all tokens in one stream."""

    def __init__(self, sizes: Sizes, operations: Any, **place: Any) -> None:
        super().__init__(sizes, False, operations, **place)

    def forward(
        self, x: Tensor, vec: Tensor, freqs: Tensor, options: Options, picture: Sequence[int]
    ) -> Tensor:
        changes = self.adaLN_modulation(vec)[:, None].chunk(self.changes, dim=-1)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = changes
        normed = self.norm1_i(x) * (1 + scale) + shift
        x = x + gate * self.attn1(normed, None, freqs, options, picture)[0]
        return x + gate_mlp * self.ff_i(self.norm3_i(x) * (1 + scale_mlp) + shift_mlp)


class HiDreamImageTransformerBlock(_Block):
    """A layer over picture and text, each with weights of its own."""

    def __init__(self, sizes: Sizes, operations: Any, **place: Any) -> None:
        super().__init__(sizes, True, operations, **place)

    def forward(
        self,
        img: Tensor,
        txt: Tensor,
        vec: Tensor,
        freqs: Tensor,
        options: Options,
        picture: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        changes = self.adaLN_modulation(vec)[:, None].chunk(self.changes, dim=-1)
        of_picture, of_text = changes[:6], changes[6:]
        normed = self.norm1_i(img) * (1 + of_picture[1]) + of_picture[0]
        normed_text = self.norm1_t(txt) * (1 + of_text[1]) + of_text[0]
        seen, seen_text = self.attn1(normed, normed_text, freqs, options, picture)
        img, txt = img + of_picture[2] * seen, txt + of_text[2] * seen_text
        normed = self.norm3_i(img) * (1 + of_picture[4]) + of_picture[3]
        normed_text = self.norm3_t(txt) * (1 + of_text[4]) + of_text[3]
        img = img + of_picture[5] * self.ff_i(normed)
        return img, txt + of_text[5] * self.ff_t(normed_text)


class HiDreamImageBlock(nn.Module):
    """A layer under the published key ``block``."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        return self.block(*args)
