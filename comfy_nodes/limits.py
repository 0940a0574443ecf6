"""Limits that node inputs share."""

from __future__ import annotations

MAX_RESOLUTION = 16384
"""Largest side of a picture in pixels that an input accepts."""
