"""The server object of a worker process: what packs know, but whatever is sent goes to the server.

It listens nowhere. Nodes find it as `PromptServer.instance`; its queue holds the one prompt of the
worker, its routes are added by packs and never served.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from PIL import Image

from comfy_execution.events import Event, Preview, Status
from comfy_execution.workers.messages import Message, PictureCodec, event_message, pack_bytes
from comfy_server import frames
from comfy_server.logs import LogCapture
from comfy_server.options import ServerOptions
from comfy_server.prompt_server import PromptServer
from comfy_server.services import Services
from protocol import BinaryEventTypes

LOSSLESS = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "TIFF": ("CMYK", "YCbCr", "F", "I"),
}
"""Formats and the modes that they keep as they are."""

_EVENT_SIZE = 4  # bytes of the event's number at the start of a binary frame


def pack_picture(image: Any) -> bytes:
    """A PIL image without loss; the server scales and encodes it for those who see it."""
    kind = next((kind for kind, modes in LOSSLESS.items() if image.mode in modes), None)
    if kind is None:  # no other mode shows more than this
        kind, image = "PNG", image.convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, format=kind, compress_level=1)
    return buffer.getvalue()


def unpack_picture(data: bytes) -> Image.Image:
    """The PIL image in such bytes, decoded when it is first looked at."""
    return Image.open(io.BytesIO(data), formats=list(LOSSLESS))


def small(event: Preview, max_size: int) -> Preview:
    """The same preview of a picture that is no larger than what is shown of it."""
    if max(event.image.size) <= max_size:
        return event
    return replace(event, image=frames.fit(event.image, max_size))


PICTURES = PictureCodec(pack_picture, unpack_picture)


class RelayServer(PromptServer):
    """A `PromptServer` that hands everything on.

    Args:
        say: Sends a message to the server; callable from any thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: ServerOptions,
        services: Services,
        logs: LogCapture,
        say: Callable[[Message], None],
    ) -> None:
        self._say = say
        super().__init__(loop, options, services, logs)

    def _publish(self, event: Event) -> None:
        if isinstance(event, Status):
            return  # of the worker's own queue, which nobody else sees
        if isinstance(event, Preview) and event.max_size is not None:
            event = small(event, event.max_size)
        self._note(event)
        self._say(event_message(event, PICTURES))

    def send_progress_text(self, text: str | bytes, node_id: str, sid: str | None = None) -> None:
        """Shows a line of text under a node."""
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        frame = frames.progress_text(str(node_id), plain)
        self._say_bytes(BinaryEventTypes.TEXT, frame[_EVENT_SIZE:], sid)

    def _post_text(
        self,
        kind: str,
        data: Any,
        sid: str | None,
        key: object | None = None,  # noqa: ARG002 - frames are held back by the server
        is_last: bool = True,  # noqa: ARG002
    ) -> None:
        self._say({"say": "sent", "event": kind, "data": data, "sid": sid})

    def _post_binary(self, event: int, data: Any, sid: str | None) -> None:
        if event == BinaryEventTypes.UNENCODED_PREVIEW_IMAGE:
            frame = frames.preview(*data)
            self._say_bytes(BinaryEventTypes.PREVIEW_IMAGE, frame[_EVENT_SIZE:], sid)
        elif event == BinaryEventTypes.PREVIEW_IMAGE_WITH_METADATA and isinstance(data, tuple):
            (image_format, image, size), record = data
            frame = frames.preview_with_metadata(image_format, image, size, record)
            self._say_bytes(event, frame[_EVENT_SIZE:], sid)
        else:
            self._say_bytes(event, bytes(cast(bytes, data)), sid)

    def _say_bytes(self, event: int, data: bytes, sid: str | None) -> None:
        self._say({"say": "sent", "event": int(event), "base64": pack_bytes(data), "sid": sid})
