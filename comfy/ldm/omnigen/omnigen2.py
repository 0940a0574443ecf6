"""OmniGen 2: one stream of text, pictures to look at, and the picture, each refined alone first.

Custom nodes reach in through ``transformer_options``: ``patches_replace["dit"]`` with keys
``("double_block", i)`` for the main layers, whose ``img`` is all tokens in one, and
``patches["attn1_output_patch"]``, which sees their attention and finds the picture's tokens at
``extra_options["img_slice"]``.
Source: https://arxiv.org/abs/2506.18871; https://github.com/VectorSpaceLab/OmniGen2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.common_dit import RMSNorm, pad_to_patch_size
from comfy.ldm.flux.layers import EmbedND
from comfy.ldm.lumina.layers import attend
from comfy.nn import patches
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped

TIME_WAVES = 256
WIDEST_TIME = 1024
MOST_REFERENCES = 5  # that have an embedding of their place
THETA = 10000.0
FEED_FORWARD = 4  # times the width
FINAL_EPS = 1e-6
Options = dict[str, Any]


class Attention(nn.Module):
    """Attention of all tokens, with fewer heads of keys and values."""

    def __init__(
        self, width: int, heads: int, groups: int, eps: float, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        size = width // heads
        self.to_q = operations.Linear(width, width, bias=False, **place)
        self.to_k = operations.Linear(width, groups * size, bias=False, **place)
        self.to_v = operations.Linear(width, groups * size, bias=False, **place)
        self.norm_q, self.norm_k = (RMSNorm(size, eps, **place) for _ in range(2))
        self.to_out = nn.Sequential(operations.Linear(width, width, bias=False, **place))

    def forward(
        self,
        x: Tensor,
        freqs: Tensor,
        mask: Tensor | None,
        options: Options,
        picture: Sequence[int] | None,
    ) -> Tensor:
        """``x [B, L, D]`` at rotations ``freqs``; ``mask [B, 1, 1, L]`` is added to scores."""
        q, k, v = (
            part.unflatten(-1, (count, -1)).transpose(1, 2)
            for part, count in (
                (self.to_q(x), self.heads),
                (self.to_k(x), self.groups),
                (self.to_v(x), self.groups),
            )
        )
        q, k = self.norm_q(q), self.norm_k(k)
        return self.to_out(attend(q, k, v, freqs, mask, options, picture))


class FeedForward(nn.Module):
    """Feed-forward with a gate."""

    def __init__(self, width: int, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.linear_1 = operations.Linear(width, inner, bias=False, **place)
        self.linear_2 = operations.Linear(inner, width, bias=False, **place)
        self.linear_3 = operations.Linear(width, inner, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(functional.silu(self.linear_1(x)) * self.linear_3(x))


class ModulatedNorm(nn.Module):
    """A norm scaled by time, and three more changes of its layer."""

    def __init__(self, width: int, eps: float, operations: Any, **place: Any) -> None:
        super().__init__()
        time_width = min(width, WIDEST_TIME)
        self.linear = operations.Linear(time_width, 4 * width, **place)
        self.norm = RMSNorm(width, eps, **place)

    def forward(self, x: Tensor, vec: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        changes = self.linear(functional.silu(vec))[:, None].chunk(4, dim=-1)
        scale, gate, scale_mlp, gate_mlp = changes
        return self.norm(x) * (1 + scale), gate, scale_mlp, gate_mlp


class TransformerBlock(nn.Module):
    """A layer with norms before and after each part; modulated by time or not."""

    compiles_alone = True

    def __init__(
        self,
        width: int,
        heads: int,
        groups: int,
        inner: int,
        eps: float,
        is_modulated: bool,
        operations: Any,
        **place: Any,
    ) -> None:
        super().__init__()
        self.is_modulated = is_modulated
        self.attn = Attention(width, heads, groups, eps, operations, **place)
        self.feed_forward = FeedForward(width, inner, operations, **place)
        self.norm1: nn.Module
        if is_modulated:
            self.norm1 = ModulatedNorm(width, eps, operations, **place)
        else:
            self.norm1 = RMSNorm(width, eps, **place)
        self.norm2, self.ffn_norm1, self.ffn_norm2 = (
            RMSNorm(width, eps, **place) for _ in range(3)
        )

    def forward(
        self,
        x: Tensor,
        freqs: Tensor,
        vec: Tensor | None = None,
        mask: Tensor | None = None,
        transformer_options: Options | None = None,
        picture: Sequence[int] | None = None,
    ) -> Tensor:
        """``x [B, L, D]``; ``picture`` are start and stop of the picture's tokens."""
        others = (freqs, mask, transformer_options or {}, picture)
        if not self.is_modulated:
            x = x + self.norm2(self.attn(self.norm1(x), *others))
            return x + self.ffn_norm2(self.feed_forward(self.ffn_norm1(x)))
        normed, gate, scale_mlp, gate_mlp = self.norm1(x, vec)
        x = x + gate.tanh() * self.norm2(self.attn(normed, *others))
        inner = self.feed_forward(self.ffn_norm1(x) * (1 + scale_mlp))
        return x + gate_mlp.tanh() * self.ffn_norm2(inner)


class TimestepEmbedding(nn.Module):
    """Waves of a time as a vector."""

    def __init__(self, out: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.linear_1 = operations.Linear(TIME_WAVES, out, **place)
        self.linear_2 = operations.Linear(out, out, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(functional.silu(self.linear_1(x)))


class TimeCaptionEmbed(nn.Module):
    """The time's vector, and the text's tokens at the network's width."""

    def __init__(
        self, width: int, text_width: int, eps: float, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        time_width = min(width, WIDEST_TIME)
        self.timestep_embedder = TimestepEmbedding(time_width, operations, **place)
        self.caption_embedder = nn.Sequential(
            RMSNorm(text_width, eps, **place), operations.Linear(text_width, width, **place)
        )


class FinalLayer(nn.Module):
    """A scaled norm and a projection to patches."""

    def __init__(self, width: int, out: int, operations: Any, **place: Any) -> None:
        super().__init__()
        norm = {"elementwise_affine": False, "eps": FINAL_EPS, **place}
        self.norm = operations.LayerNorm(width, **norm)
        self.linear_1 = operations.Linear(min(width, WIDEST_TIME), width, **place)
        self.linear_2 = operations.Linear(width, out, **place)

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        scale = self.linear_1(functional.silu(vec))
        return self.linear_2(self.norm(x) * (1 + scale[:, None]))


class OmniGen2Transformer2DModel(nn.Module):
    """Predicts the flow of a noisy latent from a time 0..1, text tokens and pictures.

    Args:
        num_layers, num_refiner_layers: Main layers; layers over each stream alone.
        num_kv_heads: Heads of keys and values.
        axes_dim_rope: Channels of a head for index, row and column.
        text_feat_dim: Width of the text tokens.
        timestep_scale: Factor of times before their waves are taken.
    """

    reads_patches = frozenset({"dit", patches.OUTPUT})

    def __init__(
        self,
        patch_size: int = 2,
        in_channels: int = 16,
        out_channels: int | None = None,
        hidden_size: int = 2520,
        num_layers: int = 32,
        num_refiner_layers: int = 2,
        num_attention_heads: int = 21,
        num_kv_heads: int = 7,
        multiple_of: int = 256,
        ffn_dim_multiplier: float | None = None,
        norm_eps: float = 1e-5,
        axes_dim_rope: Sequence[int] = (40, 40, 40),
        text_feat_dim: int = 2048,
        timestep_scale: float = 1000.0,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        if hidden_size // num_attention_heads != sum(axes_dim_rope):
            raise ValueError(
                f"{hidden_size} channels in {num_attention_heads} heads, whose positions take "
                f"{sum(axes_dim_rope)} channels each"
            )
        place = {"dtype": dtype, "device": device}
        inner = int(FEED_FORWARD * hidden_size * (ffn_dim_multiplier or 1.0))
        inner = -(-inner // multiple_of) * multiple_of
        cell = patch_size**2 * in_channels
        sizes = (hidden_size, num_attention_heads, num_kv_heads, inner, norm_eps)
        self.dtype, self.patch_size, self.timestep_scale = dtype, patch_size, timestep_scale

        def layers(count: int, is_modulated: bool) -> nn.ModuleList:
            return nn.ModuleList(
                TransformerBlock(*sizes, is_modulated, operations, **place) for _ in range(count)
            )

        self.rope_embedder = EmbedND(sum(axes_dim_rope), THETA, list(axes_dim_rope))
        self.x_embedder = operations.Linear(cell, hidden_size, **place)
        self.ref_image_patch_embedder = operations.Linear(cell, hidden_size, **place)
        self.time_caption_embed = TimeCaptionEmbed(
            hidden_size, text_feat_dim, norm_eps, operations, **place
        )
        self.noise_refiner = layers(num_refiner_layers, True)
        self.ref_image_refiner = layers(num_refiner_layers, True)
        self.context_refiner = layers(num_refiner_layers, False)
        self.layers = layers(num_layers, True)
        out = patch_size**2 * (out_channels or in_channels)
        self.norm_out = FinalLayer(hidden_size, out, operations, **place)
        self.image_index_embedding = nn.Parameter(
            torch.empty(MOST_REFERENCES, hidden_size, **place)
        )

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        num_tokens: int | None = None,
        ref_latents: Sequence[Tensor] | None = None,
        attention_mask: Tensor | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, H, W]``.
            timesteps: Times ``[B]`` in 0..1.
            context: Text tokens ``[B, L, D]``.
            num_tokens: Accepted for compatibility.
            ref_latents: Latents ``[B, C, H, W]`` of pictures to look at, of any sizes.
            attention_mask: ``[B, L]``, 0 for padding, which text tokens do not look at.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, timesteps, context, num_tokens, ref_latents, attention_mask, options, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        num_tokens: int | None = None,
        ref_latents: Sequence[Tensor] | None = None,
        attention_mask: Tensor | None = None,
        transformer_options: Options | None = None,
        **_: Any,
    ) -> Tensor:
        del num_tokens
        options = {} if transformer_options is None else transformer_options
        height, width = x.shape[-2:]
        img, rows, columns = self._patches(x)
        references = [self._patches(latent) for latent in ref_latents or ()]
        waves = timestep_embedding((1.0 - timesteps) * self.timestep_scale, TIME_WAVES)
        vec = self.time_caption_embed.timestep_embedder(waves.to(x.dtype))
        txt = self.time_caption_embed.caption_embedder(context)
        grids = [*((r, c) for _, r, c in references), (rows, columns)]
        freqs = self.rope_embedder(_positions(txt.shape[1], grids, x.device))
        length = txt.shape[1]
        mask = _text_mask(attention_mask, txt)
        for layer in self.context_refiner:
            txt = layer(txt, freqs[:, :, :length], None, mask, options)
        start = freqs.shape[2] - img.shape[1]
        img = self.x_embedder(img)
        for layer in self.noise_refiner:
            img = layer(img, freqs[:, :, start:], vec, None, options)
        shown = self._refined_references(references, freqs[:, :, length:start], vec, options)
        joined = torch.cat([txt, *shown, img], dim=1)
        joined = self._run_layers(joined, start, freqs, vec, options)
        out = self.norm_out(joined[:, start:], vec)
        p = self.patch_size
        out = rearrange(out, "b (h w) (p q c) -> b c (h p) (w q)", h=rows, p=p, q=p)
        return -out[..., :height, :width]

    def _patches(self, latent: Tensor) -> tuple[Tensor, int, int]:
        """Patches of a latent ``[B, L, C p p]``, and how many rows and columns they are."""
        p = self.patch_size
        padded = pad_to_patch_size(latent, (p, p))
        rows, columns = (size // p for size in padded.shape[-2:])
        return rearrange(padded, "b c (h p) (w q) -> b (h w) (p q c)", p=p, q=p), rows, columns

    def _refined_references(
        self, references: Sequence[tuple[Tensor, int, int]], freqs: Tensor, vec: Tensor,
        options: Options,
    ) -> list[Tensor]:  # fmt: skip
        """The tokens of each picture to look at, which do not see those of others."""
        index = self.image_index_embedding.to(vec)
        refined, start = [], 0
        for number, (cells, _, _) in enumerate(references):
            tokens = self.ref_image_patch_embedder(cells)
            tokens = tokens + index[min(number, MOST_REFERENCES - 1)]
            own = freqs[:, :, start : start + tokens.shape[1]]
            start += tokens.shape[1]
            for layer in self.ref_image_refiner:
                tokens = layer(tokens, own, vec, None, options)
            refined.append(tokens)
        return refined

    def _run_layers(
        self, joined: Tensor, start: int, freqs: Tensor, vec: Tensor, options: Options
    ) -> Tensor:
        table = (options.get("patches_replace") or {}).get("dit") or {}
        options["total_blocks"], options["block_type"] = len(self.layers), "double"
        picture = (start, joined.shape[1])
        for number, layer in enumerate(self.layers):
            options["block_index"] = number

            def original(args: Mapping[str, Any], layer: nn.Module = layer) -> Options:
                told = args.get("transformer_options")
                return {"img": layer(args["img"], args["pe"], args["vec"], None, told, picture)}

            args = {"img": joined, "pe": freqs, "vec": vec, "transformer_options": options}
            replacement = table.get(("double_block", number))
            if replacement is None:
                joined = original(args)["img"]
            else:
                joined = replacement(args, {"original_block": original})["img"]
        return joined


def _positions(length: int, grids: Sequence[tuple[int, int]], device: Any) -> Tensor:
    """Index, row and column ``[1, L, 3]`` of the text's tokens, which count on in all three, and of
    pictures' patches, whose index is past all before."""
    parts = [torch.arange(length, device=device, dtype=torch.float32)[:, None].expand(-1, 3)]
    index = length
    for rows, columns in grids:
        ids = torch.full((rows, columns, 3), float(index), device=device)
        ids[..., 1] = torch.arange(rows, device=device)[:, None]
        ids[..., 2] = torch.arange(columns, device=device)
        parts.append(ids.flatten(0, 1))
        index += max(rows, columns)
    return torch.cat(parts)[None]


def _text_mask(mask: Tensor | None, txt: Tensor) -> Tensor | None:
    """What is added to scores of text tokens ``[B, 1, 1, L]``."""
    if mask is None:
        return None
    if not mask.is_floating_point():
        mask = (mask.to(txt.dtype) - 1.0) * torch.finfo(txt.dtype).max
    return mask.to(txt)[:, None, None]
