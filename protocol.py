"""Numbers of the binary WebSocket frames, shared by the server and by code that sends them."""

from __future__ import annotations

import enum


class BinaryEventTypes(enum.IntEnum):
    """First 32-bit big-endian integer of a binary frame."""

    PREVIEW_IMAGE = 1
    UNENCODED_PREVIEW_IMAGE = 2  # never on the wire: the server encodes it as 1 or 4
    TEXT = 3
    PREVIEW_IMAGE_WITH_METADATA = 4


class PreviewImageFormat(enum.IntEnum):
    """Second integer of a PREVIEW_IMAGE frame."""

    JPEG = 1
    PNG = 2
