"""The values a node is called with: constants, results of linked nodes, hidden values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from comfy_execution.caching import CacheEntry
from comfy_execution.graph import DynamicPrompt, NodeInputError
from comfy_execution.graph_utils import is_link
from comfy_execution.spec import NodeSpec

InputLists = dict[str, list[Any]]

_EXTRA_DATA_OF_KIND = {
    "EXTRA_PNGINFO": "extra_pnginfo",
    "AUTH_TOKEN_COMFY_ORG": "auth_token_comfy_org",
    "API_KEY_COMFY_ORG": "api_key_comfy_org",
}


@dataclass(slots=True)
class Gathered:
    """Inputs of one node.

    Attributes:
        values: Input name -> list of values; a result that is not there yet counts as [None].
        missing: Linked inputs whose results are not there yet.
    """

    values: InputLists
    missing: set[str] = field(default_factory=set)


def unwrap(value: Any) -> Any:
    """A constant without the ``__value__`` wrapper that protects lists from being links."""
    if isinstance(value, dict) and "__value__" in value:
        return value["__value__"]
    return value


def gather_inputs(
    node_id: str,
    node: Mapping[str, Any],
    spec: NodeSpec,
    result_of: Callable[[str], CacheEntry | None],
) -> Gathered:
    """Collects constants and linked results, as far as they are there.

    Args:
        result_of: The result of a node, None while it has none.
    Raises:
        NodeInputError: a link leads to an output that its node does not have, or to an empty list
            where single values are wanted.
    """
    inputs = node.get("inputs") or {}
    gathered = Gathered({})
    for name, value in inputs.items():
        info = spec.find(name, inputs)
        if not is_link(value) or info.options.get("rawLink"):
            if info.section is not None:
                gathered.values[name] = [unwrap(value)]
            continue
        entry = result_of(value[0])
        if entry is None:
            gathered.missing.add(name)
            gathered.values[name] = [None]
        else:
            values = take_output(entry, value, f"input {name!r} of node {node_id}")
            if not values and not spec.input_is_list:
                raise NodeInputError(
                    f"input {name!r} of node {node_id} ({spec.class_type}) is linked to output "
                    f"{value[1]} of node {value[0]}, which is a list of 0 values; the node needs "
                    "at least 1"
                )
            gathered.values[name] = values
    return gathered


def take_output(entry: CacheEntry, link: list[Any], consumer: str) -> list[Any]:
    """The list of values behind a link.

    Raises:
        NodeInputError: the source gave no such output.
    """
    source, slot = link
    if slot != int(slot) or not 0 <= slot < len(entry.outputs):
        raise NodeInputError(
            f"{consumer} is linked to output {slot} of node {source}, which returned "
            f"{len(entry.outputs)} outputs; valid are 0 to {len(entry.outputs) - 1}"
            if entry.outputs
            else f"{consumer} is linked to output {slot} of node {source}, which returned no output"
        )
    return entry.outputs[int(slot)]


def hidden_values(
    spec: NodeSpec, node_id: str, prompt: DynamicPrompt, extra_data: Mapping[str, Any]
) -> dict[str, Any]:
    """Hidden values the class asks for and the host knows, by the name of the input."""
    found: dict[str, Any] = {}
    for name, kind in spec.hidden.items():
        if not isinstance(kind, str):
            continue
        if kind == "UNIQUE_ID":
            found[name] = node_id
        elif kind == "PROMPT":
            found[name] = prompt.get_original_prompt()
        elif kind == "DYNPROMPT":
            found[name] = prompt
        elif kind in _EXTRA_DATA_OF_KIND:
            found[name] = extra_data.get(_EXTRA_DATA_OF_KIND[kind])
    return found
