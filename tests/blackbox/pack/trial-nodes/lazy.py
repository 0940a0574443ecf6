"""Nodes that ask for their inputs when they know which they need."""

from __future__ import annotations

from typing import Any

import torch

LAZY_IMAGE = ("IMAGE", {"lazy": True})
LAZY_ANY = ("*", {"lazy": True})


class Blend:
    """first * (1 - mask) + second * mask; a picture that the mask hides is not asked for."""

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "blend"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"first": LAZY_IMAGE, "second": LAZY_IMAGE, "mask": ("MASK",)}}

    def check_lazy_status(self, mask: Any, first: Any, second: Any) -> list[str]:
        wanted = []
        if first is None and float(mask.min()) < 1:
            wanted.append("first")
        if second is None and float(mask.max()) > 0:
            wanted.append("second")
        return wanted

    def blend(self, mask: Any, first: Any = None, second: Any = None) -> tuple[Any]:
        weight = mask[..., None]
        given = first if first is not None else second
        first = torch.zeros_like(given) if first is None else first
        second = torch.zeros_like(given) if second is None else second
        return (first * (1 - weight) + second * weight,)


class Either:
    """One of two values of any kind; the other is never made."""

    RETURN_TYPES = ("*",)
    FUNCTION = "choose"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"condition": ("BOOLEAN",), "if_true": LAZY_ANY, "if_false": LAZY_ANY},
        }

    def check_lazy_status(self, condition: bool, if_true: Any, if_false: Any) -> list[str]:
        name, value = ("if_true", if_true) if condition else ("if_false", if_false)
        return [name] if value is None else []

    def choose(self, condition: bool, if_true: Any = None, if_false: Any = None) -> tuple[Any]:
        return (if_true if condition else if_false,)


class FirstPositive:
    """Asks for one number after the other until one is positive."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "find"
    CATEGORY = "trial"
    NAMES = ("a", "b", "c")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"optional": {name: ("INT", {"lazy": True}) for name in cls.NAMES}}

    def check_lazy_status(self, **numbers: Any) -> list[str]:
        for name in self.NAMES:
            if name in numbers and numbers[name] is None:
                return [name]
            if numbers.get(name, 0) > 0:
                return []
        return []

    def find(self, **numbers: Any) -> tuple[int]:
        return (next((n for n in map(numbers.get, self.NAMES) if n is not None and n > 0), -1),)


class WantsTooMuch:
    """Asks for an input that it does not have."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "run"
    CATEGORY = "trial"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"a": ("INT", {"lazy": True})}}

    def check_lazy_status(self, a: Any) -> list[str]:
        return ["no_such_input"]

    def run(self, a: Any) -> tuple[Any]:
        return (a,)


NODES = (Blend, Either, FirstPositive, WantsTooMuch)
