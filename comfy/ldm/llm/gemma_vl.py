"""Gemma 3 with pictures: each becomes 256 rows among the tokens of a text.

The tower is SigLIP at one size; neighbouring patches are averaged, normed and projected. The rows
of one picture see each other, also those behind them. Keys follow the published files:
``vision_model``, ``multi_modal_projector``. Source: https://arxiv.org/abs/2503.19786, section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.clip.vision import CLIPVision
from comfy.ldm.llm.model import DecoderLLM, RMSNorm
from comfy.ldm.llm.qwen_vl import IMAGE

POOLED = 4  # patches, in each direction, that become one row
NORM_EPS = 1e-6


class Projector(nn.Module):
    """From patches ``[1, side * side, C]`` to rows ``[n, D]`` of the language model."""

    def __init__(self, channels: int, width: int, **place: Any) -> None:
        super().__init__()
        self.mm_input_projection_weight = nn.Parameter(torch.empty(channels, width, **place))
        self.mm_soft_emb_norm = RMSNorm(channels, NORM_EPS, counts_from_one=True, **place)

    def forward(self, x: Tensor) -> Tensor:
        side = int(x.shape[1] ** 0.5)
        squares = x.transpose(1, 2).unflatten(2, (side, side))
        rows = functional.avg_pool2d(squares, POOLED).flatten(2).transpose(1, 2)
        return (self.mm_soft_emb_norm(rows) @ self.mm_input_projection_weight.to(rows))[0]


class Gemma3VL(DecoderLLM):
    """The language model, and the tower where its file has it (`vision_config`)."""

    def __init__(
        self,
        config_dict: Mapping[str, Any],
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__(config_dict, dtype, device, operations)
        self.vision_model: CLIPVision | None = None
        sizes = config_dict.get("vision_config")
        if sizes is not None:
            self.vision_model = CLIPVision(sizes, dtype, device, operations)
            for layer in self.vision_model.modules():
                if isinstance(layer, nn.LayerNorm):
                    layer.eps = NORM_EPS
            channels, width = self.vision_model.config.hidden_size, self.config.hidden_size
            self.multi_modal_projector = Projector(channels, width, dtype=dtype, device=device)

    def preprocess_embed(self, embed: Mapping[str, Any], device: Any) -> tuple[Tensor, None]:
        """Rows ``[n, D]`` of a picture ``{"type": "image", "data": [1, H, W, 3]}``.

        Raises:
            ValueError: It is no picture, or the file of the encoder has no tower.
        """
        if embed["type"] != IMAGE:
            raise ValueError(f"this text encoder does not take entries of type {embed['type']!r}")
        if self.vision_model is None:
            raise ValueError(
                "this file of Gemma 3 holds no part that looks at pictures (vision_model.*); "
                "choose one that does, or leave the picture inputs unconnected"
            )
        side = self.vision_model.config.image_size
        planes = embed["data"][:1, ..., :3].to(device).movedim(-1, 1).float().expand(-1, 3, -1, -1)
        planes = functional.interpolate(
            planes, (side, side), mode="bilinear", align_corners=False, antialias=True
        )
        states = self.vision_model(planes * 2 - 1)[0]
        rows = self.multi_modal_projector(states)
        return rows / self.config.hidden_size**0.5, None  # what the decoder multiplies words by

    def picture_rows(self, image: Tensor) -> int:
        """How many rows a picture becomes."""
        del image  # all are brought to one size
        if self.vision_model is None:
            return 0
        config = self.vision_model.config
        return (config.image_size // config.patch_size // POOLED) ** 2

    def blocks(self, embeds_info: Any) -> list[tuple[int, int]]:
        """Begin and end of each picture's rows."""
        pictures = [entry for entry in embeds_info or () if entry["type"] == IMAGE]
        return [(entry["index"], entry["index"] + entry["size"]) for entry in pictures]
