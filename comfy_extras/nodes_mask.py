"""Nodes that make, combine and convert masks. A MASK is a float tensor [B, H, W] with values
0..1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from comfy.devices import memory
from comfy_api.latest import ComfyExtension, io, ui
from comfy_extras.masks.compositing import (
    ImageCompositeMasked,
    LatentCompositeMasked,
    composite,  # noqa: F401 - packs import it from here
    position,
)
from comfy_nodes.limits import MAX_RESOLUTION
from comfy_nodes.picture_basics import check_count, colours_of, masks_of


def side(id: str) -> io.Int.Input:
    """Declaration of a side in pixels."""
    return io.Int.Input(id, default=512, min=1, max=MAX_RESOLUTION, step=1)


class MaskToImage(io.ComfyNode):
    """Shows a mask as a grey picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MaskToImage",
            display_name="Convert Mask to Image",
            category="mask",
            inputs=[io.Mask.Input("mask")],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, mask: Tensor) -> io.NodeOutput:
        return io.NodeOutput(masks_of(mask).unsqueeze(-1).expand(-1, -1, -1, 3))

    mask_to_image = execute


class ImageToMask(io.ComfyNode):
    """Takes one channel of a picture as a mask."""

    CHANNELS = ("red", "green", "blue", "alpha")

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ImageToMask",
            display_name="Convert Image to Mask",
            category="mask",
            inputs=[
                io.Image.Input("image"),
                io.Combo.Input("channel", options=list(cls.CHANNELS)),
            ],
            outputs=[io.Mask.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor, channel: str) -> io.NodeOutput:
        if image.shape[-1] < 3 and channel != "alpha":
            image = colours_of(image)
        index = cls.CHANNELS.index(channel)
        if index >= image.shape[-1]:
            raise ValueError(
                f"image: expected a picture with the channel {channel}, found one of "
                f"{image.shape[-1]} channels; choose another channel"
            )
        return io.NodeOutput(image[..., index])

    image_to_mask = execute


class ImageColorToMask(io.ComfyNode):
    """Selects the pixels of exactly one colour."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ImageColorToMask",
            category="mask",
            inputs=[
                io.Image.Input("image"),
                io.Int.Input(
                    "color",
                    default=0,
                    min=0,
                    max=0xFFFFFF,
                    step=1,
                    display_mode=io.NumberDisplay.number,
                ),
            ],
            outputs=[io.Mask.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor, color: int) -> io.NodeOutput:
        red, green, blue = (colours_of(image).clamp(0, 1) * 255.0).round().to(torch.int).unbind(-1)
        packed = torch.bitwise_left_shift(red, 16) + torch.bitwise_left_shift(green, 8) + blue
        return io.NodeOutput((packed == color).float())


class SolidMask(io.ComfyNode):
    """A mask of one value."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SolidMask",
            category="mask",
            inputs=[
                io.Float.Input("value", default=1.0, min=0.0, max=1.0, step=0.01),
                side("width"),
                side("height"),
            ],
            outputs=[io.Mask.Output()],
        )

    @classmethod
    def execute(cls, value: float, width: int, height: int) -> io.NodeOutput:
        memory.require_room((1, height, width), "the mask")
        return io.NodeOutput(torch.full((1, height, width), value, dtype=torch.float32))

    solid = execute


class InvertMask(io.ComfyNode):
    """Selects what was not selected."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="InvertMask",
            category="mask",
            inputs=[io.Mask.Input("mask")],
            outputs=[io.Mask.Output()],
        )

    @classmethod
    def execute(cls, mask: Tensor) -> io.NodeOutput:
        return io.NodeOutput(1.0 - mask)

    invert = execute


class CropMask(io.ComfyNode):
    """Cuts a rectangle out of a mask."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CropMask",
            category="mask",
            inputs=[
                io.Mask.Input("mask"),
                position("x"),
                position("y"),
                side("width"),
                side("height"),
            ],
            outputs=[io.Mask.Output()],
        )

    @classmethod
    def execute(cls, mask: Tensor, x: int, y: int, width: int, height: int) -> io.NodeOutput:
        rows, columns = mask.shape[-2:]
        if x >= columns or y >= rows:
            raise ValueError(
                f"x, y: expected a corner inside the mask of {columns} x {rows}, found {x}, {y}"
            )
        return io.NodeOutput(masks_of(mask)[:, y : y + height, x : x + width])

    crop = execute


# Each rule gives the result from the destination and the source where they overlap.
MASK_OPERATIONS = {
    "multiply": lambda below, above: below * above,
    "add": lambda below, above: below + above,
    "subtract": lambda below, above: below - above,
    "and": lambda below, above: (below.round().bool() & above.round().bool()).float(),
    "or": lambda below, above: (below.round().bool() | above.round().bool()).float(),
    "xor": lambda below, above: (below.round().bool() ^ above.round().bool()).float(),
}


class MaskComposite(io.ComfyNode):
    """Combines two masks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MaskComposite",
            category="mask",
            inputs=[
                io.Mask.Input("destination"),
                io.Mask.Input("source"),
                position("x"),
                position("y"),
                io.Combo.Input("operation", options=list(MASK_OPERATIONS)),
            ],
            outputs=[io.Mask.Output()],
        )

    @classmethod
    def execute(
        cls, destination: Tensor, source: Tensor, x: int, y: int, operation: str
    ) -> io.NodeOutput:
        result, above = masks_of(destination).clone(), masks_of(source)
        check_count(above.shape[0], result.shape[0], "mask", "source", "destination")
        rows = min(above.shape[-2], result.shape[-2] - y)
        columns = min(above.shape[-1], result.shape[-1] - x)
        if rows > 0 and columns > 0:
            window = (slice(None), slice(y, y + rows), slice(x, x + columns))
            combined = MASK_OPERATIONS[operation](result[window], above[:, :rows, :columns])
            result[window] = combined
        return io.NodeOutput(result.clamp(0.0, 1.0))

    combine = execute


class FeatherMask(io.ComfyNode):
    """Fades a mask towards its edges."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FeatherMask",
            category="mask",
            inputs=[
                io.Mask.Input("mask"),
                position("left"),
                position("top"),
                position("right"),
                position("bottom"),
            ],
            outputs=[io.Mask.Output()],
        )

    @classmethod
    def execute(cls, mask: Tensor, left: int, top: int, right: int, bottom: int) -> io.NodeOutput:
        faded = masks_of(mask).clone()
        rows, columns = faded.shape[-2:]
        for step in range(min(left, columns)):
            faded[:, :, step] *= (step + 1) / min(left, columns)
        # Counting back with a minus sign starts at the opposite edge: the first step of right and
        # bottom falls on column and row 0. Kept, since the same graph has to give the same picture.
        for step in range(min(right, columns)):
            faded[:, :, -step] *= (step + 1) / min(right, columns)
        for step in range(min(top, rows)):
            faded[:, step, :] *= (step + 1) / min(top, rows)
        for step in range(min(bottom, rows)):
            faded[:, -step, :] *= (step + 1) / min(bottom, rows)
        return io.NodeOutput(faded)

    feather = execute


class GrowMask(io.ComfyNode):
    """Widens a mask, or shrinks it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GrowMask",
            display_name="Grow Mask",
            category="mask",
            inputs=[
                io.Mask.Input("mask"),
                io.Int.Input("expand", default=0, min=-MAX_RESOLUTION, max=MAX_RESOLUTION, step=1),
                io.Boolean.Input("tapered_corners", default=True),
            ],
            outputs=[io.Mask.Output()],
        )

    @classmethod
    def execute(cls, mask: Tensor, expand: int, tapered_corners: bool) -> io.NodeOutput:
        grown = masks_of(mask).unsqueeze(1).float()
        sign = -1.0 if expand < 0 else 1.0  # shrinking is growing what is not selected
        grown = grown * sign
        farthest = mask.shape[-2] + mask.shape[-1]  # steps after which nothing changes any more
        for _ in range(min(abs(expand), farthest)):
            grown = _spread(grown, tapered_corners)
        return io.NodeOutput((grown * sign).squeeze(1))

    expand_mask = execute


def _spread(mask: Tensor, tapered: bool) -> Tensor:
    """Each cell takes the largest value among its neighbours; tapered leaves out the diagonal
    ones.
    """
    if not tapered:
        return max_pool2d(mask, 3, stride=1, padding=1)
    down = max_pool2d(mask, (3, 1), stride=1, padding=(1, 0))
    across = max_pool2d(mask, (1, 3), stride=1, padding=(0, 1))
    return torch.maximum(down, across)


class ThresholdMask(io.ComfyNode):
    """Makes a mask all or nothing."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ThresholdMask",
            category="mask",
            inputs=[
                io.Mask.Input("mask"),
                io.Float.Input("value", default=0.5, min=0.0, max=1.0, step=0.01),
            ],
            outputs=[io.Mask.Output()],
        )

    @classmethod
    def execute(cls, mask: Tensor, value: float) -> io.NodeOutput:
        return io.NodeOutput((mask > value).float())

    image_to_mask = execute


class MaskPreview(io.ComfyNode):
    """Shows a mask."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MaskPreview",
            display_name="Preview Mask",
            category="mask",
            description="Shows the mask in the editor. The picture is deleted at the next start.",
            inputs=[io.Mask.Input("mask")],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, mask: Tensor) -> io.NodeOutput:
        return io.NodeOutput(ui=ui.PreviewMask(mask, cls=cls))


class MaskExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            LatentCompositeMasked,
            ImageCompositeMasked,
            MaskToImage,
            ImageToMask,
            ImageColorToMask,
            SolidMask,
            InvertMask,
            CropMask,
            MaskComposite,
            FeatherMask,
            GrowMask,
            ThresholdMask,
            MaskPreview,
        ]


async def comfy_entrypoint() -> MaskExtension:
    """Called by the loader of built-in modules."""
    return MaskExtension()
