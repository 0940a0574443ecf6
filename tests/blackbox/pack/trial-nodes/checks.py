"""The forms of VALIDATE_INPUTS."""

from __future__ import annotations

from typing import Any

TO_TEN = ("INT", {"default": 0, "min": 0, "max": 10})
UP_TO_TEN = "must not be over ten"


class Checked:
    """Two numbers in 0..10 without a check of its own: the built-in one applies to both."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "add"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"a": TO_TEN, "b": TO_TEN}}

    def add(self, a: Any, b: Any) -> tuple[Any]:
        return (a + b,)


class CheckedOne(Checked):
    """Looks at `a` alone; the built-in check is left for `b`."""

    @classmethod
    def VALIDATE_INPUTS(cls, a: int | None) -> bool | str:
        return a != 99 or "99 is never allowed"


class CheckedTwo(Checked):
    """Looks at both together; links arrive as None."""

    @classmethod
    def VALIDATE_INPUTS(cls, a: int | None, b: int | None) -> bool | str:
        return a is None or b is None or a + b <= 10 or "the sum " + UP_TO_TEN


class CheckedTypes(Checked):
    """Decides about the types of links by itself: whole numbers and texts, not both."""

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: dict[str, str]) -> bool | str:
        kinds = set(input_types.values())
        if not kinds <= {"INT", "STRING"}:
            return f"cannot add {', '.join(sorted(kinds))}"
        return len(kinds) <= 1 or "both must be of one type"


class CheckedAll(Checked):
    """Takes whatever there is by keyword: no built-in check is left."""

    @classmethod
    def VALIDATE_INPUTS(cls, **given: Any) -> bool | str:
        return all(value is None or value < 1000 for value in given.values()) or "too big"


class CheckedTypesAndAll(Checked):
    """Takes types and values."""

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: dict[str, str], **given: Any) -> bool | str:
        if any(kind == "STRING" for kind in input_types.values()):
            return "no texts"
        return all(value is None or value < 1000 for value in given.values()) or "too big"


class CheckedFalse(Checked):
    """Refuses without a reason."""

    @classmethod
    def VALIDATE_INPUTS(cls, a: int | None) -> bool:
        return False


class CheckedRaising(Checked):
    """Fails while it checks."""

    @classmethod
    def VALIDATE_INPUTS(cls, a: int | None) -> bool:
        raise LookupError("the list of allowed numbers is gone")


class CheckedAsync(Checked):
    """A check that is a coroutine function."""

    @classmethod
    async def VALIDATE_INPUTS(cls, a: int | None) -> bool | str:
        return a is None or a <= 10 or UP_TO_TEN


NODES = (
    Checked, CheckedOne, CheckedTwo, CheckedTypes, CheckedAll, CheckedTypesAndAll, CheckedFalse,
    CheckedRaising, CheckedAsync,
)  # fmt: skip
