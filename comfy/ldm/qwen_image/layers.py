"""The layers of Qwen-Image; `comfy.ldm.qwen_image.model` puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.common_dit import RMSNorm
from comfy.ldm.flux.math import apply_rope1
from comfy.nn import attention, patches
from comfy.nn.timesteps import timestep_embedding

TIME_WAVES, TIME_FACTOR = 256, 1000.0
NORM_EPS = 1e-6
Options = dict[str, Any]


def apply_rotary_emb(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Turn neighbouring channels of ``x [B, L, heads, D]`` by rotations ``[B, L, 1, D / 2, 2, 2]``;
    of no tokens where there are none."""
    return apply_rope1(x, freqs_cis) if x.shape[1] else x


class GELU(nn.Module):
    """A linear layer followed by GELU."""

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        approximate: str = "none",
        bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        self.proj = operations.Linear(dim_in, dim_out, bias=bias, dtype=dtype, device=device)
        self.approximate = approximate

    def forward(self, hidden_states: Tensor) -> Tensor:
        return functional.gelu(self.proj(hidden_states), approximate=self.approximate)


class FeedForward(nn.Module):
    """Two linear layers with GELU between them, under the keys of diffusers.

    Args:
        dim_out: Channels that come out; None: as many as go in.
        mult: Times `dim`, the channels between, where `inner_dim` does not say.
    """

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        mult: int = 4,
        dropout: float = 0.0,
        inner_dim: int | None = None,
        bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        del dropout  # of training
        inner = dim * mult if inner_dim is None else inner_dim
        place = {"bias": bias, "dtype": dtype, "device": device}
        first = GELU(dim, inner, "tanh", operations=operations, **place)
        last = operations.Linear(inner, dim if dim_out is None else dim_out, **place)
        self.net = nn.ModuleList([first, nn.Identity(), last])

    def forward(self, hidden_states: Tensor) -> Tensor:
        for module in self.net:
            hidden_states = module(hidden_states)
        return hidden_states


class JointAttention(nn.Module):
    """Attention over text and patches together."""

    def __init__(self, dim: int, heads: int, head_dim: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.heads = heads
        inner = heads * head_dim
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            setattr(self, name, RMSNorm(head_dim, **place))
        for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
            setattr(self, name, operations.Linear(dim, inner, **place))
        self.to_out = nn.ModuleList([operations.Linear(inner, dim, **place)])
        self.to_add_out = operations.Linear(inner, dim, **place)

    def forward(
        self,
        img: Tensor,
        txt: Tensor,
        freqs: Tensor,
        mask: Tensor | None = None,
        transformer_options: Options | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``img [B, Li, D]``, ``txt [B, Lt, D]``; rotations and mask for text, then patches."""
        q, k, v = self._project(img, ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"))
        added = ("add_q_proj", "add_k_proj", "add_v_proj")
        tq, tk, tv = self._project(txt, added, ("norm_added_q", "norm_added_k"))
        joint_q = apply_rope1(torch.cat([tq, q], dim=2), freqs)
        joint_k = apply_rope1(torch.cat([tk, k], dim=2), freqs)
        out = attention.optimized_attention(
            joint_q, joint_k, torch.cat([tv, v], dim=2), self.heads, mask=mask,
            skip_reshape=True, transformer_options=transformer_options,
        )  # fmt: skip
        length = txt.shape[1]
        picture = (length, out.shape[1])
        out = patches.attention_output(out, transformer_options, self.heads, picture)
        return self.to_out[0](out[:, length:]), self.to_add_out(out[:, :length])

    def _project(
        self, x: Tensor, layers: Sequence[str], norms: Sequence[str]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[B, heads, L, D]``; the first two normed."""
        q, k, v = (
            getattr(self, layer)(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in layers
        )
        return getattr(self, norms[0])(q), getattr(self, norms[1])(k), v


class TransformerBlock(nn.Module):
    """A layer over both streams."""

    compiles_alone = True

    def __init__(self, dim: int, heads: int, head_dim: int, operations: Any, **place: Any) -> None:
        super().__init__()
        parts = {"operations": operations, **place}
        for stream in ("img", "txt"):
            modulation = nn.Sequential(nn.SiLU(), operations.Linear(dim, 6 * dim, **place))
            setattr(self, f"{stream}_mod", modulation)
            for norm in ("norm1", "norm2"):
                plain = operations.LayerNorm(dim, eps=NORM_EPS, elementwise_affine=False, **place)
                setattr(self, f"{stream}_{norm}", plain)
            setattr(self, f"{stream}_mlp", FeedForward(dim, **parts))
        self.attn = JointAttention(dim, heads, head_dim, **parts)

    def forward(
        self,
        img: Tensor,
        txt: Tensor,
        temb: Tensor,
        freqs: Tensor,
        mask: Tensor | None = None,
        timestep_zero_index: int | None = None,
        transformer_options: Options | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One layer over ``img`` and ``txt``.

        Args:
            temb: Time embedding ``[B, D]``; with ``timestep_zero_index`` ``[2 B, D]``, the second
                half for the patches from that index on.
        """
        img_mods = self._modulation("img", temb, img, timestep_zero_index)
        text_time = temb if timestep_zero_index is None else temb.chunk(2)[0]
        txt_mods = self._modulation("txt", text_time, txt, None)
        img_attn, txt_attn = self.attn(
            self._modulated("img_norm1", img, img_mods[:2]),
            self._modulated("txt_norm1", txt, txt_mods[:2]),
            freqs, mask, transformer_options,
        )  # fmt: skip
        img = img + img_mods[2] * img_attn
        txt = txt + txt_mods[2] * txt_attn
        for_img = self._modulated("img_norm2", img, img_mods[3:5])
        img = torch.addcmul(img, img_mods[5], getattr(self, "img_mlp")(for_img))  # noqa: B009
        for_txt = self._modulated("txt_norm2", txt, txt_mods[3:5])
        txt = torch.addcmul(txt, txt_mods[5], getattr(self, "txt_mlp")(for_txt))  # noqa: B009
        return img, txt

    def _modulation(
        self, stream: str, temb: Tensor, x: Tensor, zero_index: int | None
    ) -> tuple[Tensor, ...]:
        """Shift, scale and gate of attention and feed-forward, ``[B, 1 or L, D]`` each."""
        made = getattr(self, f"{stream}_mod")(temb)[:, None]
        if zero_index is not None:
            now, zero = made.chunk(2)
            made = torch.cat(
                [
                    now.expand(-1, zero_index, -1),
                    zero.expand(-1, x.shape[1] - zero_index, -1),
                ],
                dim=1,
            )
        return made.chunk(6, dim=-1)

    def _modulated(self, norm: str, x: Tensor, mods: Sequence[Tensor]) -> Tensor:
        return torch.addcmul(mods[0], getattr(self, norm)(x), 1 + mods[1])


class QwenTimestepProjEmbeddings(nn.Module):
    """Times 0..1 as vectors, with a kind of picture added if the network tells kinds apart.

    Args:
        pooled_projection_dim: Has no effect: the text is not told here.
        use_additional_t_cond: Whether kinds are told apart.
    """

    def __init__(
        self,
        embedding_dim: int,
        pooled_projection_dim: int = 0,
        use_additional_t_cond: bool = False,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        del pooled_projection_dim
        dim, place = embedding_dim, {"dtype": dtype, "device": device}
        embedder = nn.Module()
        embedder.linear_1 = operations.Linear(TIME_WAVES, dim, **place)
        embedder.linear_2 = operations.Linear(dim, dim, **place)
        self.timestep_embedder = embedder
        self.addition_t_embedding: nn.Module | None = None
        if use_additional_t_cond:
            self.addition_t_embedding = operations.Embedding(2, dim, **place)

    def forward(
        self, timestep: Tensor, hidden_states: Tensor, addition_t_cond: Tensor | None = None
    ) -> Tensor:
        """``[B, D]`` of times ``[B]``, in the type of other states."""
        waves = timestep_embedding(timestep * TIME_FACTOR, TIME_WAVES).to(hidden_states.dtype)
        layers: Any = self.timestep_embedder
        made = layers.linear_2(functional.silu(layers.linear_1(waves)))
        if self.addition_t_embedding is not None and addition_t_cond is not None:
            added = self.addition_t_embedding(addition_t_cond.to(made.device, torch.long))
            made = made + added.to(made)
        return made


class LastLayer(nn.Module):
    """A modulated norm; the scale comes before the shift."""

    def __init__(
        self,
        embedding_dim: int,
        conditioning_embedding_dim: int,
        elementwise_affine: bool = False,
        eps: float = NORM_EPS,
        bias: bool = True,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        place = {"bias": bias, "dtype": dtype, "device": device}
        dim = embedding_dim
        self.linear = operations.Linear(conditioning_embedding_dim, 2 * dim, **place)
        self.norm = operations.LayerNorm(
            dim, eps=eps, elementwise_affine=elementwise_affine, **place
        )

    def forward(self, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        made = self.linear(functional.silu(conditioning_embedding))
        scale, shift = made[:, None].chunk(2, dim=-1)
        return torch.addcmul(shift, self.norm(x), 1 + scale)
