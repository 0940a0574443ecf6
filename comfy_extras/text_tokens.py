"""Tokens for one of several text encoders."""

from __future__ import annotations

from typing import Any


def tokens_for(clip: Any, text: str, encoder: str) -> Any:
    """The tokens of a text for one encoder of `clip`.

    Raises:
        ValueError: `clip` has no such encoder: it belongs to another model.
    """
    tokens = clip.tokenize(text)
    if encoder not in tokens:
        found = ", ".join(sorted(tokens))
        raise ValueError(
            f"clip: expected a text encoder {encoder!r}, found {found}; connect the text encoders "
            "of the model that this node is for"
        )
    return tokens[encoder]
