"""Layers of the transformers of LTX video.

Source: HaCohen et al. 2024, https://arxiv.org/abs/2501.00103.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.common_dit import RMSNorm, rms_norm
from comfy.ldm.lightricks.rotations import Turn, apply_rotary_emb
from comfy.nn import attention, patches
from comfy.nn.timesteps import timestep_embedding

TIME_WAVES, TIME_PERIOD = 256, 10000.0
NORM_EPS, QK_EPS = 1e-6, 1e-5
Options = dict[str, Any]


class CrossAttention(nn.Module):
    """Attention to the tokens themselves or to others, queries and keys normed as a whole.

    Args:
        query_dim, context_dim: Widths of the tokens, and of those they look at (None: the same).
        heads, dim_head: Number of heads and their width.
        eps: Of the norms.
        is_patched: Whether custom nodes may change what the heads give.
        apply_gated_attention: Whether each token says how much of what each head gives it takes.
    """

    def __init__(
        self,
        query_dim: int,
        context_dim: int | None = None,
        heads: int = 8,
        dim_head: int = 64,
        dropout: float = 0.0,
        attn_precision: torch.dtype | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        *,
        eps: float = QK_EPS,
        is_patched: bool = False,
        apply_gated_attention: bool = False,
    ) -> None:
        super().__init__()
        del dropout  # of training
        place = {"dtype": dtype, "device": device}
        linear, inner = operations.Linear, heads * dim_head
        self.heads, self.dim_head, self.is_patched = heads, dim_head, is_patched
        self.attn_precision = attn_precision
        context_dim = query_dim if context_dim is None else context_dim
        self.q_norm, self.k_norm = (RMSNorm(inner, eps, **place) for _ in range(2))
        self.to_q = linear(query_dim, inner, **place)
        self.to_k, self.to_v = (linear(context_dim, inner, **place) for _ in range(2))
        self.to_out = nn.Sequential(linear(inner, query_dim, **place), nn.Identity())
        self.to_gate_logits = linear(query_dim, heads, **place) if apply_gated_attention else None

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        pe: Turn | None = None,
        k_pe: Turn | None = None,
        transformer_options: Options | None = None,
    ) -> Tensor:
        """What ``x [B, N, D]`` makes of others, which turn as it does unless told otherwise."""
        seen = x if context is None else context
        q, k, v = self.q_norm(self.to_q(x)), self.k_norm(self.to_k(seen)), self.to_v(seen)
        if pe is not None:
            q, k = apply_rotary_emb(q, pe), apply_rotary_emb(k, pe if k_pe is None else k_pe)
        out = attention.optimized_attention(
            q, k, v, self.heads, mask=mask, attn_precision=self.attn_precision,
            transformer_options=transformer_options,
        )  # fmt: skip
        if self.is_patched:
            out = patches.attention_output(out, transformer_options, self.heads, (0, x.shape[1]))
        if self.to_gate_logits is not None:
            gates = 2 * self.to_gate_logits(x).sigmoid()  # 1 where a gate says nothing
            out = (out.unflatten(-1, (self.heads, -1)) * gates[..., None]).flatten(-2)
        return self.to_out(out)


class GELU_approx(nn.Module):
    """A linear layer followed by GELU."""

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        self.proj = operations.Linear(dim_in, dim_out, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    """Two linear layers with GELU between them.

    Args:
        dim, dim_out: Channels before and after.
        mult: Times `dim`, the channels between.
        glu: Has no effect, as in the published networks, whose configurations set it.
    """

    def __init__(
        self,
        dim: int,
        dim_out: int,
        mult: int = 4,
        glu: bool = False,
        dropout: float = 0.0,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        del glu, dropout
        last = operations.Linear(mult * dim, dim_out, dtype=dtype, device=device)
        first = GELU_approx(dim, mult * dim, dtype, device, operations)
        self.net = nn.Sequential(first, nn.Identity(), last)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def normed(x: Tensor) -> Tensor:
    """Division by the root mean square."""
    return rms_norm(x, None, NORM_EPS)


class Timesteps(nn.Module):
    """Waves of times.

    Args:
        num_channels: Waves, sines and cosines together; an even number.
        flip_sin_to_cos: Whether the cosines stand first.
        downscale_freq_shift: By how much fewer than all steps lead to the longest wave.
        scale: What times are multiplied by.
    """

    def __init__(
        self,
        num_channels: int,
        flip_sin_to_cos: bool,
        downscale_freq_shift: float,
        scale: float = 1,
    ) -> None:
        super().__init__()
        self.num_channels, self.scale = num_channels, scale
        self.flip_sin_to_cos, self.downscale_freq_shift = flip_sin_to_cos, downscale_freq_shift

    def forward(self, timesteps: Tensor) -> Tensor:
        """Float32 ``[B, channels]`` of times ``[B]``."""
        half = self.num_channels // 2
        # as many steps from wave to wave as `timestep_embedding` would take from 1 to 1 / longest
        longest = TIME_PERIOD ** (half / (half - self.downscale_freq_shift))
        waves = timestep_embedding(timesteps * self.scale, self.num_channels, longest)
        return waves if self.flip_sin_to_cos else torch.cat(waves.chunk(2, dim=-1)[::-1], dim=-1)


class TimestepEmbedding(nn.Module):
    """Two linear layers with SiLU between them."""

    def __init__(
        self,
        in_channels: int,
        time_embed_dim: int,
        act_fn: str = "silu",
        out_dim: int | None = None,
        post_act_fn: str | None = None,
        cond_proj_dim: int | None = None,
        sample_proj_bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        if (act_fn, post_act_fn) != ("silu", None):
            raise ValueError(
                f"expected act_fn 'silu' and no post_act_fn, as the networks of LTX video have "
                f"them, found {act_fn!r} and {post_act_fn!r}"
            )
        place = {"bias": sample_proj_bias, "dtype": dtype, "device": device}
        self.cond_proj: nn.Module | None = None
        if cond_proj_dim is not None:
            self.cond_proj = operations.Linear(
                cond_proj_dim, in_channels, bias=False, dtype=dtype, device=device
            )
        self.linear_1 = operations.Linear(in_channels, time_embed_dim, **place)
        out = time_embed_dim if out_dim is None else out_dim
        self.linear_2 = operations.Linear(time_embed_dim, out, **place)

    def forward(self, sample: Tensor, condition: Tensor | None = None) -> Tensor:
        if condition is not None and self.cond_proj is not None:
            sample = sample + self.cond_proj(condition)
        return self.linear_2(F.silu(self.linear_1(sample)))


class AdaLayerNormSingle(nn.Module):
    """What modulates all blocks, `count` times the width, and the embedded time itself."""

    def __init__(self, width: int, parts: Options, count: int = 6) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        layers = {
            "time_proj": Timesteps(TIME_WAVES, flip_sin_to_cos=True, downscale_freq_shift=0),
            "timestep_embedder": TimestepEmbedding(TIME_WAVES, width, **parts),
        }
        self.emb = nn.ModuleDict(layers)
        self.linear = parts["operations"].Linear(width, count * width, **place)

    def forward(self, times: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        waves = self.emb["time_proj"](times).to(dtype)
        embedded = self.emb["timestep_embedder"](waves)
        return self.linear(F.silu(embedded)), embedded


class CaptionProjection(nn.Module):
    """Text tokens to the width of the network."""

    def __init__(self, text_width: int, width: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.linear_1 = parts["operations"].Linear(text_width, width, **place)
        self.linear_2 = parts["operations"].Linear(width, width, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(x), approximate="tanh"))
