"""Lists in, lists out, and values that block."""

from __future__ import annotations

from typing import Any

from comfy_execution.graph import ExecutionBlocker


class Range:
    """0, 1, ... as a list whose items are handed on one by one."""

    RETURN_TYPES = ("INT",)
    OUTPUT_IS_LIST = (True,)
    FUNCTION = "count"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"count": ("INT", {"default": 3, "min": 0})}}

    def count(self, count: int) -> tuple[list[int]]:
        return (list(range(count)),)


class Spread:
    """A list and its length: only the first output is a list."""

    RETURN_TYPES = ("INT", "INT")
    OUTPUT_IS_LIST = (True, False)
    FUNCTION = "spread"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"count": ("INT", {"min": 0})}}

    def spread(self, count: int) -> tuple[list[int], int]:
        return list(range(count)), count


class Join:
    """Gets whole lists, single values too, and makes one text of them."""

    RETURN_TYPES = ("STRING",)
    INPUT_IS_LIST = True
    FUNCTION = "join"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"values": ("*",), "separator": ("STRING", {"default": ","})}}

    def join(self, values: list[Any], separator: list[str]) -> tuple[str]:
        return (separator[0].join(map(str, values)),)


class Reverse:
    """List in, list out."""

    RETURN_TYPES = ("*",)
    INPUT_IS_LIST = True
    OUTPUT_IS_LIST = (True,)
    FUNCTION = "reverse"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"values": ("*",)}}

    def reverse(self, values: list[Any]) -> tuple[list[Any]]:
        return (values[::-1],)


class Gate:
    """Hands a value on while it is open; else blocks, with a message if there is one."""

    RETURN_TYPES = ("*",)
    FUNCTION = "pass_on"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"value": ("*",), "is_open": ("BOOLEAN",)},
            "optional": {"message": ("STRING", {"default": ""})},
        }

    def pass_on(self, value: Any, is_open: bool, message: str = "") -> tuple[Any]:
        return (value if is_open else ExecutionBlocker(message or None),)


class DropOdd:
    """Blocks odd numbers only, for lists."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "pass_on"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("INT",)}}

    def pass_on(self, value: int) -> Any:
        return (value,) if value % 2 == 0 else ExecutionBlocker(None)


NODES = (Range, Spread, Join, Reverse, Gate, DropOdd)
