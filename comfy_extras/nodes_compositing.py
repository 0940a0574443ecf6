"""Nodes that work with transparency. In a mask 1 means transparent; alpha is 1 minus that."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import node_helpers
from comfy import resize
from comfy.devices import formulas
from comfy_api.latest import ComfyExtension, io
from comfy_nodes.image import resized
from comfy_nodes.picture_basics import colours_of, masks_of


class Layer(NamedTuple):
    """Colours multiplied by alpha, and alpha [..., 1]."""

    colour: Tensor
    alpha: Tensor


Rule = Callable[[Layer, Layer], Layer]


def _over(a: Layer, b: Layer, colour: Tensor) -> Layer:
    """A blended colour with the alpha of both layers together."""
    return Layer(colour, a.alpha + b.alpha - a.alpha * b.alpha)


def _overlay(a: Layer, b: Layer) -> Layer:
    if formulas.as_published():
        dark = (b.alpha - b.colour) * (a.alpha - a.colour)
    else:  # what a layer lacks is counted from the other's alpha; alike where both are opaque
        dark = (b.alpha - a.colour) * (a.alpha - b.colour)
    light = a.alpha * b.alpha - 2 * dark
    mixed = torch.where(2 * b.colour < b.alpha, 2 * a.colour * b.colour, light)
    return _over(a, b, mixed)


def _lighter(a: Layer, b: Layer, choose: Callable[[Tensor, Tensor], Tensor]) -> Layer:
    colour = (1 - b.alpha) * a.colour + (1 - a.alpha) * b.colour + choose(a.colour, b.colour)
    return _over(a, b, colour)


# a is the source (above), b the destination (below).
# Source: Porter and Duff 1984, https://doi.org/10.1145/964965.808606; the blend modes as in the SVG
# standard.
RULES: dict[str, Rule] = {
    "ADD": lambda a, b: Layer((a.colour + b.colour).clamp(0, 1), (a.alpha + b.alpha).clamp(0, 1)),
    "CLEAR": lambda _a, b: Layer(torch.zeros_like(b.colour), torch.zeros_like(b.alpha)),
    "DARKEN": lambda a, b: _lighter(a, b, torch.minimum),
    "DST": lambda _a, b: b,
    "DST_ATOP": lambda a, b: Layer(a.alpha * b.colour + (1 - b.alpha) * a.colour, a.alpha),
    "DST_IN": lambda a, b: Layer(a.alpha * b.colour, a.alpha * b.alpha),
    "DST_OUT": lambda a, b: Layer((1 - a.alpha) * b.colour, (1 - a.alpha) * b.alpha),
    "DST_OVER": lambda a, b: Layer(
        b.colour + (1 - b.alpha) * a.colour, b.alpha + (1 - b.alpha) * a.alpha
    ),
    "LIGHTEN": lambda a, b: _lighter(a, b, torch.maximum),
    "MULTIPLY": lambda a, b: Layer(a.colour * b.colour, a.alpha * b.alpha),
    "OVERLAY": _overlay,
    "SCREEN": lambda a, b: _over(a, b, a.colour + b.colour - a.colour * b.colour),
    "SRC": lambda a, _b: a,
    "SRC_ATOP": lambda a, b: Layer(b.alpha * a.colour + (1 - a.alpha) * b.colour, b.alpha),
    "SRC_IN": lambda a, b: Layer(a.colour * b.alpha, a.alpha * b.alpha),
    "SRC_OUT": lambda a, b: Layer((1 - b.alpha) * a.colour, (1 - b.alpha) * a.alpha),
    "SRC_OVER": lambda a, b: Layer(
        a.colour + (1 - a.alpha) * b.colour, a.alpha + (1 - a.alpha) * b.alpha
    ),
    "XOR": lambda a, b: Layer(
        (1 - b.alpha) * a.colour + (1 - a.alpha) * b.colour,
        (1 - b.alpha) * a.alpha + (1 - a.alpha) * b.alpha,
    ),
}


class PorterDuffImageComposite(io.ComfyNode):
    """Lays one picture over another by a rule for colour and transparency."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="PorterDuffImageComposite",
            display_name="Porter-Duff Image Composite",
            category="mask/compositing",
            inputs=[
                io.Image.Input("source"),
                io.Mask.Input("source_alpha"),
                io.Image.Input("destination"),
                io.Mask.Input("destination_alpha"),
                io.Combo.Input("mode", options=list(RULES), default="DST"),
            ],
            outputs=[io.Image.Output(), io.Mask.Output()],
        )

    @classmethod
    def execute(
        cls,
        source: Tensor,
        source_alpha: Tensor,
        destination: Tensor,
        destination_alpha: Tensor,
        mode: str,
    ) -> io.NodeOutput:
        source_alpha, destination_alpha = masks_of(source_alpha), masks_of(destination_alpha)
        destination, source = node_helpers.image_alpha_fix(destination, source)
        count = min(len(source), len(source_alpha), len(destination), len(destination_alpha))
        rows, columns = destination.shape[1:3]
        above = _layer(source[:count], source_alpha[:count], rows, columns)
        below = _layer(destination[:count], destination_alpha[:count], rows, columns)
        result = RULES[mode](above, below)
        colour = torch.where(result.alpha > 1e-5, result.colour / result.alpha, result.colour)
        return io.NodeOutput(colour.clamp(0, 1), 1.0 - result.alpha.squeeze(-1))


def _layer(image: Tensor, mask: Tensor, rows: int, columns: int) -> Layer:
    """A picture and its mask at one size, as a layer."""
    mask = mask.unsqueeze(-1)
    if mask.shape[1:3] != (rows, columns):
        mask = resized(mask, columns, rows, "bicubic", "center")
    if image.shape[1:3] != (rows, columns):
        image = resized(image, columns, rows, "bicubic", "center")
    alpha = 1.0 - mask
    return Layer(image * alpha, alpha)


class SplitImageWithAlpha(io.ComfyNode):
    """Takes a picture with transparency apart."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SplitImageWithAlpha",
            display_name="Split Image with Alpha",
            category="mask/compositing",
            inputs=[io.Image.Input("image")],
            outputs=[io.Image.Output(), io.Mask.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor) -> io.NodeOutput:
        alpha = image[..., -1] if image.shape[-1] in (2, 4) else torch.ones_like(image[..., 0])
        return io.NodeOutput(colours_of(image), 1.0 - alpha)


class JoinImageWithAlpha(io.ComfyNode):
    """Gives a picture transparency from a mask."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="JoinImageWithAlpha",
            display_name="Join Image with Alpha",
            category="mask/compositing",
            inputs=[io.Image.Input("image"), io.Mask.Input("alpha")],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor, alpha: Tensor) -> io.NodeOutput:
        alpha = masks_of(alpha)
        count = max(len(image), len(alpha))
        rows, columns = image.shape[1:3]
        mask = resized(alpha.unsqueeze(-1), columns, rows, "bilinear", "disabled")
        opacity = 1.0 - resize.repeat_to_batch_size(mask.to(image), count)
        colours = resize.repeat_to_batch_size(colours_of(image), count)
        return io.NodeOutput(torch.cat((colours, opacity), dim=-1))

    join_image_with_alpha = execute


class CompositingExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [PorterDuffImageComposite, SplitImageWithAlpha, JoinImageWithAlpha]


async def comfy_entrypoint() -> CompositingExtension:
    """Called by the loader of built-in modules."""
    return CompositingExtension()
