"""What the execution side tells the world: frozen events and the sink that takes them.

An event knows its wire name, its receiver and its JSON form. It holds plain data only (the image of
a preview excepted, which the server encodes), so the sink may live in another thread or process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from comfy_execution.wire import strict_json

JsonDict = dict[str, Any]


def now_ms() -> int:
    """Milliseconds since the epoch, the unit of every timestamp on the wire."""
    return time.time_ns() // 1_000_000


@runtime_checkable
class Event(Protocol):
    """One message to browser sockets or API clients.

    ``client_id`` names the receiving client. ``broadcast`` sends to every socket instead. An event
    with neither is recorded by those who record events, and sent to nobody.
    """

    @property
    def name(self) -> str: ...

    @property
    def client_id(self) -> str | None: ...

    @property
    def broadcast(self) -> bool: ...

    def payload(self) -> JsonDict: ...


@runtime_checkable
class EventSink(Protocol):
    """Takes events from any thread; never blocks for long and never raises."""

    def publish(self, event: Event) -> None: ...


class NullSink:
    """Drops every event: for tests and for programs that only want results."""

    client_id: str | None = None
    last_node_id: str | None = None

    def publish(self, event: Event) -> None:
        """Ignores the event."""


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """How far one node of a running prompt is; one value of ``progress_state.nodes``."""

    node_id: str
    prompt_id: str
    display_node_id: str
    parent_node_id: str | None
    real_node_id: str
    state: str  # running, finished or error
    value: float
    max: float

    def payload(self) -> JsonDict:
        """The JSON form, keys in the order of the public record."""
        return {
            "value": self.value,
            "max": self.max,
            "state": self.state,
            "node_id": self.node_id,
            "prompt_id": self.prompt_id,
            "display_node_id": self.display_node_id,
            "parent_node_id": self.parent_node_id,
            "real_node_id": self.real_node_id,
        }


@dataclass(frozen=True, slots=True)
class Status:
    """The queue changed; N counts pending and running prompts. Goes to everybody."""

    queue_remaining: int
    name: ClassVar[str] = "status"
    client_id: ClassVar[str | None] = None
    broadcast: ClassVar[bool] = True

    def payload(self) -> JsonDict:
        return {"status": {"exec_info": {"queue_remaining": self.queue_remaining}}}


@dataclass(frozen=True, slots=True)
class ExecutionStart:
    """A prompt begins; timestamp in milliseconds since the epoch."""

    prompt_id: str
    timestamp: int
    client_id: str | None = None
    name: ClassVar[str] = "execution_start"
    broadcast: ClassVar[bool] = False

    def payload(self) -> JsonDict:
        return {"prompt_id": self.prompt_id, "timestamp": self.timestamp}


@dataclass(frozen=True, slots=True)
class ExecutionCached:
    """Nodes whose results are already known; sent even when there are none."""

    nodes: tuple[str, ...]
    prompt_id: str
    timestamp: int
    client_id: str | None = None
    name: ClassVar[str] = "execution_cached"
    broadcast: ClassVar[bool] = False

    def payload(self) -> JsonDict:
        return {
            "nodes": list(self.nodes),
            "prompt_id": self.prompt_id,
            "timestamp": self.timestamp,
        }


@dataclass(frozen=True, slots=True)
class Executing:
    """A node starts (or resumes); ``node`` None says that the prompt has ended."""

    node: str | None
    prompt_id: str
    display_node: str | None = None
    client_id: str | None = None
    name: ClassVar[str] = "executing"
    broadcast: ClassVar[bool] = False

    def payload(self) -> JsonDict:
        if self.node is None:
            return {"node": None, "prompt_id": self.prompt_id}
        return {"node": self.node, "display_node": self.display_node, "prompt_id": self.prompt_id}


@dataclass(frozen=True, slots=True)
class ProgressState:
    """Progress of every node seen so far in a prompt, in order of appearance.

    ``is_followed`` promises another event of the same thread at once, so that a sink that pays for
    each delivery may wait for it.
    """

    prompt_id: str
    nodes: tuple[NodeProgress, ...]
    client_id: str | None = None
    is_followed: bool = False
    name: ClassVar[str] = "progress_state"

    @property
    def broadcast(self) -> bool:
        """Prompts that nobody owns are shown to everybody."""
        return self.client_id is None

    def payload(self) -> JsonDict:
        return {
            "prompt_id": self.prompt_id,
            "nodes": {node.node_id: node.payload() for node in self.nodes},
        }


@dataclass(frozen=True, slots=True)
class Progress:
    """One progress step of one node."""

    value: float
    max: float
    prompt_id: str
    node: str
    client_id: str | None = None
    name: ClassVar[str] = "progress"

    @property
    def broadcast(self) -> bool:
        """Prompts that nobody owns are shown to everybody."""
        return self.client_id is None

    def payload(self) -> JsonDict:
        return {
            "value": self.value,
            "max": self.max,
            "prompt_id": self.prompt_id,
            "node": self.node,
        }


@dataclass(frozen=True, slots=True)
class Executed:
    """A node has shown something; ``output`` is its UI object, None for a cached node without."""

    node: str
    display_node: str
    output: JsonDict | None
    prompt_id: str
    client_id: str | None = None
    name: ClassVar[str] = "executed"
    broadcast: ClassVar[bool] = False

    def payload(self) -> JsonDict:
        return {
            "node": self.node,
            "display_node": self.display_node,
            "output": self.output,
            "prompt_id": self.prompt_id,
        }


@dataclass(frozen=True, slots=True)
class ExecutionSuccess:
    """Every output of the prompt is there."""

    prompt_id: str
    timestamp: int
    client_id: str | None = None
    name: ClassVar[str] = "execution_success"
    broadcast: ClassVar[bool] = False

    def payload(self) -> JsonDict:
        return {"prompt_id": self.prompt_id, "timestamp": self.timestamp}


@dataclass(frozen=True, slots=True)
class ExecutionError:
    """A node failed and ended the prompt; without timestamp: it was blocked with a message."""

    prompt_id: str
    node_id: str
    node_type: str
    executed: tuple[str, ...]
    exception_message: str
    exception_type: str
    traceback: tuple[str, ...] = ()
    current_inputs: Any = ()
    current_outputs: tuple[str, ...] = ()
    timestamp: int | None = None
    details: JsonDict | None = None  # further keys, such as the expanded node that failed
    client_id: str | None = None
    name: ClassVar[str] = "execution_error"
    broadcast: ClassVar[bool] = False

    def payload(self) -> JsonDict:
        inputs = self.current_inputs
        data: JsonDict = {
            "prompt_id": self.prompt_id,
            "node_id": self.node_id,
            "node_type": self.node_type,
            "executed": list(self.executed),
            "exception_message": self.exception_message,
            "exception_type": self.exception_type,
            "traceback": list(self.traceback),
            "current_inputs": list(inputs) if isinstance(inputs, tuple) else inputs,
            "current_outputs": list(self.current_outputs),
        }
        if self.details:
            data.update(self.details)
        if self.timestamp is not None:
            data["timestamp"] = self.timestamp
        return data


@dataclass(frozen=True, slots=True)
class ExecutionInterrupted:
    """Somebody stopped the prompt while the named node was running."""

    prompt_id: str
    node_id: str
    node_type: str
    executed: tuple[str, ...]
    timestamp: int
    client_id: str | None = None
    name: ClassVar[str] = "execution_interrupted"

    @property
    def broadcast(self) -> bool:
        """Prompts that nobody owns are shown to everybody."""
        return self.client_id is None

    def payload(self) -> JsonDict:
        return {
            "prompt_id": self.prompt_id,
            "node_id": self.node_id,
            "node_type": self.node_type,
            "executed": list(self.executed),
            "timestamp": self.timestamp,
        }


def ends_prompt(event: Event) -> bool:
    """Whether an event is a prompt's last one but for ``executing`` without a node.

    An error without a time is that of a blocked node; its prompt goes on.
    """
    if isinstance(event, ExecutionError):
        return event.timestamp is not None
    return isinstance(event, (ExecutionSuccess, ExecutionInterrupted))


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """What the nodes of a finished prompt took, for those who record events; sent to nobody.

    Attributes:
        nodes: Node id -> figures, as the job record shows them.
    """

    prompt_id: str
    nodes: JsonDict
    name: ClassVar[str] = "node_figures"
    client_id: ClassVar[str | None] = None
    broadcast: ClassVar[bool] = False

    def payload(self) -> JsonDict:
        return {"prompt_id": self.prompt_id, "nodes": self.nodes}


@dataclass(frozen=True, slots=True)
class Preview:
    """A picture of unfinished work; the server scales and encodes it.

    Each preview is published twice around the step's ``progress``: before it with ``metadata``
    (binary event 4, only for clients that negotiated ``supports_preview_metadata``), after it
    without (binary event 1, only for the others).

    Attributes:
        format: "JPEG" or "PNG".
        image: A PIL image, or anything else the server can encode.
        max_size: Bounding square in pixels; None keeps the size.
        metadata: node_id, prompt_id, display_node_id, parent_node_id, real_node_id; or None.
    """

    format: str
    image: Any
    max_size: int | None
    metadata: JsonDict | None
    client_id: str | None = None
    name: ClassVar[str] = "preview"

    @property
    def broadcast(self) -> bool:
        """Prompts that nobody owns are shown to everybody."""
        return self.client_id is None

    def payload(self) -> JsonDict:
        """The metadata record; ``image_type`` is added by whoever encodes the image."""
        return dict(self.metadata or {})


@dataclass(frozen=True, slots=True)
class ProgressText:
    """A line of text under a node (binary event 3)."""

    text: str
    node_id: str
    prompt_id: str | None = None
    client_id: str | None = None
    name: ClassVar[str] = "progress_text"

    @property
    def broadcast(self) -> bool:
        """Text that is addressed to nobody goes to everybody."""
        return self.client_id is None

    def payload(self) -> JsonDict:
        return {"text": self.text, "node_id": self.node_id, "prompt_id": self.prompt_id}


@dataclass(frozen=True, slots=True)
class CustomEvent:
    """A message that a node package sends under its own name.

    ``data`` may be any JSON value: numbers that JSON lacks (NaN, infinities) become null.
    """

    name: str
    data: Any
    client_id: str | None = None

    @property
    def broadcast(self) -> bool:
        """Messages that are addressed to nobody go to everybody."""
        return self.client_id is None

    def payload(self) -> Any:
        return strict_json(self.data)
