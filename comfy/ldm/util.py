"""Small helpers that custom nodes import from here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def exists(x: Any) -> bool:
    """Whether x is not None."""
    return x is not None


def default(val: Any, d: Any | Callable[[], Any]) -> Any:
    """``val``, or where it is None the default d (called if it is a function)."""
    if val is not None:
        return val
    return d() if callable(d) and not isinstance(d, type) else d
