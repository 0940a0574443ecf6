"""PixArt: a transformer over patches of a picture, beside which it reads text.

Source: Chen et al. 2023, https://arxiv.org/abs/2310.00426; 2024, https://arxiv.org/abs/2403.04692.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.nn import attention, patches
from comfy.nn.layout import tokens_of_patches
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped

TIME_WAVES = 256
NORM_EPS = 1e-6
PIXELS = 8  # of a side of a latent cell
BASE = 64  # cells of a side of the pictures that positions were made for
PERIOD = 10000.0
SIZES = 3  # height, width and aspect ratio: each has a third of the channels
Options = dict[str, Any]
Parts = dict[str, Any]


def position_waves(
    width: int, rows: int, columns: int, base: int, interpolation: float, like: Tensor
) -> Tensor:
    """Sine and cosine of column, then of row, of every patch ``[1, rows * columns, width]``."""

    def waves(count: int) -> Tensor:
        places = torch.arange(count, device=like.device, dtype=torch.float32)
        places = places / (count / base) / interpolation
        powers = torch.arange(width // 4, device=like.device, dtype=torch.float32) / (width / 4)
        angles = places[:, None] * PERIOD**-powers
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    half = width // 2
    column = waves(columns)[None].expand(rows, columns, half)
    row = waves(rows)[:, None].expand(rows, columns, half)
    return torch.cat([column, row], dim=-1).reshape(1, -1, width).to(like.dtype)


def _place(parts: Parts) -> dict[str, Any]:
    return {"dtype": parts["dtype"], "device": parts["device"]}


class Embedder(nn.Module):
    """Numbers ``[N]`` as vectors: two linear layers over their waves."""

    def __init__(self, width: int, parts: Parts) -> None:
        super().__init__()
        linear, place = parts["operations"].Linear, _place(parts)
        self.mlp = nn.Sequential(
            linear(TIME_WAVES, width, **place), nn.SiLU(), linear(width, width, **place)
        )

    def forward(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return self.mlp(timestep_embedding(numbers, TIME_WAVES).to(dtype))


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, width: int, inner: int, out: int, parts: Parts) -> None:
        super().__init__()
        linear, place = parts["operations"].Linear, _place(parts)
        self.fc1, self.fc2 = linear(width, inner, **place), linear(inner, out, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class CaptionEmbedder(nn.Module):
    """Text tokens to the width of the network."""

    def __init__(self, channels: int, width: int, tokens: int, parts: Parts) -> None:
        super().__init__()
        self.y_proj = FeedForward(channels, width, width, parts)
        # What stood for no text in training; files carry it.
        empty = torch.empty(tokens, channels, **_place(parts))
        self.y_embedding = nn.Parameter(empty, requires_grad=False)

    def forward(self, text: Tensor) -> Tensor:
        return self.y_proj(text)


class SelfAttention(nn.Module):
    """Attention among the patches."""

    def __init__(self, width: int, heads: int, parts: Parts) -> None:
        super().__init__()
        linear, place = parts["operations"].Linear, _place(parts)
        self.heads = heads
        self.qkv, self.proj = linear(width, 3 * width, **place), linear(width, width, **place)

    def forward(self, x: Tensor, options: Options) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        out = attention.optimized_attention(q, k, v, self.heads, transformer_options=options)
        return self.proj(patches.attention_output(out, options, self.heads, (0, x.shape[1])))


class CrossAttention(nn.Module):
    """Attention of the patches to the text."""

    def __init__(self, width: int, heads: int, parts: Parts) -> None:
        super().__init__()
        linear, place = parts["operations"].Linear, _place(parts)
        self.heads = heads
        self.q_linear = linear(width, width, **place)
        self.kv_linear = linear(width, 2 * width, **place)
        self.proj = linear(width, width, **place)

    def forward(self, x: Tensor, text: Tensor, options: Options) -> Tensor:
        k, v = self.kv_linear(text).chunk(2, dim=-1)
        return self.proj(
            attention.optimized_attention(
                self.q_linear(x), k, v, self.heads, transformer_options=options
            )
        )


class Block(nn.Module):
    """Attention among the patches, to the text, and feed-forward."""

    compiles_alone = True

    def __init__(self, width: int, heads: int, mlp_ratio: float, parts: Parts) -> None:
        super().__init__()
        self.norm1, self.norm2 = _plain_norm(width, parts), _plain_norm(width, parts)
        self.attn = SelfAttention(width, heads, parts)
        self.cross_attn = CrossAttention(width, heads, parts)
        self.mlp = FeedForward(width, int(width * mlp_ratio), width, parts)
        self.scale_shift_table = nn.Parameter(torch.empty(6, width, **_place(parts)))

    def forward(self, x: Tensor, text: Tensor, vec: Tensor, options: Options) -> Tensor:
        """One layer over ``x [B, L, D]``; ``vec [B, 6 * D]`` modulates it."""
        mods = self.scale_shift_table.to(x) + vec.unflatten(1, (6, -1))
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = mods.chunk(6, dim=1)
        x = x + gate * self.attn(torch.addcmul(shift, self.norm1(x), 1 + scale), options)
        x = x + self.cross_attn(x, text, options)
        return x + gate_mlp * self.mlp(torch.addcmul(shift_mlp, self.norm2(x), 1 + scale_mlp))


def _plain_norm(width: int, parts: Parts) -> Any:
    return parts["operations"].LayerNorm(
        width, elementwise_affine=False, eps=NORM_EPS, **_place(parts)
    )


class FinalLayer(nn.Module):
    """A modulated norm and a projection to patches."""

    def __init__(self, width: int, out: int, parts: Parts) -> None:
        super().__init__()
        self.norm_final = _plain_norm(width, parts)
        self.linear = parts["operations"].Linear(width, out, **_place(parts))
        self.scale_shift_table = nn.Parameter(torch.empty(2, width, **_place(parts)))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = (self.scale_shift_table.to(x) + time[:, None]).chunk(2, dim=1)
        return self.linear(torch.addcmul(shift, self.norm_final(x), 1 + scale))


class PixArtMS(nn.Module):
    """Predicts the noise of a latent from a timestep 0..1000 and text tokens.

    Args:
        caption_channels, model_max_length: Width of the text tokens, and how many stand for no
            text.
        micro_condition: Whether it is told the picture's size and aspect ratio (alpha).
        pe_interpolation: How much wider than in the first training positions lie; None: as the
            picture is larger.
    """

    reads_patches = frozenset({patches.OUTPUT, "dit"})

    def __init__(
        self,
        patch_size: int = 2,
        in_channels: int = 4,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        caption_channels: int = 4096,
        model_max_length: int = 120,
        micro_condition: bool = True,
        pe_interpolation: float | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        del kwargs  # what names the family, and counts of other networks
        parts = {"dtype": dtype, "device": device, "operations": operations}
        place = _place(parts)
        self.dtype, self.patch_size, self.in_channels = dtype, patch_size, in_channels
        self.hidden_size, self.pe_interpolation = hidden_size, pe_interpolation
        self.x_embedder = nn.ModuleDict(
            {
                "proj": operations.Conv2d(
                    in_channels, hidden_size, patch_size, stride=patch_size, **place
                )
            }
        )
        self.t_embedder = Embedder(hidden_size, parts)
        self.t_block = nn.Sequential(
            nn.SiLU(), operations.Linear(hidden_size, 6 * hidden_size, **place)
        )
        self.y_embedder = CaptionEmbedder(caption_channels, hidden_size, model_max_length, parts)
        self.micro_conditioning = micro_condition
        if micro_condition:
            self.csize_embedder = Embedder(hidden_size // SIZES, parts)
            self.ar_embedder = Embedder(hidden_size // SIZES, parts)
        self.blocks = nn.ModuleList(
            Block(hidden_size, num_heads, mlp_ratio, parts) for _ in range(depth)
        )
        # Noise and, which is not used here, its variance.
        self.final_layer = FinalLayer(hidden_size, 2 * in_channels * patch_size**2, parts)

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        c_size: Tensor | None = None,
        c_ar: Tensor | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, H, W]``.
            timesteps: ``[B]`` in 0..1000.
            context: Text tokens ``[B, L, D]``.
            c_size, c_ar: Height and width in pixels ``[B, 2]``, and height by width ``[B, 1]``;
                those of the latent without.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, timesteps, context, c_size, c_ar, options, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        c_size: Tensor | None = None,
        c_ar: Tensor | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        del kwargs
        options = {} if transformer_options is None else transformer_options
        height, width = x.shape[-2:]
        patch = self.patch_size
        whole = pad_to_patch_size(x, (patch, patch))
        rows, columns = (size // patch for size in whole.shape[-2:])
        tokens = tokens_of_patches(self.x_embedder["proj"](whole))
        tokens = tokens + self._positions(rows, columns, height, width, tokens)
        time = self.t_embedder(timesteps, tokens.dtype)
        if self.micro_conditioning:
            time = time + self._sizes(height, width, c_size, c_ar, time)
        text = self.y_embedder(context)
        tokens = self._blocks(tokens, text, self.t_block(time), options)
        out = self.final_layer(tokens, time)
        out = rearrange(
            out, "b (h w) (p q c) -> b c (h p) (w q)", h=rows, w=columns, p=patch, q=patch
        )
        return out[:, : self.in_channels, :height, :width]

    def _positions(self, rows: int, columns: int, height: int, width: int, like: Tensor) -> Tensor:
        # Pictures much smaller than those of training have the positions of the smallest of these.
        base = max(1, round(((height + width) // 2) / BASE)) * BASE // self.patch_size
        spread = self.pe_interpolation
        if spread is None:
            spread = max(1, round((height + width) / 2 / BASE))
        return position_waves(self.hidden_size, rows, columns, base, spread, like)

    def _sizes(
        self, height: int, width: int, size: Tensor | None, ratio: Tensor | None, like: Tensor
    ) -> Tensor:
        """Height, width and aspect ratio side by side ``[B, D]``."""
        count = like.shape[0]
        if size is None:
            size = like.new_tensor([[height * PIXELS, width * PIXELS]])
        if ratio is None:
            ratio = like.new_tensor([[height / width]])
        told = self.csize_embedder(size.flatten().float(), like.dtype).reshape(size.shape[0], -1)
        shape = self.ar_embedder(ratio.flatten().float(), like.dtype)
        return torch.cat([told.expand(count, -1), shape.expand(count, -1)], dim=1)

    def _blocks(self, x: Tensor, text: Tensor, vec: Tensor, options: Options) -> Tensor:
        replaced = (options.get("patches_replace") or {}).get("dit") or {}
        options["total_blocks"], options["block_type"] = len(self.blocks), "double"
        for number, block in enumerate(self.blocks):
            options["block_index"] = number

            def original(args: Options, block: nn.Module = block) -> Options:
                given = (args["txt"], args["vec"], args["transformer_options"])
                return {"img": block(args["img"], *given)}

            args = {"img": x, "txt": text, "vec": vec, "transformer_options": options}
            key = ("double_block", number)
            run = original(args) if key not in replaced else None
            x = (run or replaced[key](args, {"original_block": original}))["img"]
        return x
