"""Qwen 2.5 VL: a language model that takes pictures among its tokens.

A picture is cut into patches; the rows that the tower makes of them stand in the text, and each has
a place in time, height and width. Source: Bai et al. 2025, https://arxiv.org/abs/2502.13923.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from comfy import ops
from comfy.ldm.llm.model import DecoderLLM
from comfy.ldm.llm.vision import VisionConfig, VisionTransformer

LEAST_PIXELS, MOST_PIXELS = 3136, 12845056  # of a picture, by the published processor
MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)
IMAGE = "image"


def fitting_size(height: int, width: int, factor: int) -> tuple[int, int]:
    """Height and width near the given ones that ``factor`` divides, neither too few pixels nor too
    many.
    """
    fitted = [round(side / factor) * factor for side in (height, width)]
    pixels = fitted[0] * fitted[1]
    if pixels > MOST_PIXELS:
        shrink = math.sqrt(height * width / MOST_PIXELS) * factor
        fitted = [max(1, math.floor(side / shrink)) * factor for side in (height, width)]
    elif pixels < LEAST_PIXELS:
        grow = math.sqrt(LEAST_PIXELS / (height * width)) / factor
        fitted = [math.ceil(side * grow) * factor for side in (height, width)]
    return fitted[0], fitted[1]


def picture_patches(image: Tensor, config: VisionConfig) -> tuple[Tensor, tuple[int, int]]:
    """Patches ``[N, C, T, P, P]`` of a picture, in the order that the tower wants, and how many
    there are in height and width.

    Args:
        image: ``[1, H, W, 3]`` in 0..1; grey in one channel, or with an alpha that is left out. Of
            several the first is taken.
    """
    planes = image[:1, ..., :3].movedim(-1, 1).float()
    planes = planes.expand(-1, config.in_channels, -1, -1)
    patch, merge = config.patch_size, config.spatial_merge_size
    size = fitting_size(planes.shape[2], planes.shape[3], patch * merge)
    if size != planes.shape[2:]:
        planes = functional.interpolate(planes, size, mode="bilinear", align_corners=False)
    mean, deviation = (planes.new_tensor(v)[None, :, None, None] for v in (MEAN, DEVIATION))
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
    """The language model, and the tower where its file has it (`vision_config`)."""

    def __init__(
        self,
        config_dict: Mapping[str, Any],
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__(config_dict, dtype, device, operations)
        self.visual: VisionTransformer | None = None
        sizes = config_dict.get("vision_config")
        if sizes is not None:
            vision = VisionConfig.from_options(sizes)
            if vision.out_hidden_size != self.config.hidden_size:
                raise ValueError(
                    f"the picture tower makes rows of width {vision.out_hidden_size}, the language "
                    f"model takes {self.config.hidden_size}"
                )
            self.visual = VisionTransformer(vision, operations, dtype=dtype, device=device)

    def preprocess_embed(
        self, embed: Mapping[str, Any], device: Any
    ) -> tuple[Tensor | None, tuple[int, int] | None]:
        """Rows ``[n, D]`` of a picture ``{"type": "image", "data": [1, H, W, 3]}`` and its patches
        in height and width.

        Raises:
            ValueError: It is no picture, or the file of the encoder has no tower.
        """
        if embed["type"] != IMAGE:
            raise ValueError(f"this text encoder does not take entries of type {embed['type']!r}")
        if self.visual is None:
            raise ValueError(
                "this file of Qwen 2.5 holds no part that looks at pictures (visual.*); choose a "
                "file of Qwen 2.5 VL, or leave the picture inputs unconnected"
            )
        patches, grid = picture_patches(embed["data"].to(device), self.visual.config)
        return self.visual(patches, *grid), grid

    def picture_rows(self, image: Tensor) -> int:
        """How many rows a picture ``[1, H, W, C]`` becomes."""
        if self.visual is None:
            return 0
        factor = self.visual.config.patch_size * self.visual.config.spatial_merge_size
        height, width = fitting_size(image.shape[1], image.shape[2], factor)
        return height * width // factor**2

    def places(self, embeds_info: Any, length: int) -> Tensor | None:
        """Places of tokens among which there are pictures."""
        pictures = [entry for entry in embeds_info or () if entry["type"] == IMAGE]
        if not pictures or self.visual is None:
            return None
        return token_places(length, pictures, self.visual.config.spatial_merge_size)
