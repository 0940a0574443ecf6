"""A node that shows two pictures, one over the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from comfy_api.latest import io, ui
from comfy_extras.extension import entrypoint_of

PREFIX = "comfy.compare"
SLIDER = io.Custom("IMAGECOMPARE").Input(
    "compare_view", optional=True, extra_dict={"socketless": True}
)
"""What the editor draws the pictures in; it holds no value."""


class ImageCompare(io.ComfyNode):
    """Shows two pictures under a slider that uncovers one or the other."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ImageCompare",
            display_name="Compare Images",
            category="image",
            description="Compares two pictures with a slider.",
            is_output_node=True,
            inputs=[
                io.Image.Input("image_a", optional=True),
                io.Image.Input("image_b", optional=True),
                SLIDER,
            ],
            outputs=[],
        )

    @classmethod
    def execute(
        cls,
        image_a: Tensor | None = None,
        image_b: Tensor | None = None,
        compare_view: Any = None,  # noqa: ARG003
    ) -> io.NodeOutput:
        sides = {"a": image_a, "b": image_b}
        shown = {f"{side}_images": cls._saved(images, side) for side, images in sides.items()}
        return io.NodeOutput(ui=shown)

    @classmethod
    def _saved(cls, images: Tensor | None, side: str) -> list[ui.SavedResult]:
        """Names of the pictures of one side among the temporary files."""
        if images is None:
            return []
        save = ui.ImageSaveHelper.save_images
        return save(images, f"{PREFIX}.{side}", io.FolderType.temp, cls, compress_level=1)


comfy_entrypoint = entrypoint_of(ImageCompare)
