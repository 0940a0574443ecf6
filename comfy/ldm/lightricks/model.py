"""LTX video: a transformer over the cells of a video, beside which it reads text.

Source: HaCohen et al. 2024, https://arxiv.org/abs/2501.00103.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.lightricks.layers import (  # noqa: F401 - packs look here for the layers
    NORM_EPS,
    AdaLayerNormSingle,
    CaptionProjection,
    CrossAttention,
    FeedForward,
    GELU_approx,
    Options,
    TimestepEmbedding,
    Timesteps,
    normed,
)
from comfy.ldm.lightricks.rotations import (  # noqa: F401 - and for the turns
    LTXFrequenciesPrecision,
    LTXRopeType,
    Turn,
    angles,
    apply_rotary_emb,
    generate_freq_grid_np,
    interleaved_freqs_cis,
    neighbours,
    split_freqs_cis,
)
from comfy.ldm.lightricks.symmetric_patchifier import SymmetricPatchifier, latent_to_pixel_coords
from comfy.nn import patches
from comfy.nn.wrappers import run_wrapped

TIME_FACTOR = 1000.0
USUAL_FRAME_RATE = 25
CELL = (8, 32, 32)  # frames, rows and columns of a latent cell
LARGEST_PLACE = (20, 2048, 2048)  # seconds, rows and columns that rotations were made for


def rotations(places: Tensor, dim: int, dtype: torch.dtype) -> Turn:
    """The turn of neighbouring channels for places in seconds and pixels ``[B, 3, N]``."""
    return neighbours(angles(places, LARGEST_PLACE, dim), dtype)


class BasicTransformerBlock(nn.Module):
    """Attention among the cells, to the text, and feed-forward."""

    compiles_alone = True

    def __init__(
        self,
        dim: int,
        n_heads: int,
        d_head: int,
        context_dim: int | None = None,
        attn_precision: torch.dtype | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        parts = {"dtype": dtype, "device": device, "operations": operations}
        shared = {"heads": n_heads, "dim_head": d_head, "attn_precision": attn_precision, **parts}
        self.attn_precision = attn_precision
        self.attn1 = CrossAttention(dim, is_patched=True, **shared)
        self.attn2 = CrossAttention(dim, context_dim, **shared)
        self.ff = FeedForward(dim, dim, **parts)
        self.scale_shift_table = nn.Parameter(torch.empty(6, dim, dtype=dtype, device=device))

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        attention_mask: Tensor | None = None,
        timestep: Tensor | None = None,
        pe: Turn | None = None,
        transformer_options: Options | None = None,
    ) -> Tensor:
        """One layer over ``x [B, N, D]``; ``timestep [B, 1 or N, 6 * D]`` modulates it."""
        if timestep is None:
            raise ValueError("a layer of LTX video is told a time, and timestep is missing")
        options = transformer_options
        mods = self.scale_shift_table.to(x) + timestep.unflatten(-1, (6, -1))
        shift, scale, gate, shift_ff, scale_ff, gate_ff = mods.unbind(2)
        h = torch.addcmul(shift, normed(x), 1 + scale)
        x = x + self.attn1(h, pe=pe, transformer_options=options) * gate
        x = x + self.attn2(x, context, attention_mask, transformer_options=options)
        return x + self.ff(torch.addcmul(shift_ff, normed(x), 1 + scale_ff)) * gate_ff


class LTXVModel(nn.Module):
    """Predicts the flow of a noisy video from a time 0..1 and text tokens.

    Args:
        in_channels: Latent channels.
        cross_attention_dim: Width of the projected text.
        caption_channels: Width of the text tokens.
        causal_temporal_positioning: Whether the first cell stands for one frame in places.
    """

    reads_patches = frozenset({patches.OUTPUT, "dit"})

    def __init__(
        self,
        in_channels: int = 128,
        cross_attention_dim: int = 2048,
        attention_head_dim: int = 64,
        num_attention_heads: int = 32,
        caption_channels: int = 4096,
        num_layers: int = 28,
        causal_temporal_positioning: bool = False,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        del kwargs  # facts of other members of the family
        parts = {"dtype": dtype, "device": device, "operations": operations}
        place = {"dtype": dtype, "device": device}
        width = attention_head_dim * num_attention_heads
        self.dtype, self.inner_dim, self.out_channels = dtype, width, in_channels
        self.causal_temporal_positioning = causal_temporal_positioning
        self.patchifier = SymmetricPatchifier(1)
        self.patchify_proj = operations.Linear(in_channels, width, **place)
        self.adaln_single = AdaLayerNormSingle(width, parts)
        self.caption_projection = CaptionProjection(caption_channels, width, parts)
        self.transformer_blocks = nn.ModuleList(
            BasicTransformerBlock(
                width, num_attention_heads, attention_head_dim, cross_attention_dim, **parts
            )
            for _ in range(num_layers)
        )
        self.scale_shift_table = nn.Parameter(torch.empty(2, width, **place))
        self.norm_out = operations.LayerNorm(width, eps=NORM_EPS, elementwise_affine=False, **place)
        self.proj_out = operations.Linear(width, in_channels, **place)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        attention_mask: Tensor | None = None,
        frame_rate: float = USUAL_FRAME_RATE,
        transformer_options: Options | None = None,
        keyframe_idxs: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, T, H, W]``.
            timestep: Times ``[B]`` in 0..1, or ``[B, N, 1]`` for each cell.
            context: Text tokens ``[B, L, D]``.
            attention_mask: 1 for tokens, 0 for padding ``[B, L]``.
            frame_rate: Frames per second.
            keyframe_idxs: Places ``[B, 3, n]`` in frames and pixels of the last n cells, or both
                ends of them ``[B, 3, n, 2]``.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, timestep, context, attention_mask, frame_rate, options, keyframe_idxs, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        attention_mask: Tensor | None = None,
        frame_rate: float = USUAL_FRAME_RATE,
        transformer_options: Options | None = None,
        keyframe_idxs: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        del kwargs
        options = {} if transformer_options is None else transformer_options
        shape = x.shape
        tokens, cells = self.patchifier.patchify(x)
        places = latent_to_pixel_coords(cells, CELL, self.causal_temporal_positioning).float()
        if keyframe_idxs is not None:
            given = keyframe_idxs[..., 0] if keyframe_idxs.ndim == 4 else keyframe_idxs
            places[:, :, places.shape[2] - given.shape[2] :] = given.to(places)
        places[:, 0] /= frame_rate
        h = self.patchify_proj(tokens)
        turn = rotations(places, self.inner_dim, h.dtype)
        times = timestep.reshape(shape[0], -1) * TIME_FACTOR
        vec, embedded = self.adaln_single(times.flatten(), h.dtype)
        vec, embedded = (one.unflatten(0, (shape[0], -1)) for one in (vec, embedded))
        text = self.caption_projection(context)
        mask = text_mask(attention_mask, h)
        h = self._blocks(h, text, mask, vec, turn, options)
        shift, scale = (self.scale_shift_table.to(h) + embedded[:, :, None]).unbind(2)
        out = self.proj_out(torch.addcmul(shift, self.norm_out(h), 1 + scale))
        return self.patchifier.unpatchify(out, shape[3], shape[4], shape[2], self.out_channels)

    def _blocks(
        self,
        h: Tensor,
        text: Tensor,
        mask: Tensor | None,
        vec: Tensor,
        turn: Turn,
        options: Options,
    ) -> Tensor:
        replaced = (options.get("patches_replace") or {}).get("dit") or {}
        options["total_blocks"], options["block_type"] = len(self.transformer_blocks), "double"
        for number, block in enumerate(self.transformer_blocks):
            options["block_index"] = number

            def original(args: Options, block: nn.Module = block) -> Options:
                out = block(args["img"], args["txt"], args["attention_mask"], args["vec"],
                            args["pe"], args["transformer_options"])  # fmt: skip
                return {"img": out}

            args = {"img": h, "txt": text, "attention_mask": mask, "vec": vec, "pe": turn,
                    "transformer_options": options}  # fmt: skip
            key = ("double_block", number)
            if key in replaced:
                h = replaced[key](args, {"original_block": original})["img"]
            else:
                h = original(args)["img"]
        return h


def text_mask(attention_mask: Tensor | None, like: Tensor) -> Tensor | None:
    """What is added to the scores of text ``[B, 1, 1, L]``: padding is not seen."""
    if attention_mask is None or torch.is_floating_point(attention_mask):
        return attention_mask
    hidden = (attention_mask == 0).to(like.device)[:, None, None]
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(hidden, torch.finfo(like.dtype).min)
