"""Mochi 1: a transformer over the patches of a video and a text, each in a stream of its own
width, which attend together.

Custom nodes reach in through ``transformer_options``: ``patches["attn1_output_patch"]`` sees the
attention of both streams, the video's tokens first, ``patches_replace["dit"]`` has keys
``("double_block", i)`` with the video's tokens ``[B, L, D]`` and the text's.
Source: https://github.com/genmoai/mochi (Genmo, 2024).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.common_dit import pad_to_patch_size, rms_norm, turn
from comfy.nn import attention, patches
from comfy.nn.layout import tokens_of_patches
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped

WAVES = 256  # of a time
POOLER_HEADS = 8
AREA = 192 * 192  # patches of a frame that positions were made for
WIDTHS_APART = 256  # feed-forward widths are multiples of it
NORM_EPS, HEAD_EPS = 1e-6, 1e-5
Options = dict[str, Any]
Parts = dict[str, Any]


def _place(parts: Parts) -> dict[str, Any]:
    return {"dtype": parts["dtype"], "device": parts["device"]}


def _linear(inputs: int, outputs: int, parts: Parts, bias: bool = True) -> Any:
    return parts["operations"].Linear(inputs, outputs, bias=bias, **_place(parts))


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """``x [B, L, D]`` of length 1, times 1 and a scale ``[B, D]`` (in float32)."""
    return (rms_norm(x.float(), None, NORM_EPS) * (1 + scale[:, None].float())).to(x.dtype)


def gated(x: Tensor, made: Tensor, gate: Tensor) -> Tensor:
    """x, and what was made of it at length 1, as far as a gate ``[B, D]`` is open."""
    opened = rms_norm(made.float(), None, NORM_EPS) * torch.tanh(gate[:, None]).float()
    return x + opened.to(x.dtype)


def positions(frames: int, rows: int, columns: int, device: Any) -> Tensor:
    """Frame, row and column of every patch ``[T * H * W, 3]``; rows and columns are counted from
    the middle, in units of which a frame of any size has `AREA`.
    """
    unit = math.sqrt(AREA / (rows * columns))

    def middles(count: int) -> Tensor:
        places = torch.arange(count, device=device, dtype=torch.float32)
        return (places + 0.5 - count / 2) * unit

    times = torch.arange(frames, device=device, dtype=torch.float32)
    grid = torch.meshgrid(times, middles(rows), middles(columns), indexing="ij")
    return torch.stack(grid, dim=-1).flatten(0, 2)


class AttentionPool(nn.Module):
    """One vector of a text: what its mean sees in it."""

    def __init__(self, width: int, out: int, parts: Parts) -> None:
        super().__init__()
        self.to_kv = _linear(width, 2 * width, parts)
        self.to_q = _linear(width, width, parts)
        self.to_out = _linear(width, out, parts)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``[B, out]`` of ``x [B, L, width]``, of which ``mask [B, L]`` tells what counts."""
        share = mask[..., None].to(x)
        share = share / share.sum(dim=1, keepdim=True).clamp(min=1)
        mean = (x * share).sum(dim=1, keepdim=True)
        seen = F.pad(mask != 0, (1, 0), value=True)[:, None, None]
        hidden = torch.zeros(seen.shape, dtype=x.dtype, device=x.device)
        hidden = hidden.masked_fill(~seen, -torch.finfo(x.dtype).max)
        k, v = self.to_kv(torch.cat([mean, x], dim=1)).chunk(2, dim=-1)
        out = attention.optimized_attention(self.to_q(mean), k, v, POOLER_HEADS, hidden)
        return self.to_out(out)[:, 0]


class FeedForward(nn.Module):
    """Two linear layers with a gate between them; two thirds as wide as one without would be."""

    def __init__(self, width: int, ratio: float, parts: Parts) -> None:
        super().__init__()
        inner = int(2 * int(width * ratio) / 3)
        inner = -(-inner // WIDTHS_APART) * WIDTHS_APART
        self.w1 = _linear(width, 2 * inner, parts, bias=False)
        self.w2 = _linear(inner, width, parts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w1(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * value)


class JointAttention(nn.Module):
    """Attention of both streams together, in the heads of the video's."""

    def __init__(self, width: int, text: int, heads: int, has_text_out: bool, parts: Parts) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_x = _linear(width, 3 * width, parts, bias=False)
        self.qkv_y = _linear(text, 3 * width, parts, bias=False)
        norm = {"eps": HEAD_EPS, **_place(parts)}
        for name in ("q_norm_x", "k_norm_x", "q_norm_y", "k_norm_y"):
            setattr(self, name, parts["operations"].RMSNorm(width // heads, **norm))
        self.proj_x = _linear(width, width, parts)
        self.proj_y = _linear(width, text, parts) if has_text_out else None

    q_norm_x: nn.Module
    k_norm_x: nn.Module
    q_norm_y: nn.Module
    k_norm_y: nn.Module

    def forward(
        self, x: Tensor, y: Tensor, angles: Tensor, options: Options
    ) -> tuple[Tensor, Tensor | None]:
        """What ``x [B, L, D]`` and the text ``y [B, M, E]`` see; None where the text ends here."""
        heads = (3, self.heads, -1)
        qx, kx, vx = self.qkv_x(x).unflatten(-1, heads).unbind(2)
        qy, ky, vy = self.qkv_y(y).unflatten(-1, heads).unbind(2)
        qx, kx = turn(self.q_norm_x(qx), angles), turn(self.k_norm_x(kx), angles)
        qy, ky = self.q_norm_y(qy), self.k_norm_y(ky)
        q, k, v = (
            torch.cat(pair, dim=1).transpose(1, 2) for pair in ((qx, qy), (kx, ky), (vx, vy))
        )
        seen = attention.optimized_attention(
            q, k, v, self.heads, skip_reshape=True, transformer_options=options
        )
        picture = (0, x.shape[1])
        seen = patches.attention_output(seen, options, self.heads, picture)
        out, text = seen.split([x.shape[1], y.shape[1]], dim=1)
        return self.proj_x(out), None if self.proj_y is None else self.proj_y(text)


class Block(nn.Module):
    """A layer of both streams; the text's is not needed after the last one."""

    compiles_alone = True

    def __init__(
        self,
        width: int,
        text: int,
        heads: int,
        ratios: tuple[float, float],
        has_text_out: bool,
        parts: Parts,
    ) -> None:
        super().__init__()
        self.mod_x = _linear(width, 4 * width, parts)
        self.mod_y = _linear(width, 4 * text if has_text_out else text, parts)
        self.attn = JointAttention(width, text, heads, has_text_out, parts)
        self.mlp_x = FeedForward(width, ratios[0], parts)
        self.mlp_y = FeedForward(text, ratios[1], parts) if has_text_out else None

    def forward(
        self, x: Tensor, y: Tensor, vec: Tensor, angles: Tensor, options: Options
    ) -> tuple[Tensor, Tensor]:
        """``x [B, L, D]``, ``y [B, M, E]``; ``vec [B, D]`` modulates both."""
        vec = F.silu(vec)
        scale_x, gate_x, scale_mlp_x, gate_mlp_x = self.mod_x(vec).chunk(4, dim=-1)
        scale_y, *rest = self.mod_y(vec).split(y.shape[-1], dim=-1)
        made, text = self.attn(scaled(x, scale_x), scaled(y, scale_y), angles, options)
        x = gated(x, made, gate_x)
        x = gated(x, self.mlp_x(scaled(x, scale_mlp_x)), gate_mlp_x)
        if self.mlp_y is not None and text is not None:
            gate_y, scale_mlp_y, gate_mlp_y = rest
            y = gated(y, text, gate_y)
            y = gated(y, self.mlp_y(scaled(y, scale_mlp_y)), gate_mlp_y)
        return x, y


class FinalLayer(nn.Module):
    """A modulated norm and a projection to patches."""

    def __init__(self, width: int, out: int, parts: Parts) -> None:
        super().__init__()
        norm = {"elementwise_affine": False, "eps": NORM_EPS, **_place(parts)}
        self.norm_final = parts["operations"].LayerNorm(width, **norm)
        self.mod = _linear(width, 2 * width, parts)
        self.linear = _linear(width, out, parts)

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale = self.mod(F.silu(vec))[:, None].chunk(2, dim=-1)
        return self.linear(torch.addcmul(shift, self.norm_final(x), 1 + scale))


class AsymmDiTJoint(nn.Module):
    """Predicts the flow of a noisy video from times 0..1 and text tokens.

    Args:
        hidden_size_x, hidden_size_y: Widths of the video's and the text's stream.
        mlp_ratio_x, mlp_ratio_y: How much wider their feed-forward would be without gates.
        t5_feat_dim: Width of the text tokens.
        timestep_scale: What times are counted in.
    """

    reads_patches = frozenset({"dit", patches.OUTPUT})

    def __init__(
        self,
        patch_size: int = 2,
        in_channels: int = 12,
        hidden_size_x: int = 3072,
        hidden_size_y: int = 1536,
        depth: int = 48,
        num_heads: int = 24,
        mlp_ratio_x: float = 4.0,
        mlp_ratio_y: float = 4.0,
        t5_feat_dim: int = 4096,
        timestep_scale: float = 1000.0,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        if hidden_size_x % num_heads or hidden_size_x // num_heads % 2:
            raise ValueError(
                f"{hidden_size_x} channels, which {num_heads} heads do not divide into pairs"
            )
        parts: Parts = {"dtype": dtype, "device": device, "operations": operations}
        place, width = _place(parts), hidden_size_x
        self.dtype, self.patch_size, self.in_channels = dtype, patch_size, in_channels
        self.timestep_scale = timestep_scale
        sizes: Options = {"kernel_size": patch_size, "stride": patch_size, **place}
        self.x_embedder = nn.ModuleDict({"proj": operations.Conv2d(in_channels, width, **sizes)})
        times = nn.Sequential(_linear(WAVES, width, parts), nn.SiLU(), _linear(width, width, parts))
        self.t_embedder = nn.ModuleDict({"mlp": times})
        self.t5_y_embedder = AttentionPool(t5_feat_dim, width, parts)
        self.t5_yproj = _linear(t5_feat_dim, hidden_size_y, parts)
        head = width // num_heads
        self.pos_frequencies = nn.Parameter(torch.empty(3, num_heads, head // 2, **place))
        self.blocks = nn.ModuleList(
            Block(
                width, hidden_size_y, num_heads, (mlp_ratio_x, mlp_ratio_y), number < depth - 1,
                parts,
            )
            for number in range(depth)
        )  # fmt: skip
        self.final_layer = FinalLayer(width, patch_size**2 * in_channels, parts)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        attention_mask: Tensor | None = None,
        num_tokens: int | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, T, H, W]``.
            timestep: Share of noise ``[B]`` in 0..1.
            context: Text tokens ``[B, L, D]``, with a mask ``[B, L]`` of those that count.
            num_tokens: How many of the first text tokens the layers are given; all by default.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, timestep, context, attention_mask, num_tokens, options, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        attention_mask: Tensor | None = None,
        num_tokens: int | None = None,
        transformer_options: Options | None = None,
        **_: Any,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        height, width = x.shape[-2:]
        patch = self.patch_size
        x = pad_to_patch_size(x, (1, patch, patch))
        count, frames = x.shape[0], x.shape[2]
        rows, columns = (side // patch for side in x.shape[3:])
        cells = self.x_embedder["proj"](rearrange(x, "b c t h w -> (b t) c h w"))
        tokens = tokens_of_patches(cells).unflatten(0, (count, frames)).flatten(1, 2)
        if attention_mask is None:
            attention_mask = torch.ones(context.shape[:2], device=context.device)
        # The authors count time from noise to picture.
        waves = timestep_embedding((1 - timestep) * self.timestep_scale, WAVES).to(tokens.dtype)
        vec = self.t_embedder["mlp"](waves) + self.t5_y_embedder(context, attention_mask)
        text = self.t5_yproj(context[:, :num_tokens])
        where = positions(frames, rows, columns, x.device)
        angles = torch.einsum("nd,dhf->nhf", where, self.pos_frequencies.to(where))
        tokens = self._run_blocks(tokens, text, vec, angles, options)
        out = rearrange(
            self.final_layer(tokens, vec), "b (t h w) (p q c) -> b c t (h p) (w q)",
            t=frames, h=rows, p=patch, q=patch,
        )  # fmt: skip
        return -out[..., :height, :width]  # theirs points to the picture, a flow to the noise

    def _run_blocks(
        self, tokens: Tensor, text: Tensor, vec: Tensor, angles: Tensor, options: Options
    ) -> Tensor:
        table = (options.get("patches_replace") or {}).get("dit") or {}
        options["total_blocks"], options["block_type"] = len(self.blocks), "double"
        for number, block in enumerate(self.blocks):
            options["block_index"] = number

            def original(args: Mapping[str, Any], block: nn.Module = block) -> Options:
                given = (args["img"], args["txt"], args["vec"], args["pe"])
                img, txt = block(*given, args["transformer_options"])
                return {"img": img, "txt": txt}

            args = {"img": tokens, "txt": text, "vec": vec, "pe": angles}
            args["transformer_options"] = options  # type: ignore[assignment]
            replacement = table.get(("double_block", number))
            if replacement is None:
                made = original(args)
            else:
                made = replacement(args, {"original_block": original})
            tokens, text = made["img"], made["txt"]
        return tokens
