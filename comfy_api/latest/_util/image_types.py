"""Vector pictures."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO


class SVG:
    """One or more vector pictures, each as a stream of SVG text."""

    def __init__(self, data: list[BytesIO]) -> None:
        if not all(isinstance(item, BytesIO) for item in data):
            kinds = sorted({type(item).__name__ for item in data})
            raise TypeError(f"SVG holds {kinds}; expected a list of BytesIO")
        self.data = data

    def combine(self, other: SVG) -> SVG:
        """The pictures of both."""
        return SVG(self.data + other.data)

    @staticmethod
    def combine_all(svgs: Sequence[SVG]) -> SVG:
        """The pictures of all."""
        return SVG([item for svg in svgs for item in svg.data])
