"""A pack of one file that brings its nodes through `comfy_entrypoint`."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io


class Negative(io.ComfyNode):
    """The number with its sign turned."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "TrialEntryNegative",
            display_name="Trial: Negative",
            category="trial/schema",
            inputs=[io.Int.Input("value")],
            outputs=[io.Int.Output()],
        )

    @classmethod
    def execute(cls, value: int) -> io.NodeOutput:
        return io.NodeOutput(-value)


class TrialExtension(ComfyExtension):
    """The pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [Negative]


async def comfy_entrypoint() -> TrialExtension:
    """Called by the host."""
    return TrialExtension()
