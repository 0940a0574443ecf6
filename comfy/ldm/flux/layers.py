"""Layers of Flux: modulation by a vector, blocks of one and of two streams, embedders.

One file, for custom nodes replace names here and expect every layer to see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.common_dit import rms_norm
from comfy.ldm.flux.math import attention, rope
from comfy.nn import patches
from comfy.nn import timesteps as waves

NORM_EPS = 1e-6
HALF_LIMIT = 65504  # largest float16
TIME_FACTOR = 1000.0
Options = dict[str, Any]


def timestep_embedding(
    t: Tensor, dim: int, max_period: float = 10000, time_factor: float = TIME_FACTOR
) -> Tensor:
    """Waves of times 0..1 ``[B]``, as the network was trained: ``[B, dim]``."""
    return waves.timestep_embedding(time_factor * t, dim, max_period).to(t.dtype)


class EmbedND(nn.Module):
    """Rotations of positions with several axes, each in its own part of the channels."""

    def __init__(self, dim: int, theta: float, axes_dim: Sequence[int]) -> None:
        super().__init__()
        self.dim, self.theta, self.axes_dim = dim, theta, list(axes_dim)

    def forward(self, ids: Tensor) -> Tensor:
        """``[B, L, axes]`` positions to ``[B, 1, L, dim / 2, 2, 2]``."""
        parts = [
            rope(ids[..., axis], width, self.theta) for axis, width in enumerate(self.axes_dim)
        ]
        return torch.cat(parts, dim=-3)[:, None]


class MLPEmbedder(nn.Module):
    """Two linear layers with SiLU between them."""

    def __init__(
        self,
        in_dim: int,
        hidden_dim: int,
        bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        place = {"bias": bias, "dtype": dtype, "device": device}
        self.in_layer = operations.Linear(in_dim, hidden_dim, **place)
        self.silu = nn.SiLU()
        self.out_layer = operations.Linear(hidden_dim, hidden_dim, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_layer(self.silu(self.in_layer(x)))


class RMSNorm(nn.Module):
    """Division by the root mean square, times a scale."""

    def __init__(
        self, dim: int, dtype: Any = None, device: Any = None, operations: Any = None
    ) -> None:
        del operations  # has no layer to make
        super().__init__()
        self.scale = nn.Parameter(torch.empty(dim, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale, NORM_EPS)


class QKNorm(nn.Module):
    """Norms of queries and keys."""

    def __init__(
        self, dim: int, dtype: Any = None, device: Any = None, operations: Any = None
    ) -> None:
        super().__init__()
        self.query_norm = RMSNorm(dim, dtype, device, operations)
        self.key_norm = RMSNorm(dim, dtype, device, operations)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q).to(v), self.key_norm(k).to(v)


class SelfAttention(nn.Module):
    """The projections around an attention; the blocks compute it themselves."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        place = {"dtype": dtype, "device": device}
        self.qkv = operations.Linear(dim, dim * 3, bias=qkv_bias, **place)
        self.norm = QKNorm(dim // num_heads, operations=operations, **place)
        self.proj = operations.Linear(dim, dim, bias=proj_bias, **place)


@dataclass
class ModulationOut:
    """What a vector does to a layer: shift and scale before it, gate after it; each ``[B, 1,
    D]``."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


class Modulation(nn.Module):
    """Shift, scale and gate of one layer (or two) from a vector ``[B, D]``."""

    def __init__(
        self,
        dim: int,
        double: bool,
        bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        self.is_double = double
        self.multiplier = 6 if double else 3
        self.lin = operations.Linear(
            dim, self.multiplier * dim, bias=bias, dtype=dtype, device=device
        )

    def forward(self, vec: Tensor) -> tuple[ModulationOut, ModulationOut | None]:
        if vec.ndim == 2:
            vec = vec[:, None]
        parts = self.lin(F.silu(vec)).chunk(self.multiplier, dim=-1)
        second = ModulationOut(*parts[3:]) if self.is_double else None
        return ModulationOut(*parts[:3]), second


def apply_mod(
    tensor: Tensor,
    m_mult: Tensor,
    m_add: Tensor | None = None,
    modulation_dims: Sequence[tuple[int, int | None, int]] | None = None,
) -> Tensor:
    """``tensor * m_mult + m_add``; with ``modulation_dims`` (start, stop, which) piece by piece."""
    if modulation_dims is None:
        return tensor * m_mult if m_add is None else torch.addcmul(m_add, tensor, m_mult)
    for start, stop, which in modulation_dims:
        piece = tensor[:, start:stop]
        piece *= m_mult[:, which : which + 1]
        if m_add is not None:
            piece += m_add[:, which : which + 1]
    return tensor


class SiLUActivation(nn.Module):
    """Gate of a doubled hidden layer: ``silu(a) * b``."""

    def forward(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value


class YakMLP(nn.Module):
    """Feed-forward with a gate of its own: ``down(silu(gate x) * up x)``."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        self.gate_proj = operations.Linear(hidden_size, intermediate_size, **place)
        self.up_proj = operations.Linear(hidden_size, intermediate_size, **place)
        self.down_proj = operations.Linear(intermediate_size, hidden_size, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def build_mlp(
    hidden_size: int,
    mlp_hidden_dim: int,
    mlp_silu_act: bool = False,
    yak_mlp: bool = False,
    dtype: Any = None,
    device: Any = None,
    operations: Any = ops.disable_weight_init,
) -> nn.Module:
    """The feed-forward of a block, in the form its family has."""
    place = {"dtype": dtype, "device": device}
    if yak_mlp:
        return YakMLP(hidden_size, mlp_hidden_dim, operations=operations, **place)
    if mlp_silu_act:
        return nn.Sequential(
            operations.Linear(hidden_size, mlp_hidden_dim * 2, bias=False, **place),
            SiLUActivation(),
            operations.Linear(mlp_hidden_dim, hidden_size, bias=False, **place),
        )
    return nn.Sequential(
        operations.Linear(hidden_size, mlp_hidden_dim, **place),
        nn.GELU(approximate="tanh"),
        operations.Linear(mlp_hidden_dim, hidden_size, **place),
    )


def _split_qkv(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """``[B, L, 3 * heads * D]`` to three of ``[B, heads, L, D]``."""
    return qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def _finite_half(x: Tensor) -> Tensor:
    """x without the infinities float16 may overflow to."""
    if x.dtype != torch.float16:
        return x
    return torch.nan_to_num(x, nan=0.0, posinf=HALF_LIMIT, neginf=-HALF_LIMIT)


class DoubleStreamBlock(nn.Module):
    """Text and picture tokens with weights of their own, attending to each other."""

    compiles_alone = True

    img_mod: Modulation
    txt_mod: Modulation

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mlp_ratio: float,
        qkv_bias: bool = False,
        flipped_img_txt: bool = False,
        modulation: bool = True,
        mlp_silu_act: bool = False,
        proj_bias: bool = True,
        yak_mlp: bool = False,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        parts = {"dtype": dtype, "device": device, "operations": operations}
        self.num_heads, self.hidden_size, self.modulation = num_heads, hidden_size, modulation
        self.flipped_img_txt = flipped_img_txt
        inner = int(hidden_size * mlp_ratio)
        for stream in ("img", "txt"):
            made: dict[str, nn.Module] = {
                "norm1": _plain_norm(hidden_size, **parts),
                "attn": SelfAttention(hidden_size, num_heads, qkv_bias, proj_bias, **parts),
                "norm2": _plain_norm(hidden_size, **parts),
                "mlp": build_mlp(hidden_size, inner, mlp_silu_act, yak_mlp, **parts),
            }
            if modulation:
                made = {"mod": Modulation(hidden_size, double=True, **parts), **made}
            for name, module in made.items():
                setattr(self, f"{stream}_{name}", module)

    def forward(
        self,
        img: Tensor,
        txt: Tensor,
        vec: Any,
        pe: Tensor | None,
        attn_mask: Tensor | None = None,
        modulation_dims_img: Any = None,
        modulation_dims_txt: Any = None,
        transformer_options: Options | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One layer over ``img [B, Li, D]`` and ``txt [B, Lt, D]``; ``vec`` modulates both."""
        if self.modulation:
            img_mods, txt_mods = self.img_mod(vec), self.txt_mod(vec)
        else:
            img_mods, txt_mods = vec
        img_qkv = self._qkv("img", img, img_mods[0], modulation_dims_img)
        txt_qkv = self._qkv("txt", txt, txt_mods[0], modulation_dims_txt)
        streams = (img_qkv, txt_qkv) if self.flipped_img_txt else (txt_qkv, img_qkv)
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(*streams))
        attn = attention(q, k, v, pe=pe, mask=attn_mask, transformer_options=transformer_options)
        sizes = [part[0].shape[2] for part in streams]
        start = 0 if self.flipped_img_txt else sizes[0]
        picture = (start, start + img.shape[1])
        attn = patches.attention_output(attn, transformer_options, self.num_heads, picture)
        first, second = attn.split(sizes, dim=1)
        img_attn, txt_attn = (first, second) if self.flipped_img_txt else (second, first)
        img = self._finish("img", img, img_attn, img_mods, modulation_dims_img)
        txt = self._finish("txt", txt, txt_attn, txt_mods, modulation_dims_txt)
        return img, _finite_half(txt)

    def _qkv(self, stream: str, x: Tensor, mod: ModulationOut, dims: Any) -> tuple[Tensor, ...]:
        norm, attn = getattr(self, f"{stream}_norm1"), getattr(self, f"{stream}_attn")
        x = apply_mod(norm(x), 1 + mod.scale, mod.shift, dims)
        q, k, v = _split_qkv(attn.qkv(x), self.num_heads)
        q, k = attn.norm(q, k, v)
        return q, k, v

    def _finish(self, stream: str, x: Tensor, attn: Tensor, mods: Any, dims: Any) -> Tensor:
        """Add the attention and then the feed-forward."""
        first, second = mods
        project = getattr(self, f"{stream}_attn").proj
        norm, mlp = getattr(self, f"{stream}_norm2"), getattr(self, f"{stream}_mlp")
        x = x + apply_mod(project(attn), first.gate, None, dims)
        h = mlp(apply_mod(norm(x), 1 + second.scale, second.shift, dims))
        return x + apply_mod(h, second.gate, None, dims)


def _plain_norm(width: int, dtype: Any, device: Any, operations: Any) -> nn.Module:
    """A layer norm without weights."""
    return operations.LayerNorm(
        width, elementwise_affine=False, eps=NORM_EPS, dtype=dtype, device=device
    )


class SingleStreamBlock(nn.Module):
    """All tokens alike; attention and feed-forward side by side."""

    compiles_alone = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        qk_scale: float | None = None,
        modulation: bool = True,
        mlp_silu_act: bool = False,
        bias: bool = True,
        yak_mlp: bool = False,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        parts = {"dtype": dtype, "device": device, "operations": operations}
        place = {"dtype": dtype, "device": device}
        self.hidden_dim = self.hidden_size = hidden_size
        self.num_heads = num_heads
        head_dim = hidden_size // num_heads
        self.scale = qk_scale or 1 / math.sqrt(head_dim)
        self.mlp_hidden_dim = int(hidden_size * mlp_ratio)
        self.mlp_in_dim = self.mlp_hidden_dim * (2 if mlp_silu_act or yak_mlp else 1)
        self.linear1 = operations.Linear(
            hidden_size, hidden_size * 3 + self.mlp_in_dim, bias=bias, **place
        )
        self.linear2 = operations.Linear(
            hidden_size + self.mlp_hidden_dim, hidden_size, bias=bias, **place
        )
        self.norm = QKNorm(head_dim, **parts)
        self.pre_norm = _plain_norm(hidden_size, **parts)
        self.mlp_act: Callable[[Tensor], Tensor] = nn.GELU(approximate="tanh")
        if mlp_silu_act or yak_mlp:
            self.mlp_act = SiLUActivation()
        self.yak_mlp = yak_mlp
        self.modulation: Modulation | None = None
        if modulation:
            self.modulation = Modulation(hidden_size, double=False, **parts)

    def forward(
        self,
        x: Tensor,
        vec: Any,
        pe: Tensor | None,
        attn_mask: Tensor | None = None,
        modulation_dims: Any = None,
        transformer_options: Options | None = None,
    ) -> Tensor:
        """One layer over ``x [B, L, D]``."""
        mod = self.modulation(vec)[0] if self.modulation is not None else vec
        h = apply_mod(self.pre_norm(x), 1 + mod.scale, mod.shift, modulation_dims)
        qkv, mlp = self.linear1(h).split([3 * self.hidden_size, self.mlp_in_dim], dim=-1)
        q, k, v = _split_qkv(qkv, self.num_heads)
        q, k = self.norm(q, k, v)
        attn = attention(q, k, v, pe=pe, mask=attn_mask, transformer_options=transformer_options)
        picture = (transformer_options or {}).get("img_slice") or (0, x.shape[1])
        attn = patches.attention_output(attn, transformer_options, self.num_heads, picture)
        if self.yak_mlp:  # value and gate come the other way round
            value, gate = mlp.chunk(2, dim=-1)
            inner = F.silu(gate) * value
        else:
            inner = self.mlp_act(mlp)
        out = self.linear2(torch.cat([attn, inner], dim=2))
        return _finite_half(x + apply_mod(out, mod.gate, None, modulation_dims))


class LastLayer(nn.Module):
    """A modulated norm and a projection to patches."""

    def __init__(
        self,
        hidden_size: int,
        patch_size: int,
        out_channels: int,
        bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        place = {"bias": bias, "dtype": dtype, "device": device}
        self.norm_final = _plain_norm(hidden_size, dtype, device, operations)
        self.linear = operations.Linear(hidden_size, patch_size**2 * out_channels, **place)
        self.adaLN_modulation = nn.Sequential(
            nn.SiLU(), operations.Linear(hidden_size, 2 * hidden_size, **place)
        )

    def forward(self, x: Tensor, vec: Tensor, modulation_dims: Any = None) -> Tensor:
        if vec.ndim == 2:
            vec = vec[:, None]
        shift, scale = self.adaLN_modulation(vec).chunk(2, dim=-1)
        return self.linear(apply_mod(self.norm_final(x), 1 + scale, shift, modulation_dims))
