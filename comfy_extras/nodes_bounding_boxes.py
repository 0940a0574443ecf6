"""A node on which boxes are drawn, for prompts that say what is where."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from comfy_api.latest import io, ui
from comfy_extras.extension import entrypoint_of
from comfy_extras.images.layout import boxes_of
from comfy_extras.images.layout_drawing import drawn
from comfy_nodes.limits import MAX_RESOLUTION

PREFIX = "comfy.boxes"
Boxes = io.Custom("BOUNDING_BOXES")  # what the editor draws them in
Array = io.Custom("ARRAY")


def side_input(id: str) -> io.Int.Input:
    """A side of the canvas in pixels."""
    return io.Int.Input(
        id, tooltip="Of the canvas, in pixels.", default=1024, min=64, max=MAX_RESOLUTION, step=16
    )


class CreateBoundingBoxes(io.ComfyNode):
    """Boxes that a person draws, with the words for each."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CreateBoundingBoxes",
            display_name="Create Bounding Boxes",
            category="utils",
            description="Boxes drawn on a canvas, with words and colours, the lowest first.",
            inputs=[
                side_input("width"),
                side_input("height"),
                Boxes.Input(
                    "editor_state",
                    tooltip="Draw boxes; what lies behind comes first.",
                    extra_dict={"socketless": True},
                ),
                io.Image.Input("background", optional=True, tooltip="Lies under the boxes."),
                io.MultiType.Input(
                    "bboxes",
                    [io.BoundingBox, Array, io.String],
                    optional=True,
                    tooltip="Boxes to begin with: what is drawn counts until they change.",
                ),
                Boxes.Input(
                    "last_incoming",
                    optional=True,
                    tooltip="The boxes that drawing began with last; the canvas sets it.",
                    extra_dict={"socketless": True},
                ),
            ],
            outputs=[
                io.Image.Output(display_name="preview"),
                io.BoundingBox.Output(display_name="bboxes"),
                Array.Output(display_name="elements"),
            ],
        )

    @classmethod
    def execute(
        cls,
        width: int,
        height: int,
        editor_state: Any,
        background: Tensor | None = None,
        bboxes: Any = None,
        last_incoming: Any = None,
    ) -> io.NodeOutput:
        incoming = boxes_of(bboxes, width, height, "bboxes")
        begun = boxes_of(last_incoming, width, height, "last_incoming")
        is_new = bool(incoming) and incoming != begun
        boxes = incoming if is_new else boxes_of(editor_state, width, height, "editor_state")
        shown: dict[str, Any] = {}
        under = None
        if incoming:
            shown["input_bboxes"] = [box.record() for box in incoming]
        if background is not None:
            first = background[:1]
            under = Image.fromarray(_bytes(first[0]))
            save = ui.ImageSaveHelper.save_images
            shown["background_images"] = save(first, PREFIX, io.FolderType.temp, cls, 1)
        pixels = np.asarray(drawn(boxes, width, height, under), dtype=np.float32) / 255.0
        return io.NodeOutput(
            torch.from_numpy(pixels)[None],
            [box.place() for box in boxes],
            [box.element(width, height) for box in boxes],
            ui=shown or None,
        )


def _bytes(picture: Tensor) -> np.ndarray[Any, Any]:
    """Colours [H, W, 3] in 0..255 of a picture [H, W, C] in 0..1."""
    return (picture[..., :3] * 255).clamp(0, 255).to("cpu", torch.uint8).numpy()


comfy_entrypoint = entrypoint_of(CreateBoundingBoxes)
