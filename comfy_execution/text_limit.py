"""How much text nodes may make, so that a chain that doubles one cannot take all memory.

A picture too large is refused by its size before it is made; a text grows by a node at a time. One
text has a limit, and all that a prompt's nodes return together have `PER_PROMPT` times as much.
Nodes whose result is a multiple of their inputs ask before they make it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MIB = 1024 * 1024
DEFAULT_CHARACTERS = 64 * MIB
PER_PROMPT = 8
DEPTH = 3  # of lists in lists


class TextTooLongError(ValueError):
    """A text beyond what nodes may return; the message says how long it is and what helps."""


class _Installed:
    """The one place that holds the limit in force; main installs another."""

    characters = DEFAULT_CHARACTERS


def install_text_limit(characters: int) -> None:
    """Bounds the length of a text that a node may return; 0 bounds nothing."""
    _Installed.characters = characters


def text_limit() -> int:
    """The limit in force, in characters; 0 bounds nothing."""
    return _Installed.characters


def require_text_fits(characters: int) -> None:
    """Refuses a text of this length, made or to be made.

    Raises:
        TextTooLongError: It is longer than the limit in force.
    """
    if 0 < _Installed.characters < characters:
        raise TextTooLongError(
            f"the text would have {characters:,} characters and at most {_Installed.characters:,} "
            "are accepted; look for a chain of nodes that doubles it, or start the server with a "
            "larger --max-text-size"
        )


class TextBudget:
    """What the nodes of one prompt may still return as text."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self, outputs: Iterable[Iterable[Any]]) -> None:
        """Counts the texts among a node's results, also those in lists.

        Raises:
            TextTooLongError: One is too long, or all of the prompt together are.
        """
        most = _Installed.characters
        if most <= 0:
            return
        for values in outputs:
            for value in values:
                self._taken += _length(value)
        if self._taken > most * PER_PROMPT:
            raise TextTooLongError(
                f"the nodes of this prompt have made {self._taken:,} characters of text and at "
                f"most {most * PER_PROMPT:,} are accepted; look for a loop or a chain of nodes "
                "that makes ever more, or start the server with a larger --max-text-size"
            )


def _length(value: Any, depth: int = 0) -> int:
    """Characters of a text, or of those in a list that begins with one.

    Raises:
        TextTooLongError: A single one is too long.
    """
    if isinstance(value, str):
        require_text_fits(len(value))
        return len(value)
    is_list = type(value) in (list, tuple) and len(value) > 0 and depth < DEPTH
    if is_list and isinstance(value[0], (str, list, tuple)):
        return sum(_length(item, depth + 1) for item in value)
    return 0
