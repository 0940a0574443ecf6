"""Nodes that took the place of others, in prompts and for the editor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from comfy_api.latest import ComfyAPI, io, replacements


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    before = dict(replacements.REPLACEMENTS)
    replacements.REPLACEMENTS.clear()
    yield
    replacements.REPLACEMENTS.clear()
    replacements.REPLACEMENTS.update(before)


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


RENAMED = io.NodeReplace(
    "New",
    "Old",
    old_widget_ids=["w"],
    input_mapping=[
        {"new_id": "width", "old_id": "w"},
        {"new_id": "image", "old_id": "picture"},
        {"new_id": "mode", "set_value": "exact"},
        {"new_id": "unset", "old_id": "never"},
    ],
    output_mapping=[{"new_idx": 1, "old_idx": 0}],
)


async def test_an_old_node_is_rewritten_with_the_links_to_it() -> None:
    await ComfyAPI().node_replacement.register(RENAMED)
    prompt = {
        "1": node("Known"),
        "2": node("Old", w=3, picture=["1", 0], other=1),
        "3": node("Known", a=["2", 0], b=["2", 5], c=["1", 0]),
    }
    assert replacements.replace_old_nodes(prompt, {"Known", "New"}.__contains__) == {
        "1": node("Known"),
        "2": node("New", width=3, image=["1", 0], mode="exact"),
        "3": node("Known", a=["2", 1], b=["2", 5], c=["1", 0]),
    }
    assert prompt["2"]["class_type"] == "Old"


async def test_nodes_that_exist_or_cannot_be_replaced_stay() -> None:
    await ComfyAPI().node_replacement.register(RENAMED)
    await ComfyAPI().node_replacement.register(io.NodeReplace("Newer", "Old"))
    prompt = {"1": node("Old", w=1), "2": "no node", "3": {"class_type": "Other"}}
    for known, expected in (({"Old"}, "Old"), (set(), "Old"), ({"Newer"}, "Newer")):
        rewritten = replacements.replace_old_nodes(prompt, known.__contains__)
        assert rewritten["1"] == node(expected, w=1)
        assert rewritten["2"] == "no node"


async def test_the_editor_gets_every_replacement() -> None:
    await ComfyAPI().node_replacement.register(RENAMED)
    await ComfyAPI().node_replacement.register(io.NodeReplace("Newer", "Old"))
    listed = replacements.listed_replacements()
    assert [row["new_node_id"] for row in listed["Old"]] == ["New", "Newer"]
    assert list(listed["Old"][1]) == [
        "new_node_id",
        "old_node_id",
        "old_widget_ids",
        "input_mapping",
        "output_mapping",
    ]
    assert listed["Old"][1]["input_mapping"] is None
