"""Nodes that took the place of others: what a package says when it renames or merges a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NodeReplace:
    """How a node that is gone is replaced.

    Attributes:
        new_node_id, old_node_id: Names of the node classes.
        old_widget_ids: Names of the old node's widgets in their order; saved workflows hold only
            the values.
        input_mapping: For each new input `{"new_id", "old_id"}` to take over a value or link, or
            `{"new_id", "set_value"}` for a fixed value. None keeps all inputs.
        output_mapping: For each output `{"new_idx", "old_idx"}`. None keeps the order.
    """

    new_node_id: str
    old_node_id: str
    old_widget_ids: Sequence[str] | None = None
    input_mapping: Sequence[Mapping[str, Any]] | None = None
    output_mapping: Sequence[Mapping[str, int]] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The form the editor reads."""
        lists = (self.old_widget_ids, self.input_mapping, self.output_mapping)
        widgets, inputs, outputs = (None if rows is None else list(rows) for rows in lists)
        return {
            "new_node_id": self.new_node_id,
            "old_node_id": self.old_node_id,
            "old_widget_ids": widgets,
            "input_mapping": inputs,
            "output_mapping": outputs,
        }

    def map_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The new node's inputs from the old one's; inputs that were not set stay unset."""
        if self.input_mapping is None:
            return dict(inputs)
        mapped = {}
        for row in self.input_mapping:
            if "set_value" in row:
                mapped[row["new_id"]] = row["set_value"]
            elif row.get("old_id") in inputs:
                mapped[row["new_id"]] = inputs[row["old_id"]]
        return mapped

    def map_output(self, index: int) -> int:
        """The new index of an output; the old one if nothing replaces it."""
        rows = self.output_mapping or ()
        return next((row["new_idx"] for row in rows if row["old_idx"] == index), index)
