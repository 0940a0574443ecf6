"""Nodes that put values into lists and take them out."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

CATEGORY = "logic"
MOST_INPUTS = 100


class CreateList(io.ComfyNode):
    """Joins the values of several inputs, and the lists of those that have lists, in one list."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        template = io.MatchType.Template("item")
        item = io.MatchType.Input("input", template=template)
        slots = io.Autogrow.TemplatePrefix(item, prefix="input", min=1, max=MOST_INPUTS)
        return io.Schema(
            node_id="CreateList",
            display_name="Create List",
            category=CATEGORY,
            description="Joins values of one type to a list, in the order of the inputs.",
            is_input_list=True,
            inputs=[io.Autogrow.Input("inputs", template=slots)],
            outputs=[
                io.MatchType.Output(template=template, display_name="list", is_output_list=True)
            ],
        )

    @classmethod
    def execute(cls, inputs: dict[str, list[Any]]) -> io.NodeOutput:
        return io.NodeOutput([item for items in inputs.values() for item in items])


class GetItemFromList(io.ComfyNode):
    """Takes one value out of a list."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GetItemFromList",
            display_name="Get Item From List",
            category=CATEGORY,
            description="Takes one value out of a list; 0 is the first, -1 the last.",
            is_input_list=True,
            inputs=[io.AnyType.Input("list"), io.Int.Input("index", default=0)],
            outputs=[io.AnyType.Output()],
        )

    @classmethod
    def execute(cls, list: list[Any], index: list[int]) -> io.NodeOutput:
        place = index[0]
        if not -len(list) <= place < len(list):
            raise ValueError(
                f"index: the list has {len(list)} items; expected 0 to {len(list) - 1}, or "
                f"-{len(list)} to -1 from its end, found {place}"
                if list
                else f"list: expected at least one item, found none; there is no item {place}"
            )
        return io.NodeOutput(list[place])


comfy_entrypoint = entrypoint_of(CreateList, GetItemFromList)
