"""The picture tower of Qwen 3 VL: patches become rows for the language model, and states of three
inner layers become rows that are added in its first layers (DeepStack).

Every layer looks at the whole picture. Keys follow the published files: ``patch_embed.proj``,
``pos_embed``, ``blocks.N``, ``merger``, ``deepstack_merger_list.N``.
Source: https://arxiv.org/abs/2511.21631, section 2; https://arxiv.org/abs/2406.04334.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy.ldm.llm.vision import NORM_EPS, VisionAttention, merged_order, turns
from comfy.nn.config import NetworkConfig


@dataclass(frozen=True)
class Qwen3VisionConfig(NetworkConfig):
    """Sizes of one tower; defaults are those of Qwen 3 VL 2B and 4B.

    Attributes:
        out_hidden_size: Width of the language model.
        patch_size: Pixels of a patch, in each direction.
        temporal_patch_size: Frames of a patch; a still picture is repeated.
        spatial_merge_size: Patches, in each direction, that become one row.
        num_position_embeddings: Places of the learned square.
        deepstack_visual_indexes: Layers whose states are added to the language model's, in order.
    """

    hidden_size: int = 1024
    intermediate_size: int = 4096
    depth: int = 24
    num_heads: int = 16
    out_hidden_size: int = 2560
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (5, 11, 17)

    def __post_init__(self) -> None:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} does not give {self.num_heads} heads a number of "
                "channels that four divides"
            )
        if max(self.deepstack_visual_indexes, default=0) >= self.depth:
            raise ValueError(
                f"states of layers {list(self.deepstack_visual_indexes)} are wanted of a picture "
                f"tower with {self.depth}"
            )


class PatchEmbed(nn.Module):
    """A row for each patch."""

    def __init__(self, config: Qwen3VisionConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = operations.Conv3d(
            config.in_channels, config.hidden_size, kernel, stride=kernel, **place
        )

    def forward(self, patches: Tensor) -> Tensor:
        """Of patches ``[N, C, T, P, P]``."""
        return self.proj(patches).flatten(1)


class FeedForward(nn.Module):
    """Two layers."""

    def __init__(self, config: Qwen3VisionConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.linear_fc1 = operations.Linear(width, inner, bias=True, **place)
        self.linear_fc2 = operations.Linear(inner, width, bias=True, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(functional.gelu(self.linear_fc1(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward, each with a norm before and a residual connection."""

    def __init__(self, config: Qwen3VisionConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        self.norm1 = operations.LayerNorm(config.hidden_size, eps=NORM_EPS, **place)
        self.norm2 = operations.LayerNorm(config.hidden_size, eps=NORM_EPS, **place)
        self.attn = VisionAttention(config, operations, **place)
        self.mlp = FeedForward(config, operations, **place)

    def forward(self, x: Tensor, whole: list[Tensor], turn: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn(self.norm1(x), whole, turn)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nn.Module):
    """Neighbouring patches become one row of the language model.

    Args:
        norms_joined: Whether the norm is over joined patches, not over each.
    """

    def __init__(
        self, config: Qwen3VisionConfig, operations: Any, norms_joined: bool, **place: Any
    ) -> None:
        super().__init__()
        self.joined = config.hidden_size * config.spatial_merge_size**2
        self.normed = self.joined if norms_joined else config.hidden_size
        self.norm = operations.LayerNorm(self.normed, eps=NORM_EPS, **place)
        self.linear_fc1 = operations.Linear(self.joined, self.joined, bias=True, **place)
        self.linear_fc2 = operations.Linear(self.joined, config.out_hidden_size, bias=True, **place)

    def forward(self, x: Tensor) -> Tensor:
        joined = self.norm(x.reshape(-1, self.normed)).reshape(-1, self.joined)
        return self.linear_fc2(functional.gelu(self.linear_fc1(joined)))


class Qwen3Vision(nn.Module):
    """The tower."""

    def __init__(self, config: Qwen3VisionConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config, operations, **place)
        self.pos_embed = operations.Embedding(
            config.num_position_embeddings, config.hidden_size, **place
        )
        self.blocks = nn.ModuleList(Block(config, operations, **place) for _ in range(config.depth))
        self.merger = PatchMerger(config, operations, norms_joined=False, **place)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, operations, norms_joined=True, **place)
            for _ in config.deepstack_visual_indexes
        )

    def learned_places(self, places: Tensor, height: int, width: int, like: Tensor) -> Tensor:
        """What is added to each patch ``[N, D]``: the learned square, stretched over the picture
        so that corners meet corners.
        """
        side = int(self.config.num_position_embeddings**0.5)
        numbers = torch.arange(side * side, device=like.device)
        square = self.pos_embed(numbers, out_dtype=like.dtype).unflatten(0, (side, side))
        stretched = functional.interpolate(
            square.movedim(-1, 0)[None], (height, width), mode="bilinear", align_corners=True
        )[0]
        return stretched[:, places[:, 0], places[:, 1]].T

    def forward(self, patches: Tensor, height: int, width: int) -> tuple[Tensor, list[Tensor]]:
        """Rows ``[height * width / merge**2, out_hidden_size]`` of a picture, line by line, and as
        many for each of the language model's first layers.

        Args:
            patches: ``[height * width, C, T, P, P]`` in the order of `merged_order`.
            height: Patches from top to bottom.
            width: Patches from left to right.
        """
        config = self.config
        places = merged_order(height, width, config.spatial_merge_size).to(patches.device)
        x = self.patch_embed(patches)
        x = x + self.learned_places(places, height, width, x)
        turn = turns(places, config.hidden_size // config.num_heads, x)
        whole = [torch.arange(len(places), device=x.device)[None]]
        deep: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            x = block(x, whole, turn)
            if number in config.deepstack_visual_indexes:
                deep.append(self.deepstack_merger_list[len(deep)](x))
        return self.merger(x), deep
