"""ControlNet: a copy of the UNet's first half that turns a hint picture into residuals for the
UNet.

Source: Zhang et al. 2023, https://arxiv.org/abs/2302.05543. The union form takes several kinds of
hint at once and is told which: https://huggingface.co/xinsir/controlnet-union-sdxl-1.0.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.clip.text import quick_gelu
from comfy.ldm.unet import steps
from comfy.ldm.unet.builder import BlockBuilder
from comfy.ldm.unet.config import UNetConfig
from comfy.ldm.unet.steps import TimestepEmbedSequential
from comfy.nn import attention
from comfy.nn.layout import prefers_channels_last
from comfy.nn.timesteps import timestep_embedding

# Channels and strides on the way from a picture to features of an eighth of its size.
HINT_LAYERS = ((16, 1), (16, 1), (32, 2), (32, 1), (96, 2), (96, 1), (256, 2))
UNION_WIDTH, UNION_HEADS = 320, 8
UNION_TYPE_WAVES = 256  # columns of the embedding of each kind of hint


class ControlNet(nn.Module):
    """Residuals for a UNet, from what the UNet is given and a hint.

    Keys: as the UNet's first half, with ``input_hint_block``, ``zero_convs`` and
    ``middle_block_out``.
    """

    def __init__(
        self,
        hint_channels: int,
        union_controlnet_num_control_type: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **options: Any,
    ) -> None:
        super().__init__()
        self.config = config = UNetConfig.from_options(out_channels=4, **options)
        self.dtype = dtype
        self.num_classes, self.model_channels = config.num_classes, config.model_channels
        self.place, self.operations = {"dtype": dtype, "device": device}, operations
        build = BlockBuilder(config, self.place, operations)
        self.time_embed = build.embedding(config.model_channels)
        label_embedding = build.label_embedding()
        if label_embedding is not None:
            self.label_emb = label_embedding
        self.input_blocks = build.input_blocks()
        self.zero_convs = nn.ModuleList(self._point(width) for width in build.skip_channels)
        self.input_hint_block = self._hint_block(hint_channels)
        self.middle_block = build.middle_block()
        self.middle_block_out = self._point(build.channels)
        self.control_add_embedding: ControlAddEmbedding | None = None
        self.hint_channels = hint_channels
        self.gives = frozenset({"middle", "output"})
        self.union_kinds = union_controlnet_num_control_type or 0
        if union_controlnet_num_control_type is not None:
            self._add_union(union_controlnet_num_control_type, build.embedding_width)

    def _point(self, width: int) -> TimestepEmbedSequential:
        """A 1x1 convolution, zero before training."""
        conv = self.operations.conv_nd(self.config.dims, width, width, 1, **self.place)
        return TimestepEmbedSequential(conv)

    def _hint_block(self, hint_channels: int) -> TimestepEmbedSequential:
        layers: list[nn.Module] = []
        width = hint_channels
        for out, stride in (*HINT_LAYERS, (self.model_channels, 1)):
            layers.append(
                self.operations.conv_nd(
                    self.config.dims, width, out, 3, stride=stride, padding=1, **self.place
                )
            )
            layers.append(nn.SiLU())
            width = out
        return TimestepEmbedSequential(*layers[:-1])

    def _add_union(self, kinds: int, embedding_width: int) -> None:
        """The parts that tell kinds of hint apart."""
        parts = {"operations": self.operations, **self.place}
        self.task_embedding = nn.Parameter(torch.empty(kinds, self.model_channels, **self.place))
        # The published files misspell this name.
        self.transformer_layes = nn.Sequential(UnionBlock(UNION_WIDTH, UNION_HEADS, **parts))
        self.spatial_ch_projs = self.operations.Linear(UNION_WIDTH, UNION_WIDTH, **self.place)
        self.control_add_embedding = ControlAddEmbedding(
            UNION_TYPE_WAVES, embedding_width, kinds, **parts
        )

    def forward(
        self,
        x: Tensor,
        hint: Tensor,
        timesteps: Tensor,
        context: Tensor | None,
        y: Tensor | None = None,
        control_type: Sequence[int] | None = None,
        **_: Any,
    ) -> dict[str, list[Tensor]]:
        """Residuals ``{"output": one per input block, "middle": [one]}``.

        Args:
            x: Noisy latent ``[B, C, H, W]``.
            hint: Picture ``[B, hint_channels, 8 H, 8 W]`` in 0..1.
            timesteps, context, y: As for the UNet.
            control_type: Numbers of the kinds of hint (union form); none where it is not told.
        """
        waves = timestep_embedding(timesteps, self.model_channels).to(x.dtype)
        emb = self.time_embed(waves)
        kinds: list[int] = []
        if self.control_add_embedding is not None:
            kinds = list(control_type or ())
            emb = emb + self.control_add_embedding(kinds, emb.dtype, emb.device)
        if kinds:
            hints = hint if hint.ndim > 4 else hint[None]
            guided = self.union_controlnet_merge(hints, kinds, emb, context)
        else:  # also of a union network that is not told
            guided = self.input_hint_block(hint, emb, context)
        if self.num_classes is not None:
            if y is None:
                raise ValueError("this ControlNet needs vector conditioning y")
            emb = emb + self.label_emb(y)

        if prefers_channels_last(x):
            x = x.contiguous(memory_format=torch.channels_last)
        h, residuals = x, []
        block: Any  # a sequence of layers; torch's ModuleList gives its members no type
        for number, (block, point) in enumerate(zip(self.input_blocks, self.zero_convs)):
            h = steps.forward_timestep_embed(block, h, emb, context)
            if number == 0:
                h = h + guided
            residuals.append(point(h, emb, context))
        if self.middle_block is None:
            return {"middle": [], "output": residuals}
        h = steps.forward_timestep_embed(self.middle_block, h, emb, context)
        return {"middle": [self.middle_block_out(h, emb, context)], "output": residuals}

    def union_controlnet_merge(
        self, hint: Tensor, control_type: Sequence[int], emb: Tensor, context: Tensor | None
    ) -> Tensor:
        """Features of hints ``[kinds, B, C, H, W]``, each shifted by what a transformer makes of
        all."""
        features, summaries = [], []
        for kind, picture in zip(control_type, hint):
            feature = self.input_hint_block(picture, emb, context)
            features.append(feature)
            task = self.task_embedding[kind].to(feature)
            summaries.append(feature.mean(dim=(2, 3)) + task)
        tokens = self.transformer_layes(torch.stack(summaries, dim=1))
        merged = features[0] + self.spatial_ch_projs(tokens[:, 0])[..., None, None]
        for number, feature in enumerate(features[1:], start=1):
            merged = merged + feature + self.spatial_ch_projs(tokens[:, number])[..., None, None]
        return merged


class ControlAddEmbedding(nn.Module):
    """Embedding of the set of hint kinds that are given, added to the timestep's."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        num_control_type: int,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        self.num_control_type, self.in_dim = num_control_type, in_dim
        place = {"dtype": dtype, "device": device}
        self.linear_1 = operations.Linear(in_dim * num_control_type, out_dim, **place)
        self.linear_2 = operations.Linear(out_dim, out_dim, **place)

    def forward(self, control_type: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
        given = torch.zeros(self.num_control_type, device=device)
        given[list(control_type)] = 1.0
        waves = timestep_embedding(given, self.in_dim).to(dtype).reshape(1, -1)
        return self.linear_2(F.silu(self.linear_1(waves)))


class _UnionAttention(nn.Module):
    """Self-attention with one projection to queries, keys and values."""

    def __init__(self, width: int, heads: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj = operations.Linear(width, width * 3, **place)
        self.out_proj = operations.Linear(width, width, **place)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        return self.out_proj(attention.optimized_attention(q, k, v, self.heads))


class _QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return quick_gelu(x)


class UnionBlock(nn.Module):
    """A transformer layer over one token per hint."""

    def __init__(self, width: int, heads: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.attn = _UnionAttention(width, heads, operations, **place)
        self.ln_1 = operations.LayerNorm(width, **place)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=operations.Linear(width, width * 4, **place),
                gelu=_QuickGELU(),
                c_proj=operations.Linear(width * 4, width, **place),
            )
        )
        self.ln_2 = operations.LayerNorm(width, **place)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))
