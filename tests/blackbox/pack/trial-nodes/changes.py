"""The forms of IS_CHANGED."""

from __future__ import annotations

from typing import Any

NUMBER = ("INT", {"default": 0})


class Stamp:
    """Hands a number on; runs again always if `always`, else only when an input changed."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "give"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": NUMBER, "always": ("BOOLEAN", {"default": False})}}

    @classmethod
    def IS_CHANGED(cls, value: int | None, always: bool) -> float | str:
        return float("nan") if always else "same"

    def give(self, value: int, always: bool = False) -> tuple[int]:
        return (value,)


class StampConstants(Stamp):
    """Tells by its error if the check is ever given the value of a link."""

    @classmethod
    def IS_CHANGED(cls, value: int | None, always: bool) -> str:
        if value is not None:
            raise AssertionError(f"the check saw {value!r}")
        return "same"


class StampAll(Stamp):
    """Gets everything by keyword, hidden values too."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {**super().INPUT_TYPES(), "hidden": {"own_id": "UNIQUE_ID", "all": "PROMPT"}}

    @classmethod
    def IS_CHANGED(cls, **given: Any) -> Any:
        if (
            set(given) != {"value", "always", "own_id", "all"}
            or given["own_id"] not in given["all"]
        ):
            raise AssertionError(sorted(given))
        return float("nan") if given["always"] else given["own_id"]

    def give(self, value: int, always: bool = False, **hidden: Any) -> tuple[int]:
        return (value,)


class StampStatic(Stamp):
    """A static method that counts: another answer each time."""

    asked = 0

    @staticmethod
    def IS_CHANGED(value: int | None, always: bool) -> int:
        StampStatic.asked += always
        return StampStatic.asked


class StampFailing(Stamp):
    """A check that fails: the node runs every time and the prompt succeeds."""

    @classmethod
    def IS_CHANGED(cls, **given: Any) -> Any:
        raise ValueError("no answer")


class StampAsync(Stamp):
    """A check that is a coroutine function."""

    @classmethod
    async def IS_CHANGED(cls, value: int | None, always: bool) -> float | str:
        return float("nan") if always else "same"


class Own(Stamp):
    """Shares its result with no other node."""

    NOT_IDEMPOTENT = True

    @classmethod
    def IS_CHANGED(cls, **given: Any) -> str:
        return "same"


NODES = (Stamp, StampConstants, StampAll, StampStatic, StampFailing, StampAsync, Own)
