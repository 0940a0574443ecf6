"""What conditioning carries beside its text, told from what only has its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BOX_PARTS = 5  # of a box of GLIGEN: its text, height, width, y and x

# Custom nodes may have classes of their own: what is asked is what the run will use.


def _is_control(value: Any) -> bool:
    """Whether a control network and all before it in its chain are such."""
    seen: set[int] = set()
    while value is not None and id(value) not in seen:
        if not hasattr(value, "get_control"):
            return False
        seen.add(id(value))
        value = getattr(value, "previous_controlnet", None)
    return True


def is_gligen(value: Any) -> bool:
    """Whether a value is (kind, patcher of a GLIGEN network, boxes); other kinds have no boxes."""
    if not isinstance(value, (tuple, list)) or len(value) < 3:
        return False
    kind, network, boxes = value[:3]
    if not hasattr(network, "model") or not hasattr(network, "load_device"):
        return False
    return kind != "position" or (
        isinstance(boxes, (tuple, list))
        and all(isinstance(box, (tuple, list)) and len(box) == BOX_PARTS for box in boxes)
    )


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "control": ("a control network, alone or after others", _is_control),
    "gligen": ("a GLIGEN network with its boxes", is_gligen),
    "hooks": ("a group of hooks", lambda value: hasattr(value, "hooks")),
    "mask": ("a mask [batch, height, width]", lambda value: hasattr(value, "ndim")),
}


def check_options(entry: dict[str, Any]) -> None:
    """Refuse what a custom node put under the name of something else; None counts as left out.

    Raises:
        TypeError: An option that the run itself looks into is not of its kind.
    """
    for option, (kind, fits) in KINDS.items():
        value = entry.get(option)
        if value is None:
            entry.pop(option, None)
        elif not fits(value):
            raise TypeError(
                f"conditioning: expected {kind} as its option {option!r}, found "
                f"{str(value)[:100]!r} ({type(value).__name__}); a node before this one put it "
                "there"
            )
