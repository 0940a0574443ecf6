"""What the hook nodes share."""

from __future__ import annotations


class HookNode:
    """Base of the nodes here."""

    EXPERIMENTAL = True
    FUNCTION = "run"


def percent(default: float) -> tuple[str, dict[str, float]]:
    """Declaration of a part of the sampling."""
    return "FLOAT", {"default": default, "min": 0.0, "max": 1.0, "step": 0.001}


STRENGTH = {"default": 1.0, "min": -20.0, "max": 20.0, "step": 0.01}
HOOKS = {"hooks": ("HOOKS",)}
