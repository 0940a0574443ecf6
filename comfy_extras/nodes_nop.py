"""Nodes that once did something: graphs that still hold them keep working."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of


class wanBlockSwap(io.ComfyNode):
    """Gives the model back; residency is planned by the server itself."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="wanBlockSwap",
            category="",
            description="Does nothing: which weights are on the device is planned by the server.",
            is_deprecated=True,
            inputs=[io.Model.Input("model")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        return io.NodeOutput(model)


comfy_entrypoint = entrypoint_of(wanBlockSwap)
