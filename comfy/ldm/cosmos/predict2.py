"""Cosmos Predict 2: a transformer over the cells of a video; each frame may have its own time.

Custom nodes reach in through ``transformer_options``: ``patches["attn1_output_patch"]`` and
``patches["attn2_output_patch"]`` see the attention of the video with itself and with the text,
``patches_replace["dit"]`` has keys ``("double_block", i)`` with the video's tokens ``[B, L, D]``.
Source: https://research.nvidia.com/labs/dir/cosmos-predict2/;
https://github.com/nvidia-cosmos/cosmos-predict2.
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
from comfy.nn import attention, patches
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped

NORM_EPS = 1e-6
THETA = 10000.0
Options = dict[str, Any]


def frequencies(channels: int, stretch: float, device: Any) -> Tensor:
    """Turns a position of an axis, for each pair of channels; ``stretch`` spreads positions past
    those of the training.

    Source: the base grows by stretch^(channels / (channels - 2)), https://arxiv.org/abs/2309.00071.
    """
    theta = THETA * stretch ** (channels / (channels - 2)) if channels > 2 else THETA
    places = torch.arange(0, channels, 2, device=device, dtype=torch.float32)
    return 1.0 / theta ** (places / channels)


def position_angles(
    sizes: Sequence[int], head: int, stretches: Sequence[float], device: Any, pace: float = 1.0
) -> Tensor:
    """Angles ``[T * H * W, head / 2]``: a third of the channels for rows, for columns, the rest for
    frames.

    Args:
        sizes: Frames, rows and columns.
        stretches: As `frequencies` has it, of each.
        pace: Time from a frame to the next, in that of the training.
    """
    side = head // 6 * 2
    parts = []
    for axis, (channels, stretch) in enumerate(zip((head - 2 * side, side, side), stretches)):
        places = torch.arange(sizes[axis], device=device, dtype=torch.float32)
        if axis == 0:
            places = places * pace
        angles = torch.outer(places, frequencies(channels, stretch, device))
        shape = [1, 1, 1, angles.shape[-1]]
        shape[axis] = sizes[axis]
        parts.append(angles.view(shape).expand(*sizes, -1))
    return torch.cat(parts, dim=-1).flatten(0, 2)


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Turn ``x [B, heads, L, D]``; its first and second half of channels are the pairs."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(turned, dim=-1).to(x.dtype)


def apply_rotary_pos_emb(t: Tensor, freqs: Tensor) -> Tensor:
    """`turn` of ``t [..., D]`` by rotations ``[..., D / 2, 2, 2]``, as custom nodes make them."""
    pairs = t.float().unflatten(-1, (2, -1)).movedim(-2, -1).unsqueeze(-2)
    turned = freqs[..., 0] * pairs[..., 0] + freqs[..., 1] * pairs[..., 1]
    return turned.movedim(-1, -2).flatten(-2).to(t.dtype)


class Attention(nn.Module):
    """Attention of the video with itself or, given the text's width, with the text."""

    def __init__(
        self, width: int, heads: int, context: int | None, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.heads, self.is_cross = heads, context is not None
        self.q_proj = operations.Linear(width, width, bias=False, **place)
        self.k_proj = operations.Linear(context or width, width, bias=False, **place)
        self.v_proj = operations.Linear(context or width, width, bias=False, **place)
        self.q_norm, self.k_norm = (RMSNorm(width // heads, **place) for _ in range(2))
        self.output_proj = operations.Linear(width, width, bias=False, **place)

    def forward(
        self, x: Tensor, context: Tensor | None, angles: Tensor | None, options: Options
    ) -> Tensor:
        """``x [B, L, D]`` at ``angles [L, D / heads / 2]``."""
        source = x if context is None else context
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q_proj(x), self.k_proj(source), self.v_proj(source))
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = turn(q, angles), turn(k, angles)
        seen = attention.optimized_attention(
            q, k, v, self.heads, skip_reshape=True, transformer_options=options
        )
        name = patches.CROSS_OUTPUT if self.is_cross else patches.OUTPUT
        return self.output_proj(patches.attention_output(seen, options, self.heads, None, name))


class GPT2FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, width: int, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.layer1 = operations.Linear(width, inner, bias=False, **place)
        self.layer2 = operations.Linear(inner, width, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(functional.gelu(self.layer1(x)))


def modulation(
    width: int, inner: int | None, parts: int, operations: Any, **place: Any
) -> nn.Sequential:
    """From a time to changes of a layer, with fewer channels between if there is a number."""
    if inner is None:
        linear = operations.Linear(width, parts * width, bias=False, **place)
        return nn.Sequential(nn.SiLU(), linear)
    return nn.Sequential(
        nn.SiLU(),
        operations.Linear(width, inner, bias=False, **place),
        operations.Linear(inner, parts * width, bias=False, **place),
    )


class Block(nn.Module):
    """A layer: the video with itself, with the text, and cell by cell."""

    compiles_alone = True

    def __init__(
        self,
        width: int,
        heads: int,
        context: int,
        mlp_ratio: float,
        lora_dim: int | None,
        operations: Any,
        **place: Any,
    ) -> None:
        super().__init__()
        norm = {"elementwise_affine": False, "eps": NORM_EPS, **place}
        self.layer_norm_self_attn = operations.LayerNorm(width, **norm)
        self.self_attn = Attention(width, heads, None, operations, **place)
        self.layer_norm_cross_attn = operations.LayerNorm(width, **norm)
        self.cross_attn = Attention(width, heads, context, operations, **place)
        self.layer_norm_mlp = operations.LayerNorm(width, **norm)
        self.mlp = GPT2FeedForward(width, int(width * mlp_ratio), operations, **place)
        for name in ("self_attn", "cross_attn", "mlp"):
            made = modulation(width, lora_dim, 3, operations, **place)
            setattr(self, f"adaln_modulation_{name}", made)

    def forward(
        self,
        x: Tensor,
        vec: Tensor,
        shared: Tensor | float,
        context: Tensor,
        angles: Tensor,
        transformer_options: Options,
    ) -> Tensor:
        """``x [B, L, D]``; ``vec`` and ``shared`` are the time of each frame ``[B, T, D]`` and what
        all layers add to their changes ``[B, T, 3 D]``."""
        given: dict[str, tuple[Any, ...]] = {
            "self_attn": (None, angles, transformer_options),
            "cross_attn": (context, None, transformer_options),
            "mlp": (),
        }
        frames = vec.shape[1]
        for name, others in given.items():
            changes = getattr(self, f"adaln_modulation_{name}")(vec) + shared
            shift, scale, gate = changes[:, :, None].chunk(3, dim=-1)
            normed = getattr(self, f"layer_norm_{name}")(x).unflatten(1, (frames, -1))
            normed = (normed * (1 + scale) + shift).flatten(1, 2)
            made = getattr(self, name)(normed, *others)
            x = x + (gate * made.unflatten(1, (frames, -1))).flatten(1, 2)
        return x


class PatchEmbed(nn.Module):
    """Cells of a video as tokens."""

    def __init__(self, channels: int, width: int, operations: Any, **place: Any) -> None:
        super().__init__()
        linear = operations.Linear(channels, width, bias=False, **place)
        self.proj = nn.Sequential(nn.Identity(), linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class TimestepEmbedding(nn.Module):
    """Waves of a time to what is added to the changes of each layer."""

    def __init__(self, width: int, has_lora: bool, operations: Any, **place: Any) -> None:
        super().__init__()
        out = 3 * width if has_lora else width
        self.linear_1 = operations.Linear(width, width, bias=not has_lora, **place)
        self.linear_2 = operations.Linear(width, out, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(functional.silu(self.linear_1(x)))


class FinalLayer(nn.Module):
    """A modulated norm and a projection to cells."""

    def __init__(
        self, width: int, out: int, lora_dim: int | None, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        norm = {"elementwise_affine": False, "eps": NORM_EPS, **place}
        self.layer_norm = operations.LayerNorm(width, **norm)
        self.linear = operations.Linear(width, out, bias=False, **place)
        self.adaln_modulation = modulation(width, lora_dim, 2, operations, **place)

    def forward(self, x: Tensor, vec: Tensor, shared: Tensor | float) -> Tensor:
        part = shared[..., : 2 * x.shape[-1]] if isinstance(shared, Tensor) else shared
        shift, scale = (self.adaln_modulation(vec) + part)[:, :, None].chunk(2, dim=-1)
        normed = self.layer_norm(x).unflatten(1, (vec.shape[1], -1)) * (1 + scale) + shift
        return self.linear(normed.flatten(1, 2))


class MiniTrainDIT(nn.Module):
    """Predicts the flow of a noisy video from times and text tokens.

    Args:
        in_channels: Of a latent, without the mask of padding that the network adds.
        crossattn_emb_channels: Width of the text tokens.
        adaln_lora_dim: Channels between a time and the changes of a layer.
        rope_h_extrapolation_ratio, rope_w_extrapolation_ratio, rope_t_extrapolation_ratio: How far
            positions are spread past those of the first training.
    """

    reads_patches = frozenset({"dit", patches.OUTPUT, patches.CROSS_OUTPUT})

    def __init__(
        self,
        in_channels: int = 16,
        out_channels: int = 16,
        patch_spatial: int = 2,
        patch_temporal: int = 1,
        concat_padding_mask: bool = True,
        model_channels: int = 2048,
        num_blocks: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        crossattn_emb_channels: int = 1024,
        use_adaln_lora: bool = True,
        adaln_lora_dim: int = 256,
        rope_h_extrapolation_ratio: float = 1.0,
        rope_w_extrapolation_ratio: float = 1.0,
        rope_t_extrapolation_ratio: float = 1.0,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        if model_channels % num_heads or model_channels // num_heads % 2:
            raise ValueError(
                f"{model_channels} channels, which {num_heads} heads do not divide into pairs"
            )
        parts = {"operations": operations, "dtype": dtype, "device": device}
        width, lora_dim = model_channels, adaln_lora_dim if use_adaln_lora else None
        cell = patch_spatial**2 * patch_temporal
        self.dtype, self.heads = dtype, num_heads
        self.patch = (patch_temporal, patch_spatial, patch_spatial)
        self.concat_padding_mask, self.has_lora = concat_padding_mask, use_adaln_lora
        self.stretches = (
            rope_t_extrapolation_ratio,
            rope_h_extrapolation_ratio,
            rope_w_extrapolation_ratio,
        )
        self.x_embedder = PatchEmbed((in_channels + concat_padding_mask) * cell, width, **parts)
        embedding = TimestepEmbedding(width, use_adaln_lora, **parts)
        self.t_embedder = nn.Sequential(nn.Identity(), embedding)
        self.t_embedding_norm = RMSNorm(width, dtype=dtype, device=device)
        self.blocks = nn.ModuleList(
            Block(width, num_heads, crossattn_emb_channels, mlp_ratio, lora_dim, **parts)
            for _ in range(num_blocks)
        )
        self.final_layer = FinalLayer(width, cell * out_channels, lora_dim, **parts)

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        fps: Any = None,
        padding_mask: Tensor | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, T, H, W]``.
            timesteps: Times ``[B]``, or of each frame ``[B, T]``.
            context: Text tokens ``[B, L, D]``.
            fps: Accepted for compatibility: these networks do not look at the rate.
            padding_mask: 1 where there is no picture ``[B, 1, H, W]``; nowhere by default.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, timesteps, context, fps, padding_mask, options, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        fps: Any = None,
        padding_mask: Tensor | None = None,
        transformer_options: Options | None = None,
        **_: Any,
    ) -> Tensor:
        del fps
        options = {} if transformer_options is None else transformer_options
        shown = x.shape[2:]
        x = pad_to_patch_size(x, self.patch)
        if self.concat_padding_mask:
            x = torch.cat([x, mask_like(x, padding_mask)], dim=1)
        sizes = [size // patch for size, patch in zip(x.shape[2:], self.patch)]
        r, m, n = self.patch
        cells = rearrange(x, "b c (t r) (h m) (w n) -> b (t h w) (c r m n)", r=r, m=m, n=n)
        tokens = self.x_embedder(cells)
        times = timesteps if timesteps.ndim == 2 else timesteps[:, None]
        waves = timestep_embedding(times.flatten(), tokens.shape[-1]).unflatten(0, times.shape)
        waves = waves.to(tokens.dtype)
        made = self.t_embedder(waves)
        vec, shared = (waves, made) if self.has_lora else (made, 0.0)
        vec = self.t_embedding_norm(vec)
        head = tokens.shape[-1] // self.heads
        angles = position_angles(sizes, head, self.stretches, x.device)
        tokens = self._run_blocks(tokens, vec, shared, context, angles, options)
        out = rearrange(
            self.final_layer(tokens, vec, shared),
            "b (t h w) (m n r c) -> b c (t r) (h m) (w n)",
            t=sizes[0], h=sizes[1], r=r, m=m, n=n,
        )  # fmt: skip
        return out[:, :, : shown[0], : shown[1], : shown[2]]

    def _run_blocks(
        self,
        tokens: Tensor,
        vec: Tensor,
        shared: Tensor | float,
        context: Tensor,
        angles: Tensor,
        options: Options,
    ) -> Tensor:
        table = (options.get("patches_replace") or {}).get("dit") or {}
        options["total_blocks"], options["block_type"] = len(self.blocks), "double"
        for number, block in enumerate(self.blocks):
            options["block_index"] = number

            def original(args: Mapping[str, Any], block: nn.Module = block) -> Options:
                told = args.get("transformer_options") or {}
                img = block(args["img"], args["vec"], shared, args["txt"], args["pe"], told)
                return {"img": img}

            args = {"img": tokens, "txt": context, "vec": vec, "pe": angles}
            args["transformer_options"] = options  # type: ignore[assignment]
            replacement = table.get(("double_block", number))
            if replacement is None:
                tokens = original(args)["img"]
            else:
                tokens = replacement(args, {"original_block": original})["img"]
        return tokens


def mask_like(x: Tensor, mask: Tensor | None) -> Tensor:
    """A mask of padding as a channel of a video ``[B, 1, T, H, W]``."""
    if mask is None:
        return torch.zeros_like(x[:, :1])
    mask = functional.interpolate(mask.to(x), x.shape[-2:], mode="nearest")
    return mask[:, :, None].expand(x.shape[0], 1, x.shape[2], *mask.shape[-2:])
