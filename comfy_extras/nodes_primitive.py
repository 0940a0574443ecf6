"""Nodes that hold one value each, to be used in several places."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

LARGEST = 2**63 - 1


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


class PrimitivesExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [String, StringMultiline, Int, Float, Boolean, Seed]


async def comfy_entrypoint() -> PrimitivesExtension:
    """Called by the loader of built-in modules."""
    return PrimitivesExtension()
