"""Nodes that choose: between two inputs, and from a list that the person writes."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of


class SwitchNode(io.ComfyNode):
    """Hands on one of two inputs; the other is not computed."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        template = io.MatchType.Template("switch")
        return io.Schema(
            node_id="ComfySwitchNode",
            display_name="Switch",
            category="logic",
            is_experimental=True,
            inputs=[
                io.Boolean.Input("switch"),
                io.MatchType.Input("on_false", template=template, lazy=True),
                io.MatchType.Input("on_true", template=template, lazy=True),
            ],
            outputs=[io.MatchType.Output(template=template, display_name="output")],
        )

    @classmethod
    def check_lazy_status(cls, **kwargs: Any) -> list[str]:
        """The chosen input, until it is there."""
        name = "on_true" if kwargs["switch"] else "on_false"
        return [name] if kwargs.get(name) is None else []

    @classmethod
    def execute(cls, switch: bool, on_false: Any = None, on_true: Any = None) -> io.NodeOutput:
        return io.NodeOutput(on_true if switch else on_false)


class CustomComboNode(io.ComfyNode):
    """Gives the chosen entry of a list that is written on the node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CustomCombo",
            display_name="Custom Combo",
            category="utils",
            is_experimental=True,
            inputs=[io.Combo.Input("choice", options=[])],
            outputs=[io.String.Output()],
        )

    @classmethod
    def validate_inputs(cls, choice: str) -> bool:
        """Any text: the entries are known to the editor only."""
        return isinstance(choice, str)

    @classmethod
    def execute(cls, choice: str) -> io.NodeOutput:
        return io.NodeOutput(choice)


comfy_entrypoint = entrypoint_of(SwitchNode, CustomComboNode)
