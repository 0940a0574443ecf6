"""Results of the running prompt, and when they may be let go."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from comfy_execution.caching import CacheEntry
from comfy_execution.graph import DynamicPrompt, linked_nodes
from comfy_execution.registry import SpecTable


class RunResults:
    """Every result that some node of the running prompt may still ask for.

    A node may ask for what it is linked to, lazily or not, until it has completed. A node that can
    read the graph (``NodeSpec.reads_graph``) may expand into links to any other: while one is
    unfinished, nothing is let go. Thus no node runs twice in one prompt, whatever the cache keeps.

    Args:
        release: Whether results are let go before the prompt ends; pointless when the cache keeps
            them anyway.
    """

    def __init__(self, prompt: DynamicPrompt, specs: SpecTable, *, release: bool) -> None:
        self._prompt = prompt
        self._specs = specs
        self._release = release
        self._results: dict[str, CacheEntry] = {}
        self._users: dict[str, int] = {}
        self._followed: dict[str, set[str]] = {}  # what each node may still use
        self._gone: set[str] = set()
        self._read: set[str] = set()
        self._readers = 0
        self._waiting: list[str] = []

    def get(self, node_id: str) -> CacheEntry | None:
        """The result, if the node has one."""
        return self._results.get(node_id)

    def put(self, node_id: str, entry: CacheEntry) -> None:
        """Sets the result of a node."""
        self._results[node_id] = entry

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._results

    def __len__(self) -> int:
        return len(self._results)

    def clear(self) -> None:
        """Lets everything go: the prompt has ended."""
        self._results.clear()

    def expect(self, node_ids: Iterable[str], is_known: Callable[[str], bool]) -> None:
        """These nodes are wanted, and through their links others; all use what they link to.

        Args:
            is_known: Whether a result is there already, so that its node's links do not matter.
        """
        if not self._release:
            return
        stack = list(node_ids)
        for node_id in stack:
            self._users[node_id] = self._users.get(node_id, 0) + 1  # ends with let_go, if ever
        while stack:
            node_id = stack.pop()
            if node_id in self._followed or is_known(node_id):
                continue
            sources = self._followed[node_id] = self._sources(node_id)
            self._readers += self._reads_graph(node_id)
            for source in sources:
                self._users[source] = self._users.get(source, 0) + 1
                stack.append(source)

    def has_read(self, node_id: str) -> None:
        """A node has expanded: from now on its graph speaks for it."""
        if self._release and node_id in self._followed and node_id not in self._read:
            self._read.add(node_id)
            self._end_reading(node_id)

    def let_go(self, node_id: str) -> None:
        """One user less. The last one takes the result along, or all hope that it is made."""
        if not self._release:
            return
        stack = [node_id]
        while stack:
            current = stack.pop()
            self._users[current] = self._users.get(current, 1) - 1
            if self._users[current] > 0:
                continue
            if current in self._results:
                self._drop(current)
            elif current in self._followed and current not in self._gone:
                stack += self._forget_user(current)

    def completed(self, node_id: str) -> None:
        """A node is done: it uses its sources no longer."""
        if not self._release or node_id not in self._followed or node_id in self._gone:
            return
        for source in self._forget_user(node_id):
            self.let_go(source)
        if self._users.get(node_id, 0) <= 0:
            self._drop(node_id)

    def _forget_user(self, node_id: str) -> set[str]:
        self._gone.add(node_id)
        if node_id not in self._read:
            self._end_reading(node_id)
        return self._followed[node_id]

    def _end_reading(self, node_id: str) -> None:
        self._readers -= self._reads_graph(node_id)
        if self._readers == 0:
            waiting, self._waiting = self._waiting, []
            for released in waiting:
                self._results.pop(released, None)

    def _drop(self, node_id: str) -> None:
        if self._readers:
            self._waiting.append(node_id)
        else:
            self._results.pop(node_id, None)

    def _sources(self, node_id: str) -> set[str]:
        inputs = self._prompt.get_node(node_id).get("inputs") or {}
        return {source for source in linked_nodes(inputs) if self._prompt.has_node(source)}

    def _reads_graph(self, node_id: str) -> int:
        return int(self._specs[self._prompt.get_node(node_id)["class_type"]].reads_graph)
