"""Builds the blocks of a UNet (or of a ControlNet, which is its first half) from a config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from comfy.ldm.unet.blocks import Downsample, ResBlock, Upsample
from comfy.ldm.unet.config import NO_MIDDLE_BLOCK, UNetConfig
from comfy.ldm.unet.steps import TimestepEmbedSequential
from comfy.ldm.unet.transformer import SpatialTransformer
from comfy.ldm.unet.video import SpatialVideoTransformer, VideoResBlock


class BlockBuilder:
    """Makes the parts of one network; the channel counts of the way down are kept for the way
    up."""

    def __init__(self, config: UNetConfig, place: dict[str, Any], operations: Any) -> None:
        """``place`` holds the ``dtype`` and ``device`` of every layer."""
        self.config, self.place, self.operations = config, place, operations
        self.parts = {**place, "operations": operations}
        self.embedding_width = config.model_channels * 4
        self.channels = config.model_channels
        self.skip_channels: list[int] = []

    def embedding(self, width: int) -> nn.Sequential:
        """Two layers from an input of ``width`` to the embedding every residual block is told."""
        return nn.Sequential(
            self.operations.Linear(width, self.embedding_width, **self.place),
            nn.SiLU(),
            self.operations.Linear(self.embedding_width, self.embedding_width, **self.place),
        )

    def label_embedding(self) -> nn.Module | None:
        """Embedding of the class or of the vector y, if the network has one."""
        kind = self.config.num_classes
        if kind is None:
            return None
        if isinstance(kind, int):
            return self.operations.Embedding(kind, self.embedding_width, **self.place)
        if kind == "continuous":
            return self.operations.Linear(1, self.embedding_width, **self.place)
        if kind == "sequential":
            if self.config.adm_in_channels is None:
                raise ValueError('num_classes "sequential" needs adm_in_channels')
            return nn.Sequential(self.embedding(self.config.adm_in_channels))
        raise ValueError(f"unknown num_classes {kind!r}; known: a number, continuous, sequential")

    def input_blocks(self) -> nn.ModuleList:
        """The way down; records the channels of each block for the skips."""
        config = self.config
        first = self.operations.conv_nd(
            config.dims, config.in_channels, self.channels, 3, padding=1, **self.place
        )
        blocks = [TimestepEmbedSequential(first)]
        self.skip_channels = [self.channels]
        depths = iter(config.depths_down)
        for level, (mult, count) in enumerate(zip(config.channel_mult, config.blocks_per_level)):
            for _ in range(count):
                layers = [self._res_block(self.channels, mult * config.model_channels)]
                self.channels = mult * config.model_channels
                blocks.append(self._with_transformer(layers, next(depths), level))
                self.skip_channels.append(self.channels)
            if level != len(config.channel_mult) - 1:
                blocks.append(TimestepEmbedSequential(self._downsample()))
                self.skip_channels.append(self.channels)
        return nn.ModuleList(blocks)

    def middle_block(self) -> TimestepEmbedSequential | None:
        """Residual block, transformer, residual block; None for a network without a middle."""
        depth = self.config.depth_middle
        if depth == NO_MIDDLE_BLOCK:
            return None
        layers: list[nn.Module] = [self._res_block(self.channels, self.channels)]
        if depth >= 0:
            layers.append(self._transformer(depth, self.config.disable_middle_self_attn))
            layers.append(self._res_block(self.channels, self.channels))
        return TimestepEmbedSequential(*layers)

    def output_blocks(self) -> nn.ModuleList:
        """The way up; each block takes the skip of its mirror image."""
        config = self.config
        skips, depths = list(self.skip_channels), config.depths_up
        blocks = []
        levels = list(enumerate(zip(config.channel_mult, config.blocks_per_level)))
        for level, (mult, count) in reversed(levels):
            for number in range(count + 1):
                width = mult * config.model_channels
                layers = [self._res_block(self.channels + skips.pop(), width)]
                self.channels = width
                block = self._with_transformer(layers, depths.pop(), level)
                if level and number == count:
                    block.append(self._upsample())
                blocks.append(block)
        return nn.ModuleList(blocks)

    def out(self) -> nn.Sequential:
        """Norm, activation and convolution to the output channels."""
        config = self.config
        return nn.Sequential(
            self.operations.GroupNorm(config.norm_num_groups, self.channels, **self.place),
            nn.SiLU(inplace=True),
            self.operations.conv_nd(
                config.dims, config.model_channels, config.out_channels, 3, padding=1, **self.place
            ),
        )

    def _with_transformer(
        self, layers: Sequence[nn.Module], depth: int, level: int
    ) -> TimestepEmbedSequential:
        if depth == 0:
            return TimestepEmbedSequential(*layers)
        disabled = self.config.disable_self_attentions
        alone = bool(disabled[level]) if disabled is not None else False
        return TimestepEmbedSequential(*layers, self._transformer(depth, alone))

    def _transformer(self, depth: int, disable_self_attn: bool) -> nn.Module:
        config = self.config
        heads, dim_head = config.heads(self.channels)
        shared: dict[str, Any] = {
            "depth": depth,
            "context_dim": config.context_dim,
            "disable_self_attn": disable_self_attn,
            "use_linear": config.use_linear_in_transformer,
            "attn_precision": config.attn_precision,
            "norm_num_groups": config.norm_num_groups,
            **self.parts,
        }
        if not config.use_temporal_attention:
            return SpatialTransformer(self.channels, heads, dim_head, **shared)
        return SpatialVideoTransformer(
            self.channels,
            heads,
            dim_head,
            time_context_dim=config.time_context_dim,
            ff_in=config.extra_ff_mix_layer,
            use_spatial_context=config.use_spatial_context,
            merge_strategy=config.merge_strategy or "fixed",
            merge_factor=config.merge_factor,
            disable_temporal_crossattention=config.disable_temporal_crossattention,
            **shared,
        )

    def _res_block(
        self, channels: int, out_channels: int, up: bool = False, down: bool = False
    ) -> ResBlock:
        config = self.config
        shared: dict[str, Any] = {
            "out_channels": out_channels,
            "dims": config.dims,
            "use_scale_shift_norm": config.use_scale_shift_norm,
            "up": up,
            "down": down,
            "norm_num_groups": config.norm_num_groups,
            **self.parts,
        }
        if not config.use_temporal_resblock:
            return ResBlock(channels, self.embedding_width, config.dropout, **shared)
        return VideoResBlock(
            channels,
            self.embedding_width,
            config.dropout,
            video_kernel_size=config.video_kernel_size or 3,
            merge_strategy=config.merge_strategy or "fixed",
            merge_factor=config.merge_factor,
            **shared,
        )

    def _downsample(self) -> nn.Module:
        if self.config.resblock_updown:
            return self._res_block(self.channels, self.channels, down=True)
        use_conv, dims = self.config.conv_resample, self.config.dims
        return Downsample(self.channels, use_conv, dims=dims, **self.parts)

    def _upsample(self) -> nn.Module:
        if self.config.resblock_updown:
            return self._res_block(self.channels, self.channels, up=True)
        use_conv, dims = self.config.conv_resample, self.config.dims
        return Upsample(self.channels, use_conv, dims=dims, **self.parts)
