"""The picture tower of Qwen 2.5 VL: patches of a picture become rows for the language model.

Most layers look only within windows of the picture, a few at all of it. Keys follow the published
files: ``patch_embed.proj``, ``blocks.N.attn.qkv``, ``blocks.N.mlp``, ``merger.ln_q``,
``merger.mlp``. Source: Bai et al. 2025, https://arxiv.org/abs/2502.13923, section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy.ldm.llm.looks import rotate
from comfy.ldm.llm.model import RMSNorm
from comfy.nn import attention
from comfy.nn.config import NetworkConfig

THETA = 10000.0  # of the rotations
NORM_EPS = 1e-6


@dataclass(frozen=True)
class VisionConfig(NetworkConfig):
    """Sizes of one tower; defaults are those of Qwen 2.5 VL 7B.

    Attributes:
        out_hidden_size: Width of the language model.
        patch_size: Pixels of a patch, in each direction.
        temporal_patch_size: Frames of a patch; a still picture is repeated.
        spatial_merge_size: Patches, in each direction, that become one row.
        window_size: Pixels of a window, in each direction.
        fullatt_block_indexes: Layers that look at the whole picture.
    """

    hidden_size: int = 1280
    intermediate_size: int = 3420
    depth: int = 32
    num_heads: int = 16
    out_hidden_size: int = 3584
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    window_size: int = 112
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)

    def __post_init__(self) -> None:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} does not give {self.num_heads} heads a number of "
                "channels that four divides"
            )


@dataclass(frozen=True)
class Layout:
    """How the patches of one picture lie, in the order in which they come.

    Attributes:
        turn: Cosines and sines ``[patches, head_dim]``.
        windows: Numbers of the patches of each window ``[windows, patches]``, one tensor for each
            size of a window.
        whole: The same for one window as large as the picture.
    """

    turn: tuple[Tensor, Tensor]
    windows: list[Tensor]
    whole: list[Tensor]


def merged_order(height: int, width: int, merge: int) -> Tensor:
    """Row and column ``[patches, 2]`` of each patch: those that become one row follow each
    other."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([rows, columns], dim=-1)
    squares = places.unflatten(1, (-1, merge)).unflatten(0, (-1, merge))
    return squares.transpose(1, 2).reshape(-1, 2)


def turns(places: Tensor, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[patches, head_dim]`` of rows and columns ``[patches, 2]``."""
    quarter = head_dim // 4
    speeds = THETA ** (-torch.arange(quarter, device=places.device).float() / quarter)
    angles = (places[..., None].float() * speeds).flatten(1).repeat(1, 2).to(like.device)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def window_members(places: Tensor, side: int) -> list[Tensor]:
    """Numbers of the patches in each square of ``side`` patches; squares of one size together."""
    squares = places // side
    number = squares[:, 0] * (int(squares[:, 1].max()) + 1) + squares[:, 1]
    order = number.argsort(stable=True)
    members = order.split(number.bincount().tolist())
    sizes = sorted({len(one) for one in members})
    return [torch.stack([one for one in members if len(one) == size]) for size in sizes]


class VisionWidths(Protocol):
    """What attention asks of a tower's sizes."""

    @property
    def hidden_size(self) -> int:
        """Channels of a patch."""

    @property
    def num_heads(self) -> int:
        """Heads of attention."""


class VisionAttention(nn.Module):
    """Attention within windows."""

    def __init__(self, config: VisionWidths, operations: Any, **place: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_heads
        self.qkv = operations.Linear(width, 3 * width, bias=True, **place)
        self.proj = operations.Linear(width, width, bias=True, **place)

    def forward(self, x: Tensor, windows: Sequence[Tensor], turn: tuple[Tensor, Tensor]) -> Tensor:
        """Of patches ``[N, D]``."""
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(1, 2, 0, 3)
        q, k, v = rotate(heads[0], turn), rotate(heads[1], turn), heads[2]  # [heads, N, d]
        out = torch.empty_like(x)
        for members in windows:
            own, seen, taken = (part[:, members].transpose(0, 1) for part in (q, k, v))
            out[members] = attention.optimized_attention(
                own, seen, taken, self.num_heads, skip_reshape=True
            )
        return self.proj(out)


class VisionMLP(nn.Module):
    """Feed-forward with a gate and biases."""

    def __init__(self, config: VisionConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = operations.Linear(width, inner, bias=True, **place)
        self.up_proj = operations.Linear(width, inner, bias=True, **place)
        self.down_proj = operations.Linear(inner, width, bias=True, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class VisionBlock(nn.Module):
    """Attention and feed-forward, each with a norm before and a residual connection."""

    def __init__(self, config: VisionConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, NORM_EPS, **place)
        self.norm2 = RMSNorm(config.hidden_size, NORM_EPS, **place)
        self.attn = VisionAttention(config, operations, **place)
        self.mlp = VisionMLP(config, operations, **place)

    def forward(self, x: Tensor, windows: Sequence[Tensor], turn: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn(self.norm1(x), windows, turn)
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    """A row for each patch."""

    def __init__(self, config: VisionConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = operations.Conv3d(
            config.in_channels, config.hidden_size, kernel, stride=kernel, bias=False, **place
        )

    def forward(self, patches: Tensor) -> Tensor:
        """Of patches ``[N, C, T, P, P]``."""
        return self.proj(patches).flatten(1)


class PatchMerger(nn.Module):
    """Neighbouring patches become one row of the language model."""

    def __init__(self, config: VisionConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        self.joined = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = RMSNorm(config.hidden_size, NORM_EPS, **place)
        self.mlp = nn.Sequential(
            operations.Linear(self.joined, self.joined, bias=True, **place),
            nn.GELU(),
            operations.Linear(self.joined, config.out_hidden_size, bias=True, **place),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x).reshape(-1, self.joined))


class VisionTransformer(nn.Module):
    """The tower."""

    def __init__(self, config: VisionConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config, operations, **place)
        self.blocks = nn.ModuleList(
            VisionBlock(config, operations, **place) for _ in range(config.depth)
        )
        self.merger = PatchMerger(config, operations, **place)

    def layout(self, height: int, width: int, like: Tensor) -> Layout:
        """How the patches of a picture of ``height`` times ``width`` patches lie."""
        config = self.config
        places = merged_order(height, width, config.spatial_merge_size)
        turn = turns(places, config.hidden_size // config.num_heads, like)
        side = config.window_size // config.patch_size
        windows = [members.to(like.device) for members in window_members(places, side)]
        return Layout(turn, windows, [torch.arange(len(places), device=like.device)[None]])

    def forward(self, patches: Tensor, height: int, width: int) -> Tensor:
        """Rows ``[height * width / merge**2, out_hidden_size]`` of a picture, line by line.

        Args:
            patches: ``[height * width, C, T, P, P]`` in the order of `merged_order`.
            height: Patches from top to bottom.
            width: Patches from left to right.
        """
        x = self.patch_embed(patches)
        layout = self.layout(height, width, x)
        for number, block in enumerate(self.blocks):
            is_whole = number in self.config.fullatt_block_indexes
            x = block(x, layout.whole if is_whole else layout.windows, layout.turn)
        return self.merger(x)
