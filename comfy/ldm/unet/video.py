"""Temporal layers of the video UNet (SVD): each works on frames and is blended with its spatial
twin.

Frames travel in the batch axis: ``[(B T), C, H, W]``.
Source: Blattmann et al. 2023, https://arxiv.org/abs/2311.15127, appendix D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.unet.blocks import ResBlock
from comfy.ldm.unet.transformer import BasicTransformerBlock, Options, SpatialTransformer
from comfy.nn.timesteps import timestep_embedding


class AlphaBlender(nn.Module):
    """Blend a spatial and a temporal result: ``alpha * spatial + (1 - alpha) * temporal``.

    Strategies: "fixed" keeps alpha as given; "learned" is ``sigmoid(mix_factor)``;
    "learned_with_images" uses alpha 1 for frames that stand alone (image_only_indicator 1).
    """

    mix_factor: Tensor
    strategies = ("learned", "fixed", "learned_with_images")

    def __init__(
        self,
        alpha: float,
        merge_strategy: str = "learned_with_images",
        rearrange_pattern: str = "b t -> (b t) 1 1",
    ) -> None:
        super().__init__()
        if merge_strategy not in self.strategies:
            known = ", ".join(self.strategies)
            raise ValueError(f"unknown merge strategy {merge_strategy!r}; known: {known}")
        self.merge_strategy, self.rearrange_pattern = merge_strategy, rearrange_pattern
        factor = torch.tensor([float(alpha)])
        if merge_strategy == "fixed":
            self.register_buffer("mix_factor", factor)
        else:
            self.register_parameter("mix_factor", nn.Parameter(factor))

    def get_alpha(self, image_only_indicator: Tensor | None, device: torch.device) -> Tensor:
        """Alpha, shaped to multiply features."""
        factor = self.mix_factor.to(device)
        if self.merge_strategy == "fixed":
            return factor
        alpha = factor.sigmoid()
        if self.merge_strategy == "learned":
            return alpha
        alpha = alpha[..., None]
        if image_only_indicator is not None:
            alone = image_only_indicator.bool().to(device)
            alpha = torch.where(alone, torch.ones_like(alpha), alpha)
        return rearrange(alpha, self.rearrange_pattern)

    def forward(
        self, x_spatial: Tensor, x_temporal: Tensor, image_only_indicator: Tensor | None = None
    ) -> Tensor:
        alpha = self.get_alpha(image_only_indicator, x_spatial.device).to(x_spatial.dtype)
        return alpha * x_spatial + (1 - alpha) * x_temporal


class VideoResBlock(ResBlock):
    """A residual block followed by a temporal one, blended."""

    def __init__(
        self,
        channels: int,
        emb_channels: int,
        dropout: float,
        video_kernel_size: int | Sequence[int] = 3,
        merge_strategy: str = "fixed",
        merge_factor: float = 0.5,
        out_channels: int | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        norm_num_groups: int = 32,
        **options: Any,
    ) -> None:
        parts = {
            "dtype": dtype,
            "device": device,
            "operations": operations,
            "norm_num_groups": norm_num_groups,
        }
        super().__init__(
            channels, emb_channels, dropout, out_channels=out_channels, **options, **parts
        )
        self.time_stack = ResBlock(
            self.out_channels,
            emb_channels,
            dropout=dropout,
            dims=3,
            kernel_size=video_kernel_size,
            exchange_temb_dims=True,
            **parts,
        )
        self.time_mixer = AlphaBlender(merge_factor, merge_strategy, "b t -> b 1 t 1 1")

    def forward(  # type: ignore[override]  # callers tell the two forms apart
        self,
        x: Tensor,
        emb: Tensor,
        num_video_frames: int | None = None,
        image_only_indicator: Tensor | None = None,
    ) -> Tensor:
        frames = num_video_frames or x.shape[0]
        spatial = super().forward(x, emb)
        spatial = rearrange(spatial, "(b t) c h w -> b c t h w", t=frames)
        temporal = self.time_stack(spatial, rearrange(emb, "(b t) e -> b t e", t=frames))
        mixed = self.time_mixer(spatial, temporal, image_only_indicator)
        return rearrange(mixed, "b c t h w -> (b t) c h w")


class SpatialVideoTransformer(SpatialTransformer):
    """A spatial transformer whose every layer is followed by one over the frames, blended."""

    def __init__(
        self,
        in_channels: int,
        n_heads: int,
        d_head: int,
        depth: int = 1,
        dropout: float = 0.0,
        use_linear: bool = False,
        context_dim: int | None = None,
        use_spatial_context: bool = False,
        merge_strategy: str = "fixed",
        merge_factor: float = 0.5,
        time_context_dim: int | None = None,
        ff_in: bool = False,
        disable_self_attn: bool = False,
        disable_temporal_crossattention: bool = False,
        max_time_embed_period: float = 10000,
        attn_precision: torch.dtype | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        norm_num_groups: int = 32,
    ) -> None:
        place = {"dtype": dtype, "device": device}
        super().__init__(
            in_channels,
            n_heads,
            d_head,
            depth,
            dropout,
            context_dim,
            disable_self_attn,
            use_linear,
            attn_precision=attn_precision,
            operations=operations,
            norm_num_groups=norm_num_groups,
            **place,
        )
        self.use_spatial_context = use_spatial_context
        self.max_time_embed_period = max_time_embed_period
        inner = n_heads * d_head
        over_time = {
            "context_dim": context_dim if use_spatial_context else time_context_dim,
            "ff_in": ff_in,
            "inner_dim": inner,
            "disable_self_attn": disable_self_attn,
            "disable_temporal_crossattention": disable_temporal_crossattention,
            "attn_precision": attn_precision,
            "operations": operations,
            **place,
        }
        self.time_stack = nn.ModuleList(
            BasicTransformerBlock(inner, n_heads, d_head, dropout, **over_time)
            for _ in range(depth)
        )
        self.time_pos_embed = nn.Sequential(
            operations.Linear(in_channels, in_channels * 4, **place),
            nn.SiLU(),
            operations.Linear(in_channels * 4, in_channels, **place),
        )
        self.time_mixer = AlphaBlender(merge_factor, merge_strategy)

    def forward(  # type: ignore[override]  # callers tell the two forms apart
        self,
        x: Tensor,
        context: Tensor | None = None,
        time_context: Tensor | None = None,
        timesteps: int | None = None,
        image_only_indicator: Tensor | None = None,
        transformer_options: Options | None = None,
    ) -> Tensor:
        """Apply to ``x [(B T), C, H, W]``; ``timesteps`` is T."""
        options = {} if transformer_options is None else transformer_options
        frames = timesteps or x.shape[0]
        height, width = x.shape[2:]
        options["activations_shape"] = list(x.shape)
        time_context = self._time_context(context, time_context, frames, height * width)
        position = self._frame_embedding(x, frames)

        h = self.norm(x)
        if not self.use_linear:
            h = self.proj_in(h)
        h = rearrange(h, "bt c h w -> bt (h w) c")
        if self.use_linear:
            h = self.proj_in(h)
        for layer, (block, over_time) in enumerate(zip(self.transformer_blocks, self.time_stack)):
            options["block_index"] = layer
            h = block(h, context=context, transformer_options=options)
            mixed = rearrange(h + position, "(b t) s c -> (b s) t c", t=frames)
            mixed = over_time(mixed, context=time_context)
            mixed = rearrange(mixed, "(b s) t c -> (b t) s c", s=height * width)
            h = self.time_mixer(h, mixed, image_only_indicator)
        if self.use_linear:
            h = self.proj_out(h)
        h = rearrange(h, "bt (h w) c -> bt c h w", h=height, w=width)
        if not self.use_linear:
            h = self.proj_out(h)
        return h + x

    def _time_context(
        self, context: Tensor | None, time_context: Tensor | None, frames: int, positions: int
    ) -> Tensor | None:
        """Context of the temporal layers: one per position, the same over its frames."""
        if self.use_spatial_context and context is not None:
            time_context = context[::frames]
        if time_context is None:
            return None
        if time_context.ndim == 2:
            time_context = time_context[:, None]
        return repeat(time_context, "b ... -> (b n) ...", n=positions)

    def _frame_embedding(self, x: Tensor, frames: int) -> Tensor:
        """Embedding of each frame's number, ``[(B T), 1, C]``."""
        numbers = torch.arange(frames, device=x.device).repeat(x.shape[0] // frames)
        embedding = timestep_embedding(numbers, self.in_channels, self.max_time_embed_period)
        return self.time_pos_embed(embedding.to(x.dtype))[:, None]
