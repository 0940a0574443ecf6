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


def whole_characters(text: str) -> str:
    """Text whose halves of surrogate pairs are joined, or replaced where the other half is missing:
    word-piece tokenizers take none.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def escape_important(text: str) -> str:
    """Put stand-ins for escaped parentheses."""
    return text.replace("\\)", _CLOSE).replace("\\(", _OPEN)


def unescape_important(text: str) -> str:
    """Turn the stand-ins back into plain parentheses."""
    return text.replace(_CLOSE, ")").replace(_OPEN, "(")


def parse_parentheses(string: str) -> list[str]:
    """Cut text at its outermost parentheses; these stay on the pieces they enclose.

    An unclosed group is a piece that starts with its "(". A ")" that closes nothing, as in a smile,
    takes the next "(" of its level with it, which then opens nothing: pictures depend on it.
    """
    pieces: list[str] = []
    start = depth = 0
    for position, character in enumerate(string):
        if character == "(":
            if depth == 0:
                pieces.append(string[start:position])
                start = position
            depth += 1
        elif character == ")":
            depth -= 1
            if depth == 0:
                pieces.append(string[start : position + 1])
                start = position + 1
    pieces.append(string[start:])
    return [piece for piece in pieces if piece]


class _Text:
    """A prompt with the places of its signs, so that each is looked for only once.

    Attributes:
        text: The prompt, escapes replaced.
        closing: Place of each "(" that is closed -> place of its ")".
        plain: Places of "(" that open nothing, because more had been closed than opened.
        colon, bracket: Last ":", and last "(" or ")", before each place; -1 if there is none.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.closing: dict[int, int] = {}
        self.plain: set[int] = set()
        surplus = 0
        self.colon, self.bracket = [-1], [-1]
        opened: list[int] = []
        colon = bracket = -1
        for place, character in enumerate(text):
            if character == ":":
                colon = place
            elif character == "(":
                if surplus:
                    surplus -= 1
                    self.plain.add(place)
                else:
                    opened.append(place)
                bracket = place
            elif character == ")":
                bracket = place
                if opened:
                    self.closing[opened.pop()] = place
                else:
                    surplus += 1
            self.colon.append(colon)
            self.bracket.append(bracket)

    def pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """`parse_parentheses` of a part, as places."""
        found: list[tuple[int, int]] = []
        while start < end:
            opening = self.text.find("(", start, end)
            while opening in self.plain:
                opening = self.text.find("(", opening + 1, end)
            if opening < 0:
                opening = end
            if opening > start:
                found.append((start, opening))
            closing = self.closing.get(opening, end)
            start = min(closing + 1, end)
            if opening < end:
                found.append((opening, start))
        return found

    def inner_weight(self, start: int, end: int, outer: float) -> tuple[int, float]:
        """Where the text of a group ends and its weight: a number after its last colon, or else
        the outer weight with emphasis."""
        colon = self.colon[end]
        if colon > start and self.bracket[end] < colon:
            try:
                weight = float(self.text[colon + 1 : end])
            except ValueError:
                weight = math.nan  # a colon in the text, not a weight
            if math.isfinite(weight):  # neither "nan" nor "inf": they would leave no picture
                return colon, weight
        return end, outer * EMPHASIS


def token_weights(string: str, current_weight: float) -> list[tuple[str, float]]:
    """Cut text (with escapes replaced) into pieces of one weight each, in order.

    Takes time in proportion to the text, however deep its parentheses are.

    Args:
        string: Text as `escape_important` leaves it.
        current_weight: Weight of whatever no parentheses enclose.
    """
    if "(" not in string:
        return [(string, current_weight)] if string else []
    text = _Text(string)
    # An explicit stack instead of recursion: nesting is as deep as whoever typed it wanted.
    result: list[tuple[str, float]] = []
    stack = [(*piece, current_weight) for piece in reversed(text.pieces(0, len(string)))]
    while stack:
        start, end, weight = stack.pop()
        if not (end - start >= 2 and string[start] == "(" and string[end - 1] == ")"):
            result.append((string[start:end], weight))
            continue
        inner_end, weight = text.inner_weight(start + 1, end - 1, weight)
        parts = text.pieces(start + 1, inner_end)
        stack.extend((*part, weight) for part in reversed(parts))
    return result


def parse_prompt(text: str) -> list[tuple[str, float]]:
    """Pieces of a prompt and their weights, escapes resolved."""
    pieces = token_weights(escape_important(text), 1.0)
    return [(unescape_important(piece), weight) for piece, weight in pieces]
