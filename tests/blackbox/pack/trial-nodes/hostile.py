"""Nodes that misbehave."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from typing import Any

import comfy.model_management

INT = ("INT", {"default": 0})


class WorseThanException(BaseException):
    """Not caught by `except Exception`."""


def _recurse(depth: int) -> int:
    return _recurse(depth + 1) + 1


KINDS = {
    "ValueError": lambda: _throw(ValueError("bad value")),
    "SystemExit": lambda: _throw(SystemExit(3)),
    "KeyboardInterrupt": lambda: _throw(KeyboardInterrupt()),
    "RecursionError": lambda: _recurse(0),
    "MemoryError": lambda: bytearray(1 << 60),
    "WorseThanException": lambda: _throw(WorseThanException("worse")),
    "StopIteration": lambda: next(iter(())),
    "GeneratorExit": lambda: _throw(GeneratorExit()),
    "CancelledError": lambda: _cancelled(),
    "Unprintable": lambda: _throw(Unprintable()),
}


class Unprintable(Exception):
    """Its text fails too."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def _throw(error: BaseException) -> None:
    raise error


def _cancelled() -> None:
    from asyncio import CancelledError

    raise CancelledError


class Raise:
    """Raises whatever it is told to."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "run"
    CATEGORY = "trial/hostile"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": INT, "kind": (list(KINDS),)}}

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        return float("nan")

    def run(self, value: int, kind: str) -> tuple[int]:
        KINDS[kind]()
        return (value,)


class RaiseAsync(Raise):
    """The same after an await."""

    async def run(self, value: int, kind: str) -> tuple[int]:
        import asyncio

        await asyncio.sleep(0.01)
        KINDS[kind]()
        return (value,)


class Abort(Raise):
    """Dies as native code does."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": INT}}

    def run(self, value: int) -> tuple[int]:
        os.abort()


class Busy(Raise):
    """Pure Python work that never looks whether it is to stop."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": INT, "seconds": ("FLOAT", {"default": 30.0})}}

    def run(self, value: int, seconds: float) -> tuple[int]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(100))
        return (value,)


class Native(Busy):
    """Native code that runs on whatever is asked of it."""

    def run(self, value: int, seconds: float) -> tuple[int]:
        ctypes.CDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))
        return (value,)


class Stubborn(Busy):
    """Pure Python work that swallows every Exception."""

    def run(self, value: int, seconds: float) -> tuple[int]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(Exception):
                while time.monotonic() < end:
                    sum(range(100))
        return (value,)


class Polite(Busy):
    """Work that asks whether it is to stop."""

    def run(self, value: int, seconds: float) -> tuple[int]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            comfy.model_management.throw_exception_if_processing_interrupted()
            time.sleep(0.005)
        return (value,)


class Held(Raise):
    """Work that lasts until a file is there, and that asks whether it is to stop."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": INT, "path": ("STRING",)}}

    def run(self, value: int, path: str) -> tuple[int]:
        while not os.path.exists(path):
            comfy.model_management.throw_exception_if_processing_interrupted()
            time.sleep(0.005)
        return (value,)


class Mark(Raise):
    """Leaves a line in a file each time it runs, waits, and hands the number on."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "value": INT,
                "path": ("STRING",),
                "seconds": ("FLOAT", {"default": 0.0, "min": 0.0, "max": 60.0}),
            }
        }

    def run(self, value: int, path: str, seconds: float) -> tuple[int]:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{value}\n")
        time.sleep(seconds)
        return (value,)


ODD_RESULTS = {
    "none": None,
    "number": 5,
    "short": (),
    "nan in ui": {"ui": {"value": [float("nan")]}, "result": (1,)},
    "infinity in ui": {"ui": {"value": [[float("inf")]]}, "result": (1,)},
    "object in ui": {"ui": {"value": [object()]}, "result": (1,)},
    "ui without list": {"ui": {"value": "text"}, "result": (1,)},
    "not a list": (5,),
}


class Odd:
    """Returns what no node should."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "run"
    CATEGORY = "trial/hostile"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"kind": (list(ODD_RESULTS),)}}

    def run(self, kind: str) -> Any:
        return ODD_RESULTS[kind]


class OddList(Odd):
    """The same, with an output that is declared as a list."""

    OUTPUT_IS_LIST = (True,)


NODES = (Raise, RaiseAsync, Abort, Busy, Native, Stubborn, Polite, Held, Mark, Odd, OddList)
