"""Cosmos 1: a transformer over the cells of a video.

It is built as Cosmos Predict 2 is, and differs in what it knows of places: beside the turns of
queries and keys, each layer adds a learned vector of a cell's frame, row and column, and the turns
of frames follow the rate. Custom nodes reach in at the same places.
Source: Agarwal et al. 2025, https://arxiv.org/abs/2501.03575.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.ldm.cosmos.predict2 import (
    GPT2FeedForward,
    PatchEmbed,
    TimestepEmbedding,
    mask_like,
    modulation,
    position_angles,
    turn,
)
from comfy.nn import attention, patches
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped

NORM_EPS = 1e-6
USUAL_RATE = 24  # frames a second for which turns are not changed
PLACES_EPS = 1e-6
Options = dict[str, Any]


class Attention(nn.Module):
    """Attention of the video with itself or, given the text's width, with the text."""

    def __init__(
        self, width: int, heads: int, context: int | None, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.heads, self.is_cross = heads, context is not None
        source = context or width

        def normed(inputs: int) -> nn.Sequential:
            norm = operations.RMSNorm(width // heads, eps=NORM_EPS, **place)
            return nn.Sequential(operations.Linear(inputs, width, bias=False, **place), norm)

        self.to_q, self.to_k = normed(width), normed(source)
        self.to_v = nn.Sequential(operations.Linear(source, width, bias=False, **place))
        self.to_out = nn.Sequential(operations.Linear(width, width, bias=False, **place))

    def forward(
        self, x: Tensor, context: Tensor | None, angles: Tensor | None, options: Options
    ) -> Tensor:
        """``x [B, L, D]`` at ``angles [L, D / heads / 2]``."""
        source = x if context is None else context
        heads = (self.heads, -1)
        q, k = (
            part[1](part[0](tokens).unflatten(-1, heads)).transpose(1, 2)
            for part, tokens in ((self.to_q, x), (self.to_k, source))
        )
        v = self.to_v(source).unflatten(-1, heads).transpose(1, 2)
        if angles is not None:
            q, k = turn(q, angles), turn(k, angles)
        seen = attention.optimized_attention(
            q, k, v, self.heads, skip_reshape=True, transformer_options=options
        )
        name = patches.CROSS_OUTPUT if self.is_cross else patches.OUTPUT
        return self.to_out(patches.attention_output(seen, options, self.heads, None, name))


class VideoAttention(nn.Module):
    """An attention under the name that files have for it."""

    def __init__(self, *sizes: Any, **parts: Any) -> None:
        super().__init__()
        self.attn = Attention(*sizes, **parts)

    def forward(self, *given: Any) -> Tensor:
        return self.attn(*given)


class Part(nn.Module):
    """One of a layer's three parts: a modulated norm before it, a gate behind it."""

    def __init__(
        self, width: int, lora_dim: int | None, block: nn.Module, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        norm = {"elementwise_affine": False, "eps": NORM_EPS, **place}
        self.norm_state = operations.LayerNorm(width, **norm)
        self.block = block
        self.adaLN_modulation = modulation(width, lora_dim, 3, operations, **place)

    def forward(self, x: Tensor, vec: Tensor, shared: Tensor | float, *others: Any) -> Tensor:
        shift, scale, gate = (self.adaLN_modulation(vec) + shared).chunk(3, dim=-1)
        return x + gate * self.block(self.norm_state(x) * (1 + scale) + shift, *others)


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
        parts = {"operations": operations, **place}
        inner = int(width * mlp_ratio + 1e-6)  # a ratio read from weights may round down
        made: list[nn.Module] = [
            VideoAttention(width, heads, None, **parts),
            VideoAttention(width, heads, context, **parts),
            GPT2FeedForward(width, inner, **parts),
        ]
        self.blocks = nn.ModuleList(Part(width, lora_dim, part, **parts) for part in made)

    def forward(
        self,
        x: Tensor,
        vec: Tensor,
        shared: Tensor | float,
        context: Tensor,
        angles: Tensor,
        places: Tensor | None,
        options: Options,
    ) -> Tensor:
        """``x [B, L, D]``; ``vec`` and ``shared`` are the time ``[B, 1, D]`` and what all layers
        add to their changes ``[B, 1, 3 D]``, ``places [L, D]`` the vectors of cells.
        """
        x = x if places is None else x + places
        x = self.blocks[0](x, vec, shared, None, angles, options)
        x = self.blocks[1](x, vec, shared, context, None, options)
        return self.blocks[2](x, vec, shared)


class FinalLayer(nn.Module):
    """A modulated norm and a projection to cells."""

    def __init__(
        self, width: int, out: int, lora_dim: int | None, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        norm = {"elementwise_affine": False, "eps": NORM_EPS, **place}
        self.norm_final = operations.LayerNorm(width, **norm)
        self.linear = operations.Linear(width, out, bias=False, **place)
        self.adaLN_modulation = modulation(width, lora_dim, 2, operations, **place)

    def forward(self, x: Tensor, vec: Tensor, shared: Tensor | float) -> Tensor:
        part = shared[..., : 2 * x.shape[-1]] if isinstance(shared, Tensor) else shared
        shift, scale = (self.adaLN_modulation(vec) + part).chunk(2, dim=-1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class Places(nn.Module):
    """Learned vectors of frames, rows and columns."""

    def __init__(self, sizes: Sequence[int], width: int, **place: Any) -> None:
        super().__init__()
        frames, rows, columns = sizes
        self.pos_emb_h = nn.Parameter(torch.empty(rows, width, **place))
        self.pos_emb_w = nn.Parameter(torch.empty(columns, width, **place))
        self.pos_emb_t = nn.Parameter(torch.empty(frames, width, **place))

    def forward(self, sizes: Sequence[int], like: Tensor) -> Tensor:
        """Their sum ``[T * H * W, D]``, each of length sqrt(D).

        Raises:
            ValueError: The video is larger than any the network was made for.
        """
        tables = (self.pos_emb_t, self.pos_emb_h, self.pos_emb_w)
        limits = tuple(len(table) for table in tables)
        if any(size > limit for size, limit in zip(sizes, limits)):
            raise ValueError(
                f"a latent of {tuple(sizes)} cells (frames, rows, columns) for Cosmos 1, which has "
                f"places for {limits}; make it smaller"
            )
        frames, rows, columns = (
            table[:size].to(like.device, torch.float32) for table, size in zip(tables, sizes)
        )
        summed = frames[:, None, None] + rows[None, :, None] + columns[None, None]
        length = torch.linalg.vector_norm(summed, dim=-1, keepdim=True)
        made = summed / (PLACES_EPS + length / summed.shape[-1] ** 0.5)
        return made.flatten(0, 2).to(like.dtype)


class GeneralDIT(nn.Module):
    """Predicts a noisy video from a time and text tokens.

    Args:
        max_img_h, max_img_w, max_frames: Largest latent there are learned places for.
        in_channels: Of a latent, without the mask of padding that the network adds.
        crossattn_emb_channels: Width of the text tokens.
        adaln_lora_dim: Channels between a time and the changes of a layer.
        rope_h_extrapolation_ratio, rope_w_extrapolation_ratio, rope_t_extrapolation_ratio: How far
            positions are spread past those of the first training.
        extra_per_block_abs_pos_emb: Whether layers add learned places.
    """

    reads_patches = frozenset({"dit", patches.OUTPUT, patches.CROSS_OUTPUT})

    def __init__(
        self,
        max_img_h: int = 240,
        max_img_w: int = 240,
        max_frames: int = 128,
        in_channels: int = 16,
        out_channels: int = 16,
        patch_spatial: int = 2,
        patch_temporal: int = 1,
        concat_padding_mask: bool = True,
        model_channels: int = 4096,
        num_blocks: int = 28,
        num_heads: int = 32,
        mlp_ratio: float = 4.0,
        crossattn_emb_channels: int = 1024,
        use_adaln_lora: bool = True,
        adaln_lora_dim: int = 256,
        rope_h_extrapolation_ratio: float = 1.0,
        rope_w_extrapolation_ratio: float = 1.0,
        rope_t_extrapolation_ratio: float = 1.0,
        extra_per_block_abs_pos_emb: bool = True,
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
        place = {"dtype": dtype, "device": device}
        parts = {"operations": operations, **place}
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
        self.extra_pos_embedder = None
        if extra_per_block_abs_pos_emb:
            largest = (max_frames, max_img_h, max_img_w)
            sizes = [size // patch for size, patch in zip(largest, self.patch)]
            self.extra_pos_embedder = Places(sizes, width, **place)
        embedding = TimestepEmbedding(width, use_adaln_lora, **parts)
        self.t_embedder = nn.Sequential(nn.Identity(), embedding)
        self.blocks = nn.ModuleDict(
            {
                f"block{number}": Block(
                    width, num_heads, crossattn_emb_channels, mlp_ratio, lora_dim, **parts
                )
                for number in range(num_blocks)
            }
        )
        self.final_layer = FinalLayer(width, cell * out_channels, lora_dim, **parts)
        self.affline_norm = operations.RMSNorm(width, eps=NORM_EPS, **place)

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
            timesteps: Times ``[B]``.
            context: Text tokens ``[B, L, D]``, zero where there is padding.
            fps: Frames a second; None stands for those of the training.
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
        options = {} if transformer_options is None else transformer_options
        shown = x.shape[2:]
        x = pad_to_patch_size(x, self.patch)
        if self.concat_padding_mask:
            x = torch.cat([x, mask_like(x, padding_mask)], dim=1)
        sizes = [size // patch for size, patch in zip(x.shape[2:], self.patch)]
        r, m, n = self.patch
        cells = rearrange(x, "b c (t r) (h m) (w n) -> b (t h w) (c r m n)", r=r, m=m, n=n)
        tokens = self.x_embedder(cells)
        waves = timestep_embedding(timesteps, tokens.shape[-1]).to(tokens.dtype)[:, None]
        made = self.t_embedder(waves)
        vec, shared = (waves, made) if self.has_lora else (made, 0.0)
        vec = self.affline_norm(vec)
        head = tokens.shape[-1] // self.heads
        pace = 1.0 if fps is None else USUAL_RATE / float(fps)
        angles = position_angles(sizes, head, self.stretches, x.device, pace)
        places = None if self.extra_pos_embedder is None else self.extra_pos_embedder(sizes, tokens)
        tokens = self._run_blocks(tokens, vec, shared, context, (angles, places), options)
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
        where: tuple[Tensor, Tensor | None],
        options: Options,
    ) -> Tensor:
        table = (options.get("patches_replace") or {}).get("dit") or {}
        options["total_blocks"], options["block_type"] = len(self.blocks), "double"
        angles, places = where
        for number, block in enumerate(self.blocks.values()):
            options["block_index"] = number

            def original(args: Mapping[str, Any], block: nn.Module = block) -> Options:
                told = args.get("transformer_options") or {}
                given = (args["vec"], shared, args["txt"], args["pe"], places, told)
                return {"img": block(args["img"], *given)}

            args = {"img": tokens, "txt": context, "vec": vec, "pe": angles}
            args["transformer_options"] = options  # type: ignore[assignment]
            replacement = table.get(("double_block", number))
            if replacement is None:
                tokens = original(args)["img"]
            else:
                tokens = replacement(args, {"original_block": original})["img"]
        return tokens
