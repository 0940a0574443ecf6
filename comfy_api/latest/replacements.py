"""The replacements that packages registered, and prompts rewritten by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from comfy_api.latest.io.replacement import NodeReplace
from comfy_execution.graph_utils import is_link

REPLACEMENTS: dict[str, list[NodeReplace]] = {}
"""Name of a node class that is gone -> what may replace it, best first."""


def register_replacement(replacement: NodeReplace) -> None:
    """Adds a replacement after those already known for the same old node."""
    REPLACEMENTS.setdefault(replacement.old_node_id, []).append(replacement)


def listed_replacements() -> dict[str, list[dict[str, Any]]]:
    """All replacements in the form the editor reads."""
    return {old: [row.as_dict() for row in rows] for old, rows in REPLACEMENTS.items()}


def replace_old_nodes(prompt: Mapping[str, Any], is_known: Callable[[str], bool]) -> dict[str, Any]:
    """A prompt in which every node whose class is gone has the class that replaces it.

    Args:
        prompt: Node id -> node; not modified. What is no node is left as it is.
        is_known: Whether a node class of this name exists.
    """
    chosen = {
        node_id: found
        for node_id, node in prompt.items()
        if (found := _replacement_for(node, is_known)) is not None
    }
    if not chosen:
        return dict(prompt)
    rewritten = {}
    for node_id, node in prompt.items():
        if node_id in chosen:
            inputs = chosen[node_id].map_inputs(node.get("inputs") or {})
            node = {**node, "class_type": chosen[node_id].new_node_id, "inputs": inputs}
        rewritten[node_id] = _with_mapped_links(node, chosen)
    return rewritten


def _replacement_for(node: Any, is_known: Callable[[str], bool]) -> NodeReplace | None:
    """The first usable replacement of a node; None for a node that needs none."""
    class_type = node.get("class_type") if isinstance(node, dict) else None
    rows = REPLACEMENTS.get(class_type) if isinstance(class_type, str) else None
    if rows is None or is_known(str(class_type)):
        return None
    return next((row for row in rows if is_known(row.new_node_id)), None)


def _with_mapped_links(node: Any, chosen: Mapping[str, NodeReplace]) -> Any:
    """A node whose links to replaced nodes lead to the right outputs."""
    inputs = node.get("inputs") if isinstance(node, Mapping) else None
    if not isinstance(inputs, Mapping):
        return node
    mapped = {
        name: [value[0], chosen[value[0]].map_output(int(value[1]))]
        if is_link(value) and value[0] in chosen
        else value
        for name, value in inputs.items()
    }
    return {**node, "inputs": mapped}
