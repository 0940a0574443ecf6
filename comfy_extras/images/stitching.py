"""Puts two pictures side by side."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

import node_helpers
from comfy_api.latest import io
from comfy_nodes.image import resized

COLOURS: dict[str, tuple[float, float, float]] = {
    "white": (1.0, 1.0, 1.0),
    "black": (0.0, 0.0, 0.0),
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
}


class ImageStitch(io.ComfyNode):
    """Puts two pictures side by side."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ImageStitch",
            display_name="Image Stitch",
            category="image/transform",
            description="Puts the second picture on the chosen side of the first one.",
            inputs=[
                io.Image.Input("image1"),
                io.Combo.Input(
                    "direction", options=["right", "down", "left", "up"], default="right"
                ),
                io.Boolean.Input("match_image_size", default=True),
                io.Int.Input("spacing_width", default=0, min=0, max=1024, step=2),
                io.Combo.Input("spacing_color", options=list(COLOURS), default="white"),
                io.Image.Input("image2", optional=True),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(
        cls,
        image1: Tensor,
        direction: str,
        match_image_size: bool,
        spacing_width: int,
        spacing_color: str,
        image2: Tensor | None = None,
    ) -> io.NodeOutput:
        if image2 is None:
            return io.NodeOutput(image1)
        axis = 2 if direction in ("right", "left") else 1
        count = max(image1.shape[0], image2.shape[0])
        first, second = _last_repeated(image1, count), _last_repeated(image2, count)
        if match_image_size:
            second = _with_side(second, 3 - axis, first.shape[3 - axis])
        first, second = _same_channels(first, second)
        first, second = _same_side(first, second, 3 - axis)
        parts = [first, second] if direction in ("right", "down") else [second, first]
        if spacing_width > 0:
            parts.insert(1, _gap(first, axis, spacing_width, COLOURS[spacing_color]))
        return io.NodeOutput(torch.cat(parts, dim=axis))

    stitch = execute


def _last_repeated(image: Tensor, count: int) -> Tensor:
    """A batch of `count`; the last picture fills up what is missing."""
    missing = count - image.shape[0]
    return image if missing == 0 else torch.cat([image, image[-1:].repeat(missing, 1, 1, 1)])


def _with_side(image: Tensor, axis: int, size: int) -> Tensor:
    """The picture scaled in proportion until the side along `axis` is `size` pixels."""
    rows, columns = image.shape[1], image.shape[2]
    if axis == 1:
        return resized(image, max(1, int(size * columns / rows)), size, "lanczos", "disabled")
    return resized(image, size, max(1, int(size * rows / columns)), "lanczos", "disabled")


def _same_channels(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the larger number of channels; a picture without alpha becomes opaque."""
    if first.shape[-1] < second.shape[-1]:
        second, first = node_helpers.image_alpha_fix(second, first)
    else:
        first, second = node_helpers.image_alpha_fix(first, second)
    return first, second


def _same_side(first: Tensor, second: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The smaller one centred on black until both have the same side along `axis`."""
    size = max(first.shape[axis], second.shape[axis])

    def padded(image: Tensor) -> Tensor:
        missing = size - image.shape[axis]
        before, after = missing // 2, missing - missing // 2
        amounts = (0, 0, 0, 0, before, after) if axis == 1 else (0, 0, before, after)
        return pad(image, amounts) if missing else image

    return padded(first), padded(second)


def _gap(image: Tensor, axis: int, width: int, colour: tuple[float, float, float]) -> Tensor:
    """A strip of one opaque colour, `width` pixels (an even number) along `axis`."""
    shape = list(image.shape)
    shape[axis] = width + width % 2
    strip = torch.ones(shape, dtype=image.dtype, device=image.device)
    strip[..., :3] = torch.tensor(colour)[: min(3, shape[-1])].to(strip)
    return strip
