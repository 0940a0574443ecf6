"""Whether an output may be linked to an input."""

from __future__ import annotations

from typing import Any

ANY = "*"
MATCH_TYPE = "COMFY_MATCHTYPE_V3"
COMBO = "COMBO"


def accepts(received: Any, expected: Any) -> bool:
    """Whether values of one type may go into an input of another.

    Types are compared by ``!=`` on the very objects the classes offer: packages make wildcards
    from text whose ``!=`` is always false.

    Args:
        received: Type of the output: a name, several joined by commas, or a list of options.
        expected: Type of the input, in the same forms.
    """
    if not received != expected:  # noqa: SIM202 - the wildcards override only this comparison
        return True
    if isinstance(received, (list, tuple)) or isinstance(expected, (list, tuple)):
        others = [kind for kind in (received, expected) if isinstance(kind, str)]
        return any(kind in (COMBO, ANY) for kind in others)
    if not isinstance(received, str) or not isinstance(expected, str):
        return False
    if ANY in (received, expected) or MATCH_TYPE in (received, expected):
        return True
    return not _names(received).isdisjoint(_names(expected))


def _names(joined: str) -> set[str]:
    return {name.strip() for name in joined.split(",")}
