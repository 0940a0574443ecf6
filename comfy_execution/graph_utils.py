"""What node code uses to take graphs apart and to build new ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from comfy_execution.context import get_executing_context

Link = list[Any]

LONGEST_PLAIN_ID = 80
"""Longer ids are shortened by digest, or loops by expansion would make them grow for ever."""


class ExecutionBlocker:
    """Returned in place of an output value: whoever consumes it does not run.

    Args:
        message: Shown as an error at the first consumer; None blocks silently.
    """

    def __init__(self, message: str | None) -> None:
        self.message = message


def is_link(obj: Any) -> bool:
    """Whether an input value is a link: ``[node_id, output_index]``."""
    if not isinstance(obj, list) or len(obj) != 2:
        return False
    source, slot = obj
    return isinstance(source, str) and isinstance(slot, (int, float)) and type(slot) is not bool


_default_prefix: ContextVar[tuple[str, int, int]] = ContextVar("graph_prefix", default=("", 0, 0))
"""Root, call index and graph index of the builder made last, or set for the next one."""


class GraphBuilder:
    """Builds a graph in API format whose node ids are unique and the same in every run.

    Inside a running node the ids start with the id of that node, the index of the call and the
    index of the builder within the call: ``2.0.0.1``. The next builder counts on by itself.

    Args:
        prefix: Start of every id, in place of the default.
    """

    def __init__(self, prefix: str | None = None) -> None:
        self.prefix = GraphBuilder.alloc_prefix() if prefix is None else prefix
        self.nodes: dict[str, Node] = {}
        self.id_gen = 1

    @classmethod
    def set_default_prefix(cls, prefix_root: str, call_index: int, graph_index: int = 0) -> None:
        """Sets the place builders are named after outside of running nodes."""
        _default_prefix.set((prefix_root, call_index, graph_index))

    @classmethod
    def alloc_prefix(
        cls, root: str | None = None, call_index: int | None = None, graph_index: int | None = None
    ) -> str:
        """The prefix of the next builder; whatever is None comes from the running node."""
        default_root, default_call, default_graph = _next_place()
        root = default_root if root is None else root
        call_index = default_call if call_index is None else call_index
        if graph_index is None:
            graph_index = default_graph
            _default_prefix.set((default_root, default_call, default_graph + 1))
        return f"{_short(root)}.{call_index}.{graph_index}."

    def node(self, class_type: str, id: str | None = None, **kwargs: Any) -> Node:
        """Adds a node; calling it again with the same id returns the node made before."""
        if id is None:
            id = str(self.id_gen)
            self.id_gen += 1
        full_id = self._full_id(id)
        if full_id not in self.nodes:
            self.nodes[full_id] = Node(full_id, class_type, kwargs)
        return self.nodes[full_id]

    def lookup_node(self, id: str) -> Node | None:
        """The node with this local id, if there is one."""
        return self.nodes.get(self._full_id(id))

    def finalize(self) -> dict[str, dict[str, Any]]:
        """The graph, for ``expand``."""
        return {node_id: node.serialize() for node_id, node in self.nodes.items()}

    def replace_node_output(self, node_id: str, index: int, new_value: Any) -> None:
        """Puts a value in place of every link to one output; None removes those inputs."""
        full_id = self._full_id(node_id)
        for node in self.nodes.values():
            for name, value in list(node.inputs.items()):
                if not (is_link(value) and value[0] == full_id and value[1] == index):
                    continue
                if new_value is None:
                    del node.inputs[name]
                else:
                    node.inputs[name] = new_value

    def remove_node(self, id: str) -> None:
        """Takes a node out; links to it stay.

        Raises:
            KeyError: there is no such node.
        """
        del self.nodes[self._full_id(id)]

    def _full_id(self, local_id: str) -> str:
        return self.prefix + _short(str(local_id))


class Node:
    """A node under construction; made by ``GraphBuilder.node``."""

    def __init__(self, id: str, class_type: str, inputs: Mapping[str, Any]) -> None:
        self.id = id
        self.class_type = class_type
        self.inputs = dict(inputs)
        self.override_display_id: str | None = None

    def out(self, index: int) -> Link:
        """A link to an output."""
        return [self.id, index]

    def set_input(self, key: str, value: Any) -> None:
        """Sets an input to a value or link; None removes it."""
        if value is None:
            self.inputs.pop(key, None)
        else:
            self.inputs[key] = value

    def get_input(self, key: str) -> Any:
        """The value or link of an input, None if it has none."""
        return self.inputs.get(key)

    def set_override_display_id(self, override_display_id: str) -> None:
        """Shows activity of this node at another node than the expanding one."""
        self.override_display_id = override_display_id

    def serialize(self) -> dict[str, Any]:
        """The node in API format."""
        data: dict[str, Any] = {"class_type": self.class_type, "inputs": self.inputs}
        if self.override_display_id is not None:
            data["override_display_id"] = self.override_display_id
        return data


def _next_place() -> tuple[str, int, int]:
    """Where the next builder is named after: the running call, or what was set before."""
    place = _default_prefix.get()
    running = get_executing_context()
    if running is None or running.list_index is None:
        return place
    if place[:2] == (running.node_id, running.list_index):
        return place
    return (running.node_id, running.list_index, 0)


def add_graph_prefix(
    graph: Mapping[str, Mapping[str, Any]], outputs: Any, prefix: str
) -> tuple[dict[str, dict[str, Any]], tuple[Any, ...]]:
    """Renames every node of a graph by a prefix.

    Args:
        graph: A graph in API format; not modified.
        outputs: Values or links into it.
    Returns:
        The renamed graph, and the outputs with renamed links.
    """

    def renamed(value: Any) -> Any:
        return [prefix + value[0], value[1]] if is_link(value) and value[0] in graph else value

    new_graph = {
        prefix + node_id: {
            **node,
            "inputs": {name: renamed(value) for name, value in node.get("inputs", {}).items()},
        }
        for node_id, node in graph.items()
    }
    return new_graph, tuple(renamed(value) for value in outputs)


def _short(node_id: str) -> str:
    """A node id that is not too long: the same, or its start and a digest of it."""
    if len(node_id) <= LONGEST_PLAIN_ID:
        return node_id
    digest = hashlib.blake2b(node_id.encode(), digest_size=12).hexdigest()
    return f"{node_id.split('.', 1)[0][:LONGEST_PLAIN_ID]}.~{digest}"
