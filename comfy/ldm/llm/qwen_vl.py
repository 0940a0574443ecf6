"""Qwen 2.5 VL: a language model that takes pictures among its tokens.

A picture is cut into patches; the rows that the tower makes of them stand in the text, and each has
a place in time, height and width. Source: Bai et al. 2025, https://arxiv.org/abs/2502.13923.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.llm.model import DecoderLLM
from comfy.ldm.llm.vision import VisionConfig, VisionTransformer

IMAGE = "image"


@dataclass(frozen=True)
class Look:
    """How a picture is made ready, by the publisher's processor.

    Attributes:
        least, most: Pixels.
        mean, deviation: Of each channel, before and after which it is 0 and 1.
        resampling: Keywords of `torch.nn.functional.interpolate`.
    """

    least: int
    most: int
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    resampling: Mapping[str, Any]


QWEN25_LOOK = Look(
    least=3136,
    most=12845056,
    mean=(0.48145466, 0.4578275, 0.40821073),
    deviation=(0.26862954, 0.26130258, 0.27577711),
    resampling={"mode": "bilinear", "align_corners": False},
)


class PatchSizes(Protocol):
    """What cutting a picture into patches asks of a tower's sizes; see `VisionConfig`."""

    @property
    def in_channels(self) -> int:
        """Channels of a picture."""

    @property
    def patch_size(self) -> int:
        """Pixels of a patch, in each direction."""

    @property
    def temporal_patch_size(self) -> int:
        """Frames of a patch."""

    @property
    def spatial_merge_size(self) -> int:
        """Patches, in each direction, that become one row."""


def fitting_size(height: int, width: int, factor: int, look: Look = QWEN25_LOOK) -> tuple[int, int]:
    """Height and width near the given ones that ``factor`` divides, neither too few pixels nor too
    many.
    """
    fitted = [round(side / factor) * factor for side in (height, width)]
    pixels = fitted[0] * fitted[1]
    if pixels > look.most:
        shrink = math.sqrt(height * width / look.most) * factor
        fitted = [max(1, math.floor(side / shrink)) * factor for side in (height, width)]
    elif pixels < look.least:
        grow = math.sqrt(look.least / (height * width)) / factor
        fitted = [math.ceil(side * grow) * factor for side in (height, width)]
    return fitted[0], fitted[1]


def picture_patches(
    image: Tensor, config: PatchSizes, look: Look = QWEN25_LOOK
) -> tuple[Tensor, tuple[int, int]]:
    """Patches ``[N, C, T, P, P]`` of a picture, in the order that the tower wants, and how many
    there are in height and width.

    Args:
        image: ``[1, H, W, 3]`` in 0..1; grey in one channel, or with an alpha that is left out. Of
            several the first is taken.
    """
    planes = image[:1, ..., :3].movedim(-1, 1).float()
    planes = planes.expand(-1, config.in_channels, -1, -1)
    patch, merge = config.patch_size, config.spatial_merge_size
    size = fitting_size(planes.shape[2], planes.shape[3], patch * merge, look)
    if size != planes.shape[2:]:
        planes = functional.interpolate(planes, size, **look.resampling).clamp(0, 1)
    mean, deviation = (
        planes.new_tensor(v)[None, :, None, None] for v in (look.mean, look.deviation)
    )
    planes = (planes - mean) / deviation
    height, width = size[0] // patch, size[1] // patch
    squares = planes[0].unflatten(2, (width // merge, merge, patch))
    squares = squares.unflatten(1, (height // merge, merge, patch))  # [C, h, m, P, w, m, P]
    patches = squares.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)
    frames = patches[:, :, None].expand(-1, -1, config.temporal_patch_size, -1, -1)
    return frames.contiguous(), (height, width)


def token_places(length: int, pictures: Sequence[Mapping[str, Any]], merge: int) -> Tensor:
    """Place ``[3, length]`` in time, height and width of each token.

    A word is one further than what precedes it, on all three axes. The rows of a picture share one
    time and count their lines and columns from there; what follows starts after the longer side.

    Args:
        pictures: In order, each with ``index`` and ``size`` among the tokens, and in ``extra`` its
            patches in height and width.
    """
    places = torch.zeros(3, length, dtype=torch.long)
    token = place = 0
    for picture in pictures:
        start, end = picture["index"], picture["index"] + picture["size"]
        places[:, token:start] = torch.arange(place, place + start - token)
        place += start - token
        height, width = (side // merge for side in picture["extra"])
        places[0, start:end] = place
        places[1, start:end] = place + torch.arange(height).repeat_interleave(width)
        places[2, start:end] = place + torch.arange(width).repeat(height)
        token, place = end, place + max(height, width)
    places[:, token:] = torch.arange(place, place + length - token)
    return places


class QwenVL(DecoderLLM):
    """The language model, and the tower where its file has it (`vision_config`).

    Attributes:
        name: That of the model, for messages.
        look: How pictures are made ready.
    """

    name: ClassVar[str] = "Qwen 2.5"
    look: ClassVar[Look] = QWEN25_LOOK

    def __init__(
        self,
        config_dict: Mapping[str, Any],
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__(config_dict, dtype, device, operations)
        self.visual: Any = None
        sizes = config_dict.get("vision_config")
        if sizes is not None:
            self.visual = self.tower(sizes, operations, dtype=dtype, device=device)
            width = self.visual.config.out_hidden_size
            if width != self.config.hidden_size:
                raise ValueError(
                    f"the picture tower makes rows of width {width}, the language model takes "
                    f"{self.config.hidden_size}"
                )

    def tower(self, sizes: Mapping[str, Any], operations: Any, **place: Any) -> nn.Module:
        """The tower, without its weights."""
        return VisionTransformer(VisionConfig.from_options(sizes), operations, **place)

    def preprocess_embed(self, embed: Mapping[str, Any], device: Any) -> tuple[Tensor | None, Any]:
        """Rows ``[n, D]`` of a picture ``{"type": "image", "data": [1, H, W, 3]}`` and what
        `rows` tells beside them.

        Raises:
            ValueError: It is no picture, or the file of the encoder has no tower.
        """
        if embed["type"] != IMAGE:
            raise ValueError(f"this text encoder does not take entries of type {embed['type']!r}")
        if self.visual is None:
            raise ValueError(
                f"this file of {self.name} holds no part that looks at pictures (visual.*); choose "
                f"a file of {self.name} VL, or leave the picture inputs unconnected"
            )
        patches, grid = picture_patches(embed["data"].to(device), self.visual.config, self.look)
        return self.rows(patches, grid)

    def rows(self, patches: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Any]:
        """Rows ``[n, D]`` of a picture, and its patches in height and width."""
        return self.visual(patches, *grid), grid

    def picture_rows(self, image: Tensor) -> int:
        """How many rows a picture ``[1, H, W, C]`` becomes."""
        if self.visual is None:
            return 0
        factor = self.visual.config.patch_size * self.visual.config.spatial_merge_size
        height, width = fitting_size(image.shape[1], image.shape[2], factor, self.look)
        return height * width // factor**2

    def places(self, embeds_info: Any, length: int) -> Tensor | None:
        """Places of tokens among which there are pictures."""
        pictures = [entry for entry in embeds_info or () if entry["type"] == IMAGE]
        if not pictures or self.visual is None:
            return None
        return token_places(length, pictures, self.visual.config.spatial_merge_size)
