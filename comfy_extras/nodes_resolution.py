"""Nodes that choose the size of a picture."""

from __future__ import annotations

import math

from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

MEGAPIXEL = 1024 * 1024
RATIOS: dict[str, tuple[int, int]] = {
    "1:1 (Square)": (1, 1),
    "2:3 (Portrait Photo)": (2, 3),
    "3:2 (Photo)": (3, 2),
    "3:4 (Portrait Standard)": (3, 4),
    "4:3 (Standard)": (4, 3),
    "9:16 (Portrait Widescreen)": (9, 16),
    "16:9 (Widescreen)": (16, 9),
    "21:9 (Ultrawide)": (21, 9),
}
SIBLINGS = {
    "ratio_widget": "aspect_ratio",
    "megapixels_widget": "megapixels",
    "multiple_widget": "multiple",
}
"""Where the editor's live preview of the size looks."""

MEGAPIXELS = io.Float.Input(
    "megapixels", tooltip="Pixels in all; 1.0 is 1024 x 1024.",
    default=1.0, min=0.1, max=16.0, step=0.1,
)  # fmt: skip
MULTIPLE = io.Int.Input(
    "multiple", tooltip="Both sides are multiples of this.", optional=True,
    default=8, min=8, max=128, step=4,
)  # fmt: skip


class ResolutionSelector(io.ComfyNode):
    """Gives the sides of a picture from their ratio and the number of pixels."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ResolutionSelector",
            display_name="Resolution Selector",
            category="utils",
            description="Width and height from a ratio and a number of pixels.",
            inputs=[
                io.Combo.Input("aspect_ratio", options=list(RATIOS), default="1:1 (Square)"),
                MEGAPIXELS,
                MULTIPLE,
                io.Custom("RESOLUTION_PREVIEW").Input(
                    "preview", optional=True, extra_dict={**SIBLINGS, "socketless": True}
                ),
            ],
            outputs=[
                io.Int.Output(display_name="width"),
                io.Int.Output(display_name="height"),
            ],
        )

    @classmethod
    def execute(
        cls,
        aspect_ratio: str,
        megapixels: float,
        multiple: int = 8,
        preview: object = None,  # noqa: ARG003
    ) -> io.NodeOutput:
        columns, rows = RATIOS[aspect_ratio]
        scale = math.sqrt(megapixels * MEGAPIXEL / (columns * rows))
        sides = (round(part * scale / multiple) * multiple for part in (columns, rows))
        return io.NodeOutput(*(max(side, multiple) for side in sides))


comfy_entrypoint = entrypoint_of(ResolutionSelector)
