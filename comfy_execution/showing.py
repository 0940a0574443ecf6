"""What people see of a running prompt: UI outputs, cached ones included, and blocked nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from comfy_execution.caching import CacheEntry
from comfy_execution.events import EventSink, Executed, Executing, ExecutionError
from comfy_execution.graph import DynamicPrompt
from comfy_execution.graph_utils import ExecutionBlocker

Ui = dict[str, list[Any]]


class Showing:
    """Sends what nodes show to the owner of the prompt, and collects it for the history.

    Attributes:
        ui_outputs: Node id -> {"output", "meta"} of everything shown, in order.
    """

    def __init__(
        self, prompt_id: str, prompt: DynamicPrompt, sink: EventSink, client_id: str | None
    ) -> None:
        self.ui_outputs: dict[str, dict[str, Any]] = {}
        self._prompt_id = prompt_id
        self._prompt = prompt
        self._sink = sink
        self._client_id = client_id
        self._waiting: list[tuple[str, CacheEntry]] = []

    def executing(self, node_id: str) -> None:
        """A node is about to be called."""
        display_id = self._prompt.get_display_node_id(node_id)
        self._sink.publish(Executing(node_id, self._prompt_id, display_id, self._client_id))

    def show(self, node_id: str, ui: Ui) -> None:
        """A node has shown something."""
        prompt = self._prompt
        self._record(
            node_id,
            prompt.get_display_node_id(node_id),
            prompt.get_parent_node_id(node_id),
            prompt.get_real_node_id(node_id),
            ui,
        )

    def show_cached(self, node_id: str, entry: CacheEntry) -> None:
        """A cached result stands for a node that was to run."""
        if entry.ui is not None:
            self.show(node_id, entry.ui)
            return
        display_id = self._prompt.get_display_node_id(node_id)
        self._sink.publish(Executed(node_id, display_id, None, self._prompt_id, self._client_id))

    def found_cached(self, node_id: str, entry: CacheEntry) -> None:
        """A result was found in the cache; what its expanded graph showed will be shown again."""
        if entry.children_ui:
            self._waiting.append((node_id, entry))

    def show_children_again(self) -> None:
        """Shows what ``found_cached`` has collected."""
        waiting, self._waiting = self._waiting, []
        for node_id, entry in waiting:
            real_id = self._prompt.get_real_node_id(node_id)
            display_id = self._prompt.get_display_node_id(node_id)
            for end, ui in entry.children_ui.items():
                self._record(real_id + end, display_id, node_id, real_id, ui)

    def remember_children(self, expanded: Mapping[str, CacheEntry]) -> None:
        """Adds to the results of expanded nodes what their graphs showed in this prompt."""
        for node_id, shown in self.ui_outputs.items():
            end = node_id[len(shown["meta"]["real_node_id"]) :]
            parent_id = shown["meta"]["parent_node"]
            while parent_id is not None:
                if parent_id in expanded:
                    expanded[parent_id].children_ui[end] = shown["output"]
                parent_id = self._prompt.get_parent_node_id(parent_id)

    def blocked(
        self, node_id: str, class_type: str, blocker: ExecutionBlocker, executed: Iterable[str]
    ) -> ExecutionBlocker:
        """The first consumer of a blocker shows its message; further down it is silent."""
        if blocker.message is None:
            return blocker
        self._sink.publish(
            ExecutionError(
                self._prompt_id,
                node_id,
                class_type,
                tuple(executed),
                f"Execution Blocked: {blocker.message}",
                "ExecutionBlocked",
                client_id=self._client_id,
            )
        )
        return ExecutionBlocker(None)

    def _record(
        self, node_id: str, display_id: str, parent_id: str | None, real_id: str, ui: Ui
    ) -> None:
        meta = {
            "node_id": node_id,
            "display_node": display_id,
            "parent_node": parent_id,
            "real_node_id": real_id,
        }
        self.ui_outputs[node_id] = {"output": ui, "meta": meta}
        self._sink.publish(Executed(node_id, display_id, ui, self._prompt_id, self._client_id))
