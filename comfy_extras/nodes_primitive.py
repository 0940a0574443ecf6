"""Nodes that hold one value each, to be used in several places."""

from __future__ import annotations

import re

from comfy_api.latest import ComfyExtension, io

LARGEST = 2**63 - 1
COLOUR = re.compile(r"#(?:[0-9a-fA-F]{2}){3,4}")


def _schema(name: str, title: str, value: io.Input, output: io.Output) -> io.Schema:
    return io.Schema(
        node_id=name,
        display_name=title,
        category="utils/primitive",
        inputs=[value],
        outputs=[output],
    )


class String(io.ComfyNode):
    """A line of text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema("PrimitiveString", "String", io.String.Input("value"), io.String.Output())

    @classmethod
    def execute(cls, value: str) -> io.NodeOutput:
        return io.NodeOutput(value)


class StringMultiline(io.ComfyNode):
    """Several lines of text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        value = io.String.Input("value", multiline=True)
        return _schema("PrimitiveStringMultiline", "String (Multiline)", value, io.String.Output())

    @classmethod
    def execute(cls, value: str) -> io.NodeOutput:
        return io.NodeOutput(value)


class Int(io.ComfyNode):
    """A whole number."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        value = io.Int.Input("value", min=-LARGEST, max=LARGEST, control_after_generate=True)
        return _schema("PrimitiveInt", "Int", value, io.Int.Output())

    @classmethod
    def execute(cls, value: int) -> io.NodeOutput:
        return io.NodeOutput(value)


class Float(io.ComfyNode):
    """A number."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        value = io.Float.Input("value", min=-LARGEST, max=LARGEST, step=0.1)
        return _schema("PrimitiveFloat", "Float", value, io.Float.Output())

    @classmethod
    def execute(cls, value: float) -> io.NodeOutput:
        return io.NodeOutput(value)


class Boolean(io.ComfyNode):
    """Yes or no."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "PrimitiveBoolean", "Boolean", io.Boolean.Input("value"), io.Boolean.Output()
        )

    @classmethod
    def execute(cls, value: bool) -> io.NodeOutput:
        return io.NodeOutput(value)


class Seed(io.ComfyNode):
    """A seed for several nodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        seed = io.Int.Input(
            "seed", min=0, max=LARGEST, control_after_generate=io.ControlAfterGenerate.fixed
        )
        output = io.Int.Output(display_name="seed")
        return _schema("SeedNode", "Seed", seed, output)

    @classmethod
    def execute(cls, seed: int) -> io.NodeOutput:
        return io.NodeOutput(seed)


class Colour(io.ComfyNode):
    """A colour, as one number, as text and how opaque it is."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ColorToRGBInt",
            display_name="Color Picker",
            category="utils",
            description="A colour as a number and as text.",
            inputs=[io.Color.Input("color")],
            outputs=[
                io.Int.Output(display_name="rgb_int"),
                io.Color.Output(display_name="hex"),
                io.Float.Output(display_name="alpha"),
            ],
        )

    @classmethod
    def execute(cls, color: str) -> io.NodeOutput:
        if not COLOUR.fullmatch(color):
            raise ValueError(f"color: expected #RRGGBB or #RRGGBBAA, found {color!r:.40}")
        colours, alpha = color[:7], color[7:] or "ff"
        return io.NodeOutput(int(colours[1:], 16), colours, int(alpha, 16) / 255)


class PrimitivesExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [String, StringMultiline, Int, Float, Boolean, Seed, Colour]


async def comfy_entrypoint() -> PrimitivesExtension:
    """Called by the loader of built-in modules."""
    return PrimitivesExtension()
