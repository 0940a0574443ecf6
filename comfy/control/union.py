"""Kinds of hint that a union network tells apart; each has a number in its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comfy.cldm.control_types import UNION_CONTROLNET_TYPES


def known_kinds(network: Any) -> int:
    """How many kinds a control network tells apart; 0 for a network of one kind."""
    return getattr(network, "union_kinds", 0)


def check_kinds(network: Any, numbers: Sequence[int]) -> None:
    """Refuse kinds that a union network was not trained for.

    Args:
        network: A control network; one of a single kind ignores the numbers.
        numbers: Of the kinds, 0 being the first.

    Raises:
        ValueError: A number is not below the count of the network's kinds.
    """
    count = known_kinds(network)
    names = {number: name for name, number in UNION_CONTROLNET_TYPES.items()}
    for number in numbers if count else ():
        if not 0 <= number < count:
            known = ", ".join(names.get(other, str(other)) for other in range(count))
            raise ValueError(
                f"type: this union ControlNet tells {count} kinds of hint apart ({known}), found "
                f"{names.get(number, number)}; choose one of these or load a network that knows it"
            )
