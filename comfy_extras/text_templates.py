"""Texts with places for values, written as for Python's `str.format`.

Kept from a template that somebody else may have written are names that begin with an underscore and
parts of modules or running code, by which a value leads to all of Python and to the environment,
and lengths that would fill the memory.
"""

from __future__ import annotations

import re
import string
from _string import formatter_field_name_split  # type: ignore[import-not-found]
from collections.abc import Mapping, Sequence
from types import AsyncGeneratorType, CoroutineType, GeneratorType, ModuleType
from typing import Any

from comfy_execution.text_limit import require_text_fits

CANNOT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template that makes no sense ends in."""


CLOSED = (ModuleType, GeneratorType, CoroutineType, AsyncGeneratorType)
"""Values that lead to modules and frames by names without an underscore."""


class _Formatter(string.Formatter):
    """Python's rules, without what is hidden and without what is too long."""

    def __init__(self) -> None:
        self.characters = 0  # of all values so far

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        first, steps = formatter_field_name_split(field_name)
        value = self.get_value(first, args, kwargs)
        for is_attribute, name in steps:
            if str(name).startswith("_") or isinstance(value, CLOSED):
                raise ValueError(f"{{{field_name}}} asks for a hidden part of a value")
            value = getattr(value, name) if is_attribute else value[name]
        return value, first

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
        made = super().format_field(value, format_spec)
        self.characters += len(made)
        require_text_fits(self.characters)
        return made


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
