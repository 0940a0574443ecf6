"""Attributes that are computed once."""

from __future__ import annotations

from comfy_execution.lazy import lazy


class Shape:
    """Counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    @lazy
    def area(self) -> int:
        """The area."""
        self.asked += 1
        return 12


class Square(Shape):
    """Computes it another way."""

    @lazy
    def area(self) -> int:
        return 16


def test_a_value_is_computed_when_first_read_and_kept_for_its_object() -> None:
    shape, other = Shape(), Shape()
    assert (shape.asked, shape.area, shape.area, shape.asked) == (0, 12, 12, 1)
    assert other.asked == 0
    assert Square().area == 16


def test_a_kept_value_can_be_replaced_and_the_class_shows_the_attribute() -> None:
    shape = Shape()
    shape.__dict__["area"] = 3
    assert shape.area == 3
    assert Shape.area.__doc__ == "The area."
