"""Type unions by a text subclass, put on classes by a decorator, as some packs do it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from comfy.utils import ProgressBar


class Union(str):
    """Comma-joined types; differs from another when it is no part of it."""

    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        if "*" in (str(self), other):
            return False
        mine, theirs = set(self.split(",")), set(str(other).split(","))
        return not mine <= theirs

    __eq__ = str.__eq__
    __hash__ = str.__hash__


def unions(kind: type) -> type:
    """Replaces class methods by plain functions, which then hang on the class unbound."""
    declare: Callable[[], dict[str, Any]] = kind.INPUT_TYPES  # type: ignore[attr-defined]

    def input_types() -> dict[str, Any]:
        sections = declare()
        for section in ("required", "optional"):
            for name, entry in sections.get(section, {}).items():
                sections[section][name] = (Union(entry[0]), *entry[1:])
        return sections

    def validate(input_types: dict[str, Any]) -> bool | str:
        declared = kind.INPUT_TYPES()["required"]  # type: ignore[attr-defined]
        for name, received in input_types.items():
            if Union(received) != declared[name][0]:
                return f"{name} cannot be {received}"
        return True

    kind.INPUT_TYPES = input_types  # type: ignore[attr-defined]
    kind.VALIDATE_INPUTS = validate  # type: ignore[attr-defined]
    kind.RETURN_TYPES = tuple(map(Union, kind.RETURN_TYPES))  # type: ignore[attr-defined]
    return kind


@unions
class Scale:
    """A picture or number times another; an output node that shows nothing."""

    RETURN_TYPES = ("IMAGE,FLOAT",)
    FUNCTION = "scale"
    OUTPUT_NODE = True
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        both = ("IMAGE,FLOAT",)
        return {"required": {"a": both, "b": ("IMAGE,FLOAT", {"default": 1.0})}}

    def scale(self, a: Any, b: Any) -> tuple[Any]:
        return (a * b,)


class Doze:
    """Async, and reports the seconds gone by through a bar that names its node."""

    RETURN_TYPES = ("*",)
    FUNCTION = "doze"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"value": ("*",), "seconds": ("FLOAT", {"default": 0.05, "step": 0.01})},
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    @classmethod
    def IS_CHANGED(cls, seconds: float = 0.0, *args: Any, **kwargs: Any) -> bool:
        return False

    async def doze(self, value: Any, seconds: float, unique_id: str) -> tuple[Any]:
        progress = ProgressBar(seconds, node_id=unique_id)
        begin = time.monotonic()
        while (gone := time.monotonic() - begin) < seconds:
            progress.update_absolute(gone)
            await asyncio.sleep(0.01)
        return (value,)


NODES = (Scale, Doze)
