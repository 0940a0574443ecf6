"""Progress of the nodes of a running prompt, and the hook through which node code reports it.

The public frame shows every node seen so far, so sending it for every change costs the square of
the number of nodes. Up to ``EVERY_CHANGE_UP_TO`` nodes it is sent for every change; above, so often
that ``ENTRIES_PER_S`` entries are sent in a second, and once more when the prompt ends. Each frame
is complete, so a client misses nothing but intermediate states. Of expanded nodes only the latest
``MOST_EXPANDED`` are shown: a long loop would make frames of many megabytes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from comfy_execution.context import check_interrupt, get_executing_context
from comfy_execution.events import (
    EventSink,
    NodeProgress,
    NullSink,
    Preview,
    Progress,
    ProgressText,
)
from comfy_execution.events import ProgressState as ProgressStateEvent
from comfy_execution.graph import DynamicPrompt

EVERY_CHANGE_UP_TO = 64
ENTRIES_PER_S = 1280  # 320 kB a second: clients written in Python check a byte in a microsecond
MOST_EXPANDED = 1000

PreviewImage = tuple[str, Any, "int | None"]
"""(format, image, bounding square in pixels or None)."""


class ProgressRegistry:
    """Progress of the nodes of one prompt, published as it changes.

    Args:
        prompt_id: The prompt.
        dynprompt: Knows parents and display nodes.
        sink: Receives the events.
        client_id: Who posted the prompt.
        check_interrupt: Raises the interruption if the prompt is to stop, in whatever thread.
    """

    def __init__(
        self,
        prompt_id: str,
        dynprompt: DynamicPrompt,
        sink: EventSink | None = None,
        client_id: str | None = None,
        check_interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self.prompt_id = prompt_id
        self.dynprompt = dynprompt
        self.client_id = client_id
        self.current_node: str | None = None
        self._sink = sink or NullSink()
        self._nodes: dict[str, NodeProgress] = {}
        self._expanded: deque[str] = deque()  # ids among them, in order of appearance
        self._sent_at = 0.0
        self._lock = threading.Lock()
        self._late: threading.Timer | None = None  # sends what was held back
        self._check_interrupt = check_interrupt
        self._is_closed = False

    @property
    def nodes(self) -> dict[str, NodeProgress]:
        """Node id -> progress, in order of appearance, long past expanded nodes left out."""
        return dict(self._nodes)

    def start_progress(self, node_id: str) -> None:
        """A node starts, or starts again after waiting."""
        self.current_node = node_id
        self._set(node_id, "running", 0.0, 1.0)
        self._publish()

    def update_progress(
        self, node_id: str, value: float, max_value: float, image: PreviewImage | None = None
    ) -> None:
        """A node reports that it is at value of max_value, with a preview if it has one."""
        self._update(node_id, value, max_value, image, is_followed=False)

    def _update(
        self,
        node_id: str,
        value: float,
        max_value: float,
        image: PreviewImage | None,
        is_followed: bool,
    ) -> None:
        if self._is_closed:
            return
        self._set(node_id, "running", value, max_value)
        self._publish(is_followed)
        if image is not None:
            self._sink.publish(self.preview(node_id, image, with_metadata=True))

    def finish_progress(self, node_id: str) -> None:
        """A node is done, or its cached result stands for it."""
        entry = self._nodes.get(node_id)
        reached = 1 if entry is None else entry.max
        self._set(node_id, "finished", reached, reached)
        self._publish()

    def flush(self) -> None:
        """Sends the state if changes were held back."""
        with self._lock:
            if self._late is not None:
                self._send()

    def close(self) -> None:
        """The prompt has ended: keeps nothing of its graph alive, and tells nothing more.

        Threads that a node has left behind may go on reporting; nobody is to see their node run.
        """
        with self._lock:
            self._is_closed = True
            self._forget_late()
        self.dynprompt = DynamicPrompt({})
        self._nodes = {}
        self._expanded.clear()

    def raise_if_interrupted(self) -> None:
        """Raises the interruption if the prompt is to stop; for threads that a node has started."""
        if not self._is_closed:
            self._check_interrupt()

    def preview(self, node_id: str, image: PreviewImage, *, with_metadata: bool) -> Preview:
        """The event that carries an image of a node's unfinished work."""
        metadata = None
        if with_metadata:
            metadata = {
                "node_id": node_id,
                "prompt_id": self.prompt_id,
                "display_node_id": self.dynprompt.get_display_node_id(node_id),
                "parent_node_id": self.dynprompt.get_parent_node_id(node_id),
                "real_node_id": self.dynprompt.get_real_node_id(node_id),
            }
        return Preview(image[0], image[1], image[2], metadata, self.client_id)

    def report(
        self, node_id: str, value: float, max_value: float, image: PreviewImage | None = None
    ) -> None:
        """One step of a progress bar: state, preview, step, preview for older clients."""
        if self._is_closed:
            return
        self._update(node_id, value, max_value, image, is_followed=True)
        self._sink.publish(Progress(value, max_value, self.prompt_id, node_id, self.client_id))
        if image is not None:
            self._sink.publish(self.preview(node_id, image, with_metadata=False))

    def send_text(self, node_id: str, text: str) -> None:
        """Shows a line of text under a node."""
        if self._is_closed:
            return
        self._sink.publish(ProgressText(text, node_id, self.prompt_id, self.client_id))

    def _set(self, node_id: str, state: str, value: float, max_value: float) -> None:
        prompt = self.dynprompt
        parent_id = prompt.get_parent_node_id(node_id)
        if parent_id is not None and node_id not in self._nodes:
            self._expanded.append(node_id)
            if len(self._expanded) > MOST_EXPANDED:
                self._nodes.pop(self._expanded.popleft(), None)
        self._nodes[node_id] = NodeProgress(
            node_id,
            self.prompt_id,
            prompt.get_display_node_id(node_id),
            parent_id,
            prompt.get_real_node_id(node_id),
            state,
            value,
            max_value,
        )

    def _publish(self, is_followed: bool = False) -> None:
        count = len(self._nodes)
        with self._lock:
            if self._is_closed:
                return
            wait_s = self._sent_at + count / ENTRIES_PER_S - time.monotonic()
            if count <= EVERY_CHANGE_UP_TO or wait_s <= 0:
                self._send(is_followed)
            elif self._late is None:
                self._late = threading.Timer(wait_s, self._send_late)
                self._late.daemon = True
                self._late.start()

    def _send_late(self) -> None:
        """What was held back goes out even if the node that runs reports nothing for long."""
        with self._lock:
            if self._late is threading.current_thread():
                self._send()

    def _send(self, is_followed: bool = False) -> None:
        """Publishes everything; the lock is held, so that no older state follows a newer one."""
        self._forget_late()
        self._sent_at = time.monotonic()
        nodes = tuple(self._nodes.values())
        self._sink.publish(ProgressStateEvent(self.prompt_id, nodes, self.client_id, is_followed))

    def _forget_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


_state: ContextVar[ProgressRegistry | None] = ContextVar("progress_state", default=None)
_latest: list[ProgressRegistry] = []


def get_progress_state() -> ProgressRegistry:
    """The registry of the running prompt; of the last one in threads that a node started.

    Before the first prompt it is an empty one that reaches nobody.
    """
    registry = _state.get()
    if registry is None:
        registry = _latest[0] if _latest else ProgressRegistry("", DynamicPrompt({}))
    return registry


def reset_progress_state(registry: ProgressRegistry) -> None:
    """Makes a registry the current one; the executor does so for each prompt."""
    _state.set(registry)
    _latest[:] = [registry]


def make_note_hook() -> Callable[[str], None]:
    """The hook(text) for notes of running code: the text is shown under the node at work."""

    def hook(text: str) -> None:
        registry, context = get_progress_state(), get_executing_context()
        node_id = context.node_id if context is not None else registry.current_node
        if node_id is not None:
            registry.send_text(node_id, text)

    return hook


def make_progress_hook() -> Callable[..., None]:
    """The hook(value, total, preview, prompt_id=None, node_id=None) for progress bars.

    At each step it raises the interruption if the prompt is to stop, also in threads that a node
    has started and waits for: those know no context, and the node itself cannot look meanwhile.
    """

    def hook(
        value: float,
        total: float,
        preview: PreviewImage | None = None,
        prompt_id: str | None = None,  # noqa: ARG001 - given by callers of the public hook
        node_id: str | None = None,
    ) -> None:
        check_interrupt()
        registry = get_progress_state()
        registry.raise_if_interrupted()
        if node_id is None:
            context = get_executing_context()
            node_id = context.node_id if context is not None else registry.current_node
        if node_id is not None:
            registry.report(node_id, value, total, preview)

    return hook
