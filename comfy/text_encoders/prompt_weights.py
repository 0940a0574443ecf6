r"""Reads weights from a prompt: ``(x)`` multiplies by 1.1, ``(x:1.3)`` sets 1.3, ``\(`` and ``\)``
are literal.

An explicit weight replaces the surrounding one; bare parentheses multiply it. Nothing else has a
meaning.
"""

from __future__ import annotations

import math

EMPHASIS = 1.1
# Stand-ins for escaped parentheses while a prompt is taken apart; control characters nobody types.
_OPEN, _CLOSE = "\0\2", "\0\1"


def escape_important(text: str) -> str:
    """Put stand-ins for escaped parentheses."""
    return text.replace("\\)", _CLOSE).replace("\\(", _OPEN)


def unescape_important(text: str) -> str:
    """Turn the stand-ins back into plain parentheses."""
    return text.replace(_CLOSE, ")").replace(_OPEN, "(")


def parse_parentheses(string: str) -> list[str]:
    """Cut text at its outermost parentheses; these stay on the pieces they enclose.

    An unclosed group is a piece that starts with its "(".
    """
    pieces: list[str] = []
    start = depth = 0
    for position, character in enumerate(string):
        if character == "(":
            if depth == 0:
                pieces.append(string[start:position])
                start = position
            depth += 1
        elif character == ")" and depth > 0:
            depth -= 1
            if depth == 0:
                pieces.append(string[start : position + 1])
                start = position + 1
    pieces.append(string[start:])
    return [piece for piece in pieces if piece]


def token_weights(string: str, current_weight: float) -> list[tuple[str, float]]:
    """Cut text (with escapes replaced) into pieces of one weight each, in order.

    Args:
        string: Text as `escape_important` leaves it.
        current_weight: Weight of whatever no parentheses enclose.
    """
    # An explicit stack instead of recursion: nesting is as deep as whoever typed it wanted.
    result: list[tuple[str, float]] = []
    stack = [(piece, current_weight) for piece in reversed(parse_parentheses(string))]
    while stack:
        piece, weight = stack.pop()
        if not (len(piece) >= 2 and piece[0] == "(" and piece[-1] == ")"):
            result.append((piece, weight))
            continue
        inner, weight = _inner_weight(piece[1:-1], weight)
        stack.extend((part, weight) for part in reversed(parse_parentheses(inner)))
    return result


def _inner_weight(inner: str, outer_weight: float) -> tuple[str, float]:
    """What a group holds and the weight it gives: a number after its last colon, else emphasis."""
    colon = inner.rfind(":")
    if colon > 0:
        try:
            weight = float(inner[colon + 1 :])
        except ValueError:
            weight = math.nan  # a colon in the text, not a weight
        if math.isfinite(weight):  # neither "nan" nor "inf": they would leave no picture
            return inner[:colon], weight
    return inner, outer_weight * EMPHASIS


def parse_prompt(text: str) -> list[tuple[str, float]]:
    """Pieces of a prompt and their weights, escapes resolved."""
    pieces = token_weights(escape_important(text), 1.0)
    return [(unescape_important(piece), weight) for piece, weight in pieces]
