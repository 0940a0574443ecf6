"""Qwen 3 VL: a language model that takes pictures among its tokens.

Like Qwen 2.5 VL, but time, height and width take turns among the angles of places, and the tower
also gives rows that are added behind the first layers.
Source: Bai et al. 2025, https://arxiv.org/abs/2511.21631.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from comfy import ops
from comfy.ldm.llm.deepstack import DeepRows
from comfy.ldm.llm.qwen3_vision import Qwen3Vision, Qwen3VisionConfig
from comfy.ldm.llm.qwen_vl import IMAGE, Look, QwenVL

QWEN3_LOOK = Look(
    least=256 * 256,
    most=4096 * 4096,
    mean=(0.5, 0.5, 0.5),
    deviation=(0.5, 0.5, 0.5),
    resampling={"mode": "bicubic", "align_corners": False, "antialias": True},
)
PLACES: dict[str, Any] = {
    "rope_theta": 5000000.0, "rope_dims": (24, 20, 20), "rope_interleaved": True,
}  # fmt: skip
UNTIED_WIDTH = 4096  # from this (8B) on, words have a layer of their own in the published files


class SeenPicture(NamedTuple):
    """What the language model is told of a picture beside its rows.

    Attributes:
        grid: Patches in height and width.
        deep: Rows ``[n, D]`` for each of its first layers.
    """

    grid: tuple[int, int]
    deep: list[Tensor]


class Qwen3VL(QwenVL):
    """The language model, and the tower where its file has it (`vision_config`)."""

    name: ClassVar[str] = "Qwen 3"
    look: ClassVar[Look] = QWEN3_LOOK

    def __init__(
        self,
        config_dict: Mapping[str, Any],
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        is_tied = config_dict.get("hidden_size", 0) < UNTIED_WIDTH
        sizes = {**PLACES, "ties_words": is_tied, **config_dict}
        super().__init__(sizes, dtype, device, operations)

    def tower(self, sizes: Mapping[str, Any], operations: Any, **place: Any) -> nn.Module:
        """The tower, without its weights."""
        return Qwen3Vision(Qwen3VisionConfig.from_options(sizes), operations, **place)

    def rows(self, patches: Tensor, grid: tuple[int, int]) -> tuple[Tensor, SeenPicture]:
        """Rows ``[n, D]`` of a picture, and what is to be known of it beside them."""
        rows, deep = self.visual(patches, *grid)
        return rows, SeenPicture(grid, deep)

    def places(self, embeds_info: Any, length: int) -> Tensor | None:
        """Places of tokens among which there are pictures."""
        plain = [{**entry, "extra": entry["extra"].grid} for entry in _pictures(embeds_info)]
        return super().places(plain, length)

    def deep_rows(self, embeds_info: Any) -> list[DeepRows]:
        """What pictures add to states of the first layers."""
        pictures = _pictures(embeds_info)
        return [DeepRows(entry["index"], entry["extra"].deep) for entry in pictures]


def _pictures(embeds_info: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in embeds_info or () if entry["type"] == IMAGE]
