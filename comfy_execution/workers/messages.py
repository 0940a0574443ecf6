"""What crosses between the server and a worker: messages of plain JSON, and events as messages.

To a worker (``do``):

* ``run``: ``item`` (the queue item with its secrets), ``client`` (what the server knows of the
  socket that posted it);
* ``stop``: ``prompt_id``;
* ``free``: ``flags``, as ``/free`` sets them;
* ``answer``: a question, with ``id``, ``what`` and ``given``;
* ``end``.

From a worker (``say``):

* ``ready``: ``device``, ``pid``, ``nodes`` (class names); or ``refused``: ``why``;
* ``event``: ``kind`` and ``fields`` of an event; ``sent``: ``event``, ``data``, ``sid`` of what a
  node package sends by itself, bytes as ``base64``;
* ``submit``: ``item`` that a node wants to be queued;
* ``done``: ``prompt_id``, ``result`` (a history entry without its prompt);
* ``answered``: ``id``, ``value`` or ``error``; ``health``: ``memory``.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from comfy_execution import events
from comfy_execution.wire import dump_json

Message = dict[str, Any]

EVENTS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        events.ExecutionStart,
        events.ExecutionCached,
        events.Executing,
        events.ProgressState,
        events.Progress,
        events.Executed,
        events.ExecutionSuccess,
        events.ExecutionError,
        events.ExecutionInterrupted,
        events.NodeFigures,
        events.Preview,
        events.ProgressText,
        events.CustomEvent,
    )
}
"""Those a worker may send; ``Status`` is not among them: the queue is the server's."""


@dataclasses.dataclass(frozen=True)
class PictureCodec:
    """Makes bytes of the picture of a preview, and a picture of bytes; whoever knows them gives it.

    Attributes:
        pack: Picture to bytes, without loss.
        unpack: Bytes to picture.
    """

    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]


def dump(message: Mapping[str, Any]) -> bytes:
    """The bytes of a message."""
    return dump_json(message).encode("utf-8", "surrogatepass")


def load(data: bytes) -> Message:
    """The message in bytes.

    Raises:
        ValueError: they hold none.
    """
    message = json.loads(data.decode("utf-8", "surrogatepass"))
    if not isinstance(message, dict):
        raise ValueError(f"a message is an object, got {type(message).__name__}")
    return message


def event_message(event: events.Event, codec: PictureCodec) -> Message:
    """The message that carries an event."""
    fields = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}  # type: ignore[arg-type]
    if isinstance(event, events.Preview):
        fields["image"] = pack_bytes(codec.pack(event.image))
    elif isinstance(event, events.ProgressState):
        fields["nodes"] = [dataclasses.asdict(node) for node in event.nodes]
    return {"say": "event", "kind": type(event).__name__, "fields": fields}


def event_from(message: Message, codec: PictureCodec) -> events.Event:
    """The event that a message carries.

    Raises:
        KeyError, TypeError: it carries none that is known here.
    """
    kind, fields = EVENTS[message["kind"]], dict(message["fields"])
    if kind is events.Preview:
        fields["image"] = codec.unpack(unpack_bytes(fields["image"]))
    elif kind is events.ProgressState:
        fields["nodes"] = tuple(events.NodeProgress(**node) for node in fields["nodes"])
    elif kind is events.ExecutionCached:
        fields["nodes"] = tuple(fields["nodes"])
    event: events.Event = kind(**fields)
    return event


def pack_bytes(data: bytes) -> str:
    """Bytes as text that JSON can carry."""
    return base64.b64encode(data).decode("ascii")


def unpack_bytes(text: str) -> bytes:
    """The bytes in such a text."""
    return base64.b64decode(text)
