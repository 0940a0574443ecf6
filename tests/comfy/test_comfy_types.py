"""The type names and base classes that classic nodes use."""

from __future__ import annotations

import json

import pytest

from comfy.comfy_types import IO, CheckLazyMixin, ComfyNodeABC
from comfy.comfy_types.node_typing import IO as SAME_IO


def test_type_names_are_plain_strings_in_json_and_texts() -> None:
    assert json.dumps([IO.STRING, IO.NUMBER]) == '["STRING", "FLOAT,INT"]'
    assert f"{IO.ANY}" == "*"
    assert IO.IMAGE == "IMAGE"
    assert {"IMAGE": 1}[IO.IMAGE] == 1
    assert SAME_IO is IO


@pytest.mark.parametrize(
    ("left", "right", "differ"),
    [
        (IO.ANY, "MODEL", False),
        (IO.MODEL, "*", False),
        (IO.NUMBER, "INT", False),
        (IO.INT, "FLOAT,INT", False),
        (IO.INT, "FLOAT", True),
        (IO.NUMBER, "INT,STRING", True),
        (IO.INT, 3, True),
    ],
)
def test_types_differ_as_sockets_do(left: IO, right: object, differ: bool) -> None:
    assert (left != right) is differ


def test_packages_can_add_names_to_the_enumeration() -> None:
    IO.DATETIME = "DATETIME"  # type: ignore[attr-defined]
    try:
        assert IO.DATETIME == "DATETIME"  # type: ignore[attr-defined]
    finally:
        del IO.DATETIME  # type: ignore[attr-defined]


def test_a_node_without_input_types_cannot_be_made() -> None:
    class Empty(ComfyNodeABC):
        FUNCTION = "go"

    with pytest.raises(TypeError, match="INPUT_TYPES"):
        Empty()  # type: ignore[abstract]


def test_the_lazy_mixin_wants_every_input_that_is_missing() -> None:
    assert CheckLazyMixin().check_lazy_status(a=None, b=1, c=None) == ["a", "c"]
