"""A node on which a person paints, over a picture or over a colour."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image, ImageColor
from torch import Tensor

import folder_paths
import node_helpers
from comfy.resize import common_upscale
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of
from comfy_nodes.picture_basics import colours_of


def side_input(id: str) -> io.Int.Input:
    """A side of the canvas where no picture lies under it."""
    return io.Int.Input(id, default=512, min=64, max=4096, step=64)


def painted(name: str) -> Tensor:
    """What was painted [1, 4, H, W]: colours, and how much they cover.

    Raises:
        ValueError: The file is missing or no picture.
    """
    path = folder_paths.get_annotated_filepath(name)
    try:
        with Image.open(path) as opened:
            picture = node_helpers.load_pixels(opened, "RGBA")
            values = np.asarray(picture, dtype=np.float32) / 255.0
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"mask: expected a picture that was painted on the node, found {name!r}, which "
            f"cannot be read ({error}); paint anew, or clear the canvas"
        ) from error
    return torch.from_numpy(values).permute(2, 0, 1)[None]


class Painter(io.ComfyNode):
    """What a person paints over a picture or a colour, and where."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Painter",
            display_name="Painter",
            category="image",
            description="Paint over a picture, or over a colour.",
            inputs=[
                io.String.Input(
                    "mask", default="", socketless=True, extra_dict={"widgetType": "PAINTER"}
                ),
                side_input("width"),
                side_input("height"),
                io.Color.Input("bg_color", default="#000000"),
                io.Image.Input("image", optional=True, tooltip="Lies under the paint."),
            ],
            outputs=[io.Image.Output(), io.Mask.Output()],
        )

    @classmethod
    def execute(
        cls, mask: str, width: int, height: int, bg_color: str, image: Tensor | None = None
    ) -> io.NodeOutput:
        if image is None:
            colour = torch.tensor(_colour(bg_color), dtype=torch.float32) / 255.0
            base = colour.expand(1, height, width, 3)
        else:
            base = colours_of(image)
        if not mask.strip():
            return io.NodeOutput(base.clone(), base.new_zeros(1, *base.shape[1:3]))
        rows, columns = base.shape[1:3]
        paint = common_upscale(painted(mask), columns, rows, "bilinear", "disabled").to(base)
        colours, covered = paint[:, :3].movedim(1, -1), paint[:, 3]
        weight = covered[..., None]
        return io.NodeOutput(base * (1.0 - weight) + colours * weight, covered)

    @classmethod
    def fingerprint_inputs(cls, mask: str | None, **kwargs: Any) -> str:
        del kwargs
        if not mask or not folder_paths.exists_annotated_filepath(mask):
            return ""  # it is linked, empty or gone
        return node_helpers.file_digest(folder_paths.get_annotated_filepath(mask))

    @classmethod
    def validate_inputs(cls, mask: str | None) -> bool | str:
        # A linked one is not known yet.
        if mask is not None and mask.strip() and not folder_paths.exists_annotated_filepath(mask):
            return f"mask: the painted picture {mask!r} is not there; paint anew"
        return True


def _colour(text: str) -> tuple[int, int, int]:
    try:
        return ImageColor.getrgb(text)[:3]
    except ValueError as error:
        raise ValueError(f"bg_color: expected a colour as #rrggbb, found {text!r:.40}") from error


comfy_entrypoint = entrypoint_of(Painter)
