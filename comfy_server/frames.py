"""Bytes and text of WebSocket frames: pure functions, safe to run in any thread.

All integers are unsigned 32-bit big-endian; the first one of a binary frame is the event.
"""

from __future__ import annotations

import io
import struct
from typing import Any

from PIL import Image, ImageOps

from comfy_server.strict_json import dumps
from protocol import BinaryEventTypes, PreviewImageFormat

PREVIEW_QUALITY = 95  # JPEG; what clients have been getting
MAX_PREVIEW_PIXELS = 64 * 1024 * 1024


def text_frame(kind: str, data: Any) -> str:
    """The frame every client understands."""
    return dumps({"type": kind, "data": data})


def with_sequence(frame: str, sequence: int) -> str:
    """The same frame with its number, for clients that asked for numbers."""
    return f'{frame[:-1]},"seq":{sequence}}}'


def wire_form(payload: bytes, is_text: bool) -> bytes:
    """A whole unfragmented, uncompressed, unmasked WebSocket frame (RFC 6455, section 5.2)."""
    first = 0x81 if is_text else 0x82
    size = len(payload)
    if size < 126:
        return struct.pack(">BB", first, size) + payload
    if size < 65536:
        return struct.pack(">BBH", first, 126, size) + payload
    return struct.pack(">BBQ", first, 127, size) + payload


def raw_binary(event: int, data: bytes) -> bytes:
    """Event number, then the bytes as they are."""
    return struct.pack(">I", event) + data


def progress_text(node_id: str, text: str) -> bytes:
    """Event 3: length-prefixed node id, then text."""
    encoded_id = node_id.encode("utf-8", "replace")
    head = struct.pack(">II", BinaryEventTypes.TEXT, len(encoded_id))
    return head + encoded_id + text.encode("utf-8", "replace")


def fit(image: Any, max_size: int | None) -> Any:
    """Fits a PIL image into a square of `max_size` pixels; one that is fitted already stays.

    Raises:
        ValueError: the image has more pixels than a preview may have.
    """
    if image.width * image.height > MAX_PREVIEW_PIXELS:
        raise ValueError(f"a preview of {image.width} x {image.height} pixels is too large")
    if max_size is None:
        return image
    return ImageOps.contain(image, (max_size, max_size), Image.Resampling.BILINEAR)


def encode_image(image_format: str, image: Any, max_size: int | None) -> tuple[bytes, str]:
    """Fits a PIL image into a square of `max_size` pixels and encodes it.

    Args:
        image_format: "PNG", or anything else for JPEG.
        image: PIL image; it is not modified.
        max_size: Side of the square, aspect kept; None keeps the size.
    Returns:
        The encoded bytes and their mime type.
    Raises:
        ValueError: the image has more pixels than a preview may have.
    """
    image = fit(image, max_size)
    buffer = io.BytesIO()
    if image_format.upper() == "PNG":
        image.save(buffer, format="PNG", compress_level=1)
        return buffer.getvalue(), "image/png"
    if image.mode not in ("RGB", "L"):
        image = image.convert("RGB")
    image.save(buffer, format="JPEG", quality=PREVIEW_QUALITY)
    return buffer.getvalue(), "image/jpeg"


def preview(image_format: str, image: Any, max_size: int | None) -> bytes:
    """Event 1: image format, image bytes."""
    encoded, mime = encode_image(image_format, image, max_size)
    number = PreviewImageFormat.PNG if mime == "image/png" else PreviewImageFormat.JPEG
    return struct.pack(">II", BinaryEventTypes.PREVIEW_IMAGE, number) + encoded


def preview_with_metadata(
    image_format: str, image: Any, max_size: int | None, metadata: dict[str, Any]
) -> bytes:
    """Event 4: length-prefixed JSON metadata (with `image_type` added), image bytes."""
    encoded, mime = encode_image(image_format, image, max_size)
    record = dumps({**metadata, "image_type": mime}).encode("ascii")
    event = BinaryEventTypes.PREVIEW_IMAGE_WITH_METADATA
    return struct.pack(">II", event, len(record)) + record + encoded
