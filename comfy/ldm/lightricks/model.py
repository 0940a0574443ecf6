"""LTX video: a transformer over the cells of a video, beside which it reads text.

Source: HaCohen et al. 2024, https://arxiv.org/abs/2501.00103.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.common_dit import rms_norm
from comfy.ldm.lightricks.symmetric_patchifier import SymmetricPatchifier, latent_to_pixel_coords
from comfy.nn import attention, patches
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped

TIME_WAVES, TIME_FACTOR = 256, 1000.0
NORM_EPS, QK_EPS = 1e-6, 1e-5
USUAL_FRAME_RATE = 25
CELL = (8, 32, 32)  # frames, rows and columns of a latent cell
LARGEST_PLACE = (20, 2048, 2048)  # seconds, rows and columns that rotations were made for
THETA = 10000.0
Options = dict[str, Any]
Turn = tuple[Tensor, Tensor]


def rotations(places: Tensor, dim: int, dtype: torch.dtype) -> Turn:
    """Cosines and sines ``[B, N, D]`` of places in seconds and pixels ``[B, 3, N]``: neighbouring
    channels turn together; channels that no axis has stand first and do not turn."""
    largest = torch.tensor(LARGEST_PLACE, device=places.device, dtype=torch.float32)
    shares = places.float() / largest[:, None]
    powers = torch.linspace(0, 1, dim // 6, device=places.device, dtype=torch.float32)
    waves = THETA**powers * (math.pi / 2)
    angles = (waves * (shares.transpose(1, 2)[..., None] * 2 - 1)).transpose(-1, -2).flatten(2)
    angles = F.pad(angles.repeat_interleave(2, dim=-1), (dim % 6, 0))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Turn neighbouring channels of ``x [B, N, D]``."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * turn[0] + torch.stack([-second, first], dim=-1).flatten(-2) * turn[1]


class RMSNorm(nn.Module):
    """Division by the root mean square, times a weight."""

    def __init__(self, dim: int, **place: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, **place))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x), QK_EPS)


class Attention(nn.Module):
    """Attention to the tokens themselves or to others, queries and keys normed as a whole."""

    def __init__(self, width: int, seen_width: int, heads: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        linear = parts["operations"].Linear
        self.heads = heads
        self.q_norm, self.k_norm = RMSNorm(width, **place), RMSNorm(width, **place)
        self.to_q = linear(width, width, **place)
        self.to_k, self.to_v = (
            linear(seen_width, width, **place),
            linear(seen_width, width, **place),
        )
        self.to_out = nn.Sequential(linear(width, width, **place), nn.Identity())

    def forward(
        self,
        x: Tensor,
        seen: Tensor | None = None,
        mask: Tensor | None = None,
        turn: Turn | None = None,
        options: Options | None = None,
    ) -> Tensor:
        seen = x if seen is None else seen
        q, k, v = self.q_norm(self.to_q(x)), self.k_norm(self.to_k(seen)), self.to_v(seen)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        out = attention.optimized_attention(
            q, k, v, self.heads, mask=mask, transformer_options=options
        )
        if turn is not None:
            out = patches.attention_output(out, options, self.heads, (0, x.shape[1]))
        return self.to_out(out)


class _Gelu(nn.Module):
    """A linear layer with GELU behind it."""

    def __init__(self, width: int, inner: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.proj = parts["operations"].Linear(width, inner, **place)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, width: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        last = parts["operations"].Linear(4 * width, width, **place)
        self.net = nn.Sequential(_Gelu(width, 4 * width, parts), nn.Identity(), last)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Block(nn.Module):
    """Attention among the cells, to the text, and feed-forward."""

    compiles_alone = True

    def __init__(self, width: int, text_width: int, heads: int, parts: Options) -> None:
        super().__init__()
        self.attn1 = Attention(width, width, heads, parts)
        self.attn2 = Attention(width, text_width, heads, parts)
        self.ff = FeedForward(width, parts)
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.scale_shift_table = nn.Parameter(torch.empty(6, width, **place))

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        attention_mask: Tensor | None,
        timestep: Tensor,
        pe: Turn,
        transformer_options: Options | None = None,
    ) -> Tensor:
        """One layer over ``x [B, N, D]``; ``timestep [B, 1 or N, 6 * D]`` modulates it."""
        mods = self.scale_shift_table.to(x) + timestep.unflatten(-1, (6, -1))
        shift, scale, gate, shift_ff, scale_ff, gate_ff = mods.unbind(2)
        h = torch.addcmul(shift, _normed(x), 1 + scale)
        x = x + self.attn1(h, turn=pe, options=transformer_options) * gate
        x = x + self.attn2(x, context, attention_mask, options=transformer_options)
        return x + self.ff(torch.addcmul(shift_ff, _normed(x), 1 + scale_ff)) * gate_ff


def _normed(x: Tensor) -> Tensor:
    return rms_norm(x, None, NORM_EPS)


class TimestepEmbedder(nn.Module):
    """Two linear layers with SiLU between them, over waves of times."""

    def __init__(self, width: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.linear_1 = parts["operations"].Linear(TIME_WAVES, width, **place)
        self.linear_2 = parts["operations"].Linear(width, width, **place)

    def forward(self, times: Tensor, dtype: torch.dtype) -> Tensor:
        waves = timestep_embedding(times, TIME_WAVES).to(dtype)
        return self.linear_2(F.silu(self.linear_1(waves)))


class AdaLayerNormSingle(nn.Module):
    """What modulates all blocks, and the embedded time itself."""

    def __init__(self, width: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.emb = nn.ModuleDict({"timestep_embedder": TimestepEmbedder(width, parts)})
        self.linear = parts["operations"].Linear(width, 6 * width, **place)

    def forward(self, times: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        embedded = self.emb["timestep_embedder"](times, dtype)
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
            Block(width, cross_attention_dim, num_attention_heads, parts) for _ in range(num_layers)
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
        mask = _mask(attention_mask, h)
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


def _mask(attention_mask: Tensor | None, like: Tensor) -> Tensor | None:
    """What is added to the scores of text ``[B, 1, 1, L]``: padding is not seen."""
    if attention_mask is None or torch.is_floating_point(attention_mask):
        return attention_mask
    hidden = (attention_mask == 0).to(like.device)[:, None, None]
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(hidden, torch.finfo(like.dtype).min)
