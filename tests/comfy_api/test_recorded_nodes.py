"""Schema nodes are listed byte for byte as recorded from the reference server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from comfy_execution.node_info import node_info
from comfy_execution.spec import spec_from_class
from tests.comfy_api.rebuild import build_node

NOT_RECORDED = ("description", "output_tooltips", "api_node")  # texts were left out of the record


@pytest.fixture(scope="module")
def recorded(spec_folder: Path) -> dict[str, Any]:
    listing = json.loads((spec_folder / "object_info.json").read_text(encoding="utf-8"))
    return {name: info for name, info in listing.items() if "output_matchtypes" in info}


def test_every_recorded_schema_node_is_reproduced_byte_for_byte(recorded: dict[str, Any]) -> None:
    assert len(recorded) > 300
    different = {}
    for name, info in recorded.items():
        listed = node_info(spec_from_class(name, build_node(info)))
        for key in NOT_RECORDED:
            assert key in listed
            del listed[key]
        if json.dumps(listed) != json.dumps(info):
            different[name] = (listed, info)
    assert different == {}


def test_a_rebuilt_node_shows_the_classic_attributes(recorded: dict[str, Any]) -> None:
    info = recorded["ResizeImageMaskNode"]
    node = build_node(info)
    assert node.RETURN_TYPES == ("COMFY_MATCHTYPE_V3",)
    assert node.RETURN_NAMES == ("resized",)
    assert info["category"] == node.CATEGORY
    assert node.OUTPUT_NODE is False
    assert json.loads(json.dumps(node.INPUT_TYPES())) == info["input"]
