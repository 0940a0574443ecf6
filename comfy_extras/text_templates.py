"""Texts with places for values, written as for Python's `str.format`.

Two things are kept from a template that somebody else may have written: names that begin with an
underscore, by which any object leads to all of Python, and widths that would fill the memory.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from comfy_execution.text_limit import require_text_fits

CANNOT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template that makes no sense ends in."""


class _Formatter(string.Formatter):
    """Python's rules, without what is hidden and without what is too long."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if re.search(r"\._|\[_", field_name):
            raise ValueError(f"{{{field_name}}} asks for a hidden part of a value")
        return super().get_field(field_name, args, kwargs)

    def get_value(
        self,
        key: int | str,
        args: Sequence[Any],  # noqa: ARG002 - there are none
        kwargs: Mapping[str, Any],
    ) -> Any:
        if key not in kwargs:
            raise ValueError(f"there is no value {{{key}}}")
        return kwargs[str(key)]

    def format_field(self, value: Any, format_spec: str) -> Any:
        for digits in re.findall(r"\d+", format_spec):
            require_text_fits(int(digits[:20]))
        return super().format_field(value, format_spec)


def filled(template: str, values: Mapping[str, Any]) -> str:
    """The template with the values in their places.

    Args:
        template: `{name}` stands for a value, `{name:.3f}` for a value in a form, `{{` for a brace.

    Raises:
        ValueError: It cannot be filled; the message says why and which values there are.
    """
    try:
        return _Formatter().vformat(template, (), values)
    except CANNOT as error:
        known = ", ".join(f"{{{name}}}" for name in values) or "none"
        raise ValueError(
            f"f_string {template[:200]!r} cannot be filled: {error}; its values are {known}, and "
            "braces that stand for themselves are written twice"
        ) from error
