"""Tells files by keys that only their kind has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Marks = Sequence[tuple[tuple[str, ...], str]]


def first_match(
    marks: Marks, state_dict: Mapping[str, Any], prefixes: Sequence[str] = ("",)
) -> str | None:
    """The name beside the first keys of a table that a file has, all below one prefix; or None."""
    for keys, name in marks:
        for prefix in prefixes:
            if all(prefix + key in state_dict for key in keys):
                return name
    return None


def cannot_run(name: str) -> str:
    """What is said of a file whose kind is known and whose network is not built in."""
    return f"recognised as {name}, which this version cannot run yet"
