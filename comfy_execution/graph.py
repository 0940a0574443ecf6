"""The prompt while it runs: nodes that may grow in number, and the order in which they run."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from comfy_execution.graph_utils import ExecutionBlocker, is_link
from comfy_execution.registry import SpecTable
from comfy_execution.spec import get_input_info

__all__ = [
    "DependencyCycleError",
    "DynamicPrompt",
    "ExecutionBlocker",
    "ExecutionList",
    "GraphLimitError",
    "NodeInputError",
    "NodeNotFoundError",
    "get_input_info",
    "is_link",
]

MAX_NODES = 250_000
"""Nodes one prompt may have, expanded ones included."""
MAX_DEPTH = 10_000
"""How deep expansions may be nested; a loop by expansion nests once for each iteration."""

_FAR_FROM_OUTPUT = 3


class DependencyCycleError(Exception):
    """Nodes wait for each other."""

    def __init__(self, nodes: list[str]) -> None:
        shown = " -> ".join([*nodes[:20], "..."] if len(nodes) > 20 else [*nodes, *nodes[:1]])
        super().__init__(f"Dependency cycle detected among {len(nodes)} nodes: {shown}")
        self.nodes = nodes


class NodeNotFoundError(Exception):
    """A link leads to a node that is not in the prompt."""


class NodeInputError(Exception):
    """A node's inputs cannot be used."""


class GraphLimitError(Exception):
    """Expansion made more nodes, or nested them deeper, than a prompt may have."""


class DuplicateNodeError(Exception):
    """An expanded graph reuses an id."""


class DynamicPrompt:
    """The posted prompt plus the nodes that expansion added to it.

    An added (ephemeral) node has a parent, the node that expanded; a real node, the one in the
    posted prompt it stems from; and a display node, where its activity is shown.
    """

    def __init__(self, original_prompt: dict[str, Any]) -> None:
        self.original_prompt = original_prompt
        self.ephemeral_prompt: dict[str, Any] = {}
        self.ephemeral_parents: dict[str, str] = {}
        self.ephemeral_display: dict[str, str] = {}
        self._real: dict[str, str] = {}
        self._depth: dict[str, int] = {}

    def get_node(self, node_id: str) -> dict[str, Any]:
        """A node in API format.

        Raises:
            NodeNotFoundError: there is no such node.
        """
        node = self.original_prompt.get(node_id)
        if node is None:
            node = self.ephemeral_prompt.get(node_id)
        if node is None:
            raise NodeNotFoundError(
                f"Node {node_id} not found; a link leads to it, but the prompt holds no such node"
            )
        found: dict[str, Any] = node
        return found

    def has_node(self, node_id: str) -> bool:
        """Whether the node exists."""
        return node_id in self.original_prompt or node_id in self.ephemeral_prompt

    def add_ephemeral_node(
        self, node_id: str, node_info: dict[str, Any], parent_id: str, display_id: str
    ) -> None:
        """Adds a node of an expanded graph.

        Raises:
            DuplicateNodeError: the id is taken.
            GraphLimitError: too many nodes, or nested too deep.
        """
        if self.has_node(node_id):
            raise DuplicateNodeError(
                f"expansion of node {parent_id} adds node {node_id}, which exists already; make "
                "ids unique and the same in every run, as GraphBuilder does"
            )
        depth = self._depth.get(parent_id, 0) + 1
        if depth > MAX_DEPTH:
            raise GraphLimitError(
                f"expansion is nested more than {MAX_DEPTH} deep at node {parent_id[:80]}; a loop "
                "probably does not end, or asks for too many iterations"
            )
        if len(self.ephemeral_prompt) >= MAX_NODES:
            raise GraphLimitError(
                f"expansion made more than {MAX_NODES} nodes at node {parent_id[:80]}; a loop "
                "probably does not end, or asks for too many iterations"
            )
        self._depth[node_id] = depth
        self.ephemeral_prompt[node_id] = node_info
        self.ephemeral_parents[node_id] = parent_id
        self.ephemeral_display[node_id] = self.get_display_node_id(display_id)
        self._real[node_id] = self.get_real_node_id(parent_id)

    def get_real_node_id(self, node_id: str) -> str:
        """The node of the posted prompt that this one stems from; itself if it was posted."""
        return self._real.get(node_id, node_id)

    def get_parent_node_id(self, node_id: str) -> str | None:
        """The node whose expansion made this one."""
        return self.ephemeral_parents.get(node_id)

    def get_display_node_id(self, node_id: str) -> str:
        """The node that shows this one's activity."""
        return self.ephemeral_display.get(node_id, node_id)

    def all_node_ids(self) -> set[str]:
        """Ids of all nodes, posted and added."""
        return set(self.original_prompt) | set(self.ephemeral_prompt)

    def get_original_prompt(self) -> dict[str, Any]:
        """The prompt as it was posted."""
        return self.original_prompt


def linked_nodes(inputs: Mapping[str, Any]) -> Iterable[str]:
    """Ids of the nodes that links among these inputs lead to, repeated as often as linked."""
    return [value[0] for value in inputs.values() if is_link(value)]


def needed_nodes(prompt: DynamicPrompt, outputs: Sequence[str]) -> dict[str, None]:
    """The outputs and every node they may need, lazily or not; missing nodes are left out."""
    needed: dict[str, None] = {}
    stack = [node_id for node_id in reversed(outputs) if prompt.has_node(node_id)]
    while stack:
        node_id = stack.pop()
        if node_id in needed:
            continue
        needed[node_id] = None
        inputs = prompt.get_node(node_id).get("inputs") or {}
        stack += [source for source in linked_nodes(inputs) if prompt.has_node(source)]
    return needed


class ExecutionList:
    """Which nodes are to run, and which of them can run now.

    Nodes are added with the nodes they need; a node is ready when everything it waits for has
    completed. Nodes and links may be added at any time. ``stage`` takes a ready node out; it comes
    back by ``unstage`` (it waits for more) or leaves for good by ``complete``. Nothing recurses,
    and the cost of a prompt is linear in its links.

    Args:
        prompt: Where nodes are looked up.
        specs: Where their classes are looked up.
        is_known: Says whether a node's result is there already, so that it need not run.
    """

    def __init__(
        self, prompt: DynamicPrompt, specs: SpecTable, is_known: Callable[[str], bool]
    ) -> None:
        self._prompt = prompt
        self._specs = specs
        self._is_known = is_known
        self._pending: dict[str, int] = {}  # id -> place in order of insertion
        self._waits_for: dict[str, int] = {}
        self._needed_by: dict[str, dict[str, None]] = {}
        self._sources: dict[str, list[str]] = {}
        self._distance: dict[str, int] = {}
        self._ready: list[tuple[int, int, str]] = []
        self._blocks = 0
        self._order = 0
        self.staged: str | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._pending

    @property
    def has_external_blocks(self) -> bool:
        """Whether some node waits for something outside the graph."""
        return self._blocks > 0

    def add_node(
        self, node_id: str, include_lazy: bool = False, within: Iterable[str] | None = None
    ) -> None:
        """Adds a node and, through its links, everything it needs that is not known yet.

        A known node needs nothing: it is added all the same, to be shown.

        Args:
            node_id: The node.
            include_lazy: Whether links of lazy inputs are followed as well.
            within: Follows only links into this set of nodes; None follows all.
        Raises:
            NodeNotFoundError: a link leads nowhere.
            UnknownNodeError: a node has a class that does not exist.
        """
        scope = set(within) if within is not None else None
        stack, links = [node_id], []
        is_known = self._is_known(node_id)
        while stack:
            current = stack.pop()
            if current in self._pending:
                continue
            node = self._prompt.get_node(current)
            self._insert(current, self._specs[node["class_type"]].is_output)
            for source in () if is_known else self._required_sources(node, include_lazy):
                if scope is not None and source not in scope:
                    continue
                if not self._is_known(source):
                    stack.append(source)
                    links.append((source, current))
        for source, target in links:
            self._link(source, target)
        for current in {target for _, target in links} | {node_id}:
            self._note_if_ready(current)
        for source, _ in links:
            self._note_if_ready(source)

    def add_strong_link(
        self,
        from_node_id: str,
        from_socket: int,  # noqa: ARG002 - part of the public signature
        to_node_id: str,
    ) -> None:
        """Makes a node wait for another one, which is added if its result is not known."""
        if not self._is_known(from_node_id):
            self.add_node(from_node_id)
            self._link(from_node_id, to_node_id)

    def make_input_strong_link(self, to_node_id: str, to_input: str) -> None:
        """Makes a node wait for the node linked to one of its lazy inputs.

        Raises:
            NodeInputError: the node has no such input, or the input holds no link.
        """
        inputs = self._prompt.get_node(to_node_id).get("inputs", {})
        if to_input not in inputs:
            raise NodeInputError(
                f"node {to_node_id} asks for its input {to_input!r}, which the prompt does not "
                f"give; it has: {', '.join(inputs) or 'none'}"
            )
        value = inputs[to_input]
        if not is_link(value):
            raise NodeInputError(
                f"node {to_node_id} asks for its input {to_input!r}, which is not linked"
            )
        self.add_strong_link(value[0], value[1], to_node_id)

    def add_external_block(self, node_id: str) -> Callable[[], None]:
        """Makes a node wait until the returned function is called."""
        self._waits_for[node_id] += 1
        self._blocks += 1

        def unblock() -> None:
            self._blocks -= 1
            self._release(node_id)

        return unblock

    def stage(self) -> str | None:
        """Takes out the ready node that should run first; None when no node is ready.

        Output nodes and async nodes go first, then nodes that feed an output, then nodes two steps
        before one, then the others; among equals the one that was added first.
        """
        while self._ready:
            node_id = heapq.heappop(self._ready)[2]
            if node_id in self._pending and self._waits_for[node_id] == 0:
                self.staged = node_id
                return node_id
        return None

    def unstage(self) -> None:
        """Puts the staged node back: it runs again when what it waits for by now is there."""
        node_id, self.staged = self.staged, None
        if node_id is not None:
            self._note_if_ready(node_id)

    def complete(self) -> str:
        """Removes the staged node for good and lets go those that waited for it."""
        node_id, self.staged = self.staged, None
        assert node_id is not None, "complete() follows stage()"
        del self._pending[node_id]
        del self._waits_for[node_id]
        self._sources.pop(node_id, None)
        for waiting in self._needed_by.pop(node_id):
            self._release(waiting)
        return node_id

    def find_cycle(self) -> list[str]:
        """Nodes that wait for each other, in the order of their links; empty if there are none."""
        state: dict[str, int] = {}
        for start in self._pending:
            path: list[str] = []
            current: str | None = start
            while current is not None and current not in state:
                state[current] = len(path)
                path.append(current)
                waiting = [s for s in self._sources.get(current, ()) if s in self._pending]
                current = waiting[0] if waiting else None
            if current is not None and current in path:
                return path[path.index(current) :][::-1]
        return []

    # --- inside -------------------------------------------------------------------------------

    def _required_sources(self, node: dict[str, Any], include_lazy: bool) -> list[str]:
        inputs = node.get("inputs") or {}
        spec = self._specs[node["class_type"]]
        sources = []
        for name, value in inputs.items():
            if not is_link(value):
                continue
            if include_lazy or not spec.link_info(name, inputs).options.get("lazy"):
                sources.append(value[0])
        return sources

    def _insert(self, node_id: str, is_output: bool) -> None:
        self._order += 1
        self._pending[node_id] = self._order
        self._waits_for[node_id] = 0
        self._needed_by[node_id] = {}
        if is_output:
            self._distance[node_id] = 0

    def _link(self, source: str, target: str) -> None:
        """Makes target wait for source; both are pending."""
        if target in self._needed_by[source]:
            return
        self._needed_by[source][target] = None
        self._waits_for[target] += 1
        self._sources.setdefault(target, []).append(source)
        distance = self._distance.get(target, _FAR_FROM_OUTPUT) + 1
        near = [(source, distance)]
        while near:  # at most two steps upstream, and each node improves at most twice
            node_id, distance = near.pop()
            if distance < self._distance.get(node_id, _FAR_FROM_OUTPUT):
                self._distance[node_id] = distance
                near += [(upstream, distance + 1) for upstream in self._sources.get(node_id, ())]

    def _release(self, node_id: str) -> None:
        if node_id in self._waits_for:
            self._waits_for[node_id] -= 1
            self._note_if_ready(node_id)

    def _note_if_ready(self, node_id: str) -> None:
        if self._waits_for.get(node_id) == 0 and node_id != self.staged:
            heapq.heappush(self._ready, (self._rank(node_id), self._pending[node_id], node_id))

    def _rank(self, node_id: str) -> int:
        distance = self._distance.get(node_id, _FAR_FROM_OUTPUT)
        if distance == 0:
            return 0
        spec = self._specs[self._prompt.get_node(node_id)["class_type"]]
        return 0 if spec.is_async else distance
