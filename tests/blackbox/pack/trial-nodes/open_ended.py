"""Nodes that take and give more than they can list, by the tricks packs use for it."""

from __future__ import annotations

import inspect
from typing import Any


class AnyType(str):
    """A type that differs from no other."""

    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return False

    __eq__ = str.__eq__
    __hash__ = str.__hash__


class AnyKey(dict):
    """A section of inputs that has every name."""

    def __init__(self, entry: Any) -> None:
        super().__init__()
        self.entry = entry

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, name: str) -> Any:
        return self.entry


class AnySlot(tuple):
    """Output types without end."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        return "INT"


class Sum:
    """The sum of any number of inputs of any name."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "add"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}, "optional": AnyKey(("INT", {}))}

    def add(self, **numbers: int) -> tuple[int]:
        return (sum(numbers.values()),)


class GraphWalkSum(Sum):
    """The same, for a class that shows its open end only to the walk along links."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        callers = [frame.function for frame in inspect.stack()[1:3]]
        is_walk = callers == ["get_input_info", "get_input_info"]
        return {"required": {}, "optional": AnyKey(("INT", {})) if is_walk else {}}


class Average:
    """The mean of any number of pictures; at least one is required."""

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "average"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"picture1": ("IMAGE",)}, "optional": AnyKey(("IMAGE",))}

    def average(self, **pictures: Any) -> tuple[Any]:
        given = list(pictures.values())
        return (sum(given) / len(given),)


class Switch:
    """Hands on the value with the chosen number, of any type; others are not made."""

    RETURN_TYPES = (AnyType("*"),)
    FUNCTION = "choose"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        choice = ("INT", {"default": 1, "min": 1, "max": 9})
        entry = (AnyType("*"), {"lazy": True})
        return {"required": {"choice": choice}, "optional": AnyKey(entry)}

    def check_lazy_status(self, choice: int, **values: Any) -> list[str]:
        name = f"value{choice}"
        return [name] if name in values and values[name] is None else []

    def choose(self, choice: int, **values: Any) -> tuple[Any]:
        return (values.get(f"value{choice}"),)


class Fan:
    """n, n + 1, ... on as many outputs as `count` says."""

    RETURN_TYPES = AnySlot()
    FUNCTION = "spread"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"start": ("INT",), "count": ("INT",)}}

    def spread(self, start: int, count: int) -> tuple[int, ...]:
        return tuple(range(start, start + count))


NODES = (Sum, GraphWalkSum, Average, Switch, Fan)
