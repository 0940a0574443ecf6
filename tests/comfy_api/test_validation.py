"""Schema nodes under the real validation: types, ranges, dynamic inputs, own checks."""

from __future__ import annotations

from typing import Any

import pytest

from comfy_api.latest import io
from comfy_execution.registry import NodeRegistry
from comfy_execution.validation import validate_prompt


class Source(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        template = io.MatchType.Template("t")
        outputs = [io.Image.Output(), io.Latent.Output(), io.MatchType.Output(template)]
        return io.Schema("Source", outputs=outputs)


class Checked(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        growing = io.Autogrow.TemplatePrefix(io.Int.Input("n", min=0, max=9), "n", min=2, max=4)
        options = [
            io.DynamicCombo.Option("size", [io.Int.Input("width", min=1, max=100)]),
            io.DynamicCombo.Option("match", [io.MultiType.Input("to", [io.Image, io.Mask])]),
        ]
        return io.Schema(
            "Checked",
            inputs=[
                io.Autogrow.Input("grown", growing),
                io.DynamicCombo.Input("mode", options),
                io.Combo.Input("choice", ["a", "b"], optional=True),
            ],
            is_output_node=True,
        )


class Judging(Checked):
    @classmethod
    def validate_inputs(cls, grown: dict[str, int], choice: str = "a") -> bool | str:
        total = sum(grown.values())
        return True if total < 20 else f"{total} is too much for {choice}"


NODES: dict[str, Any] = {"Source": Source, "Checked": Checked, "Judging": Judging}
GOOD = {"grown.n0": 1, "grown.n1": 2, "mode": "size", "mode.width": 50}


async def check(class_type: str, **changes: Any) -> list[tuple[str, str]]:
    """Type and details of each error for the good inputs with some changed; None removes one."""
    inputs = {name: value for name, value in (GOOD | changes).items() if value is not None}
    prompt = {
        "1": {"class_type": "Source", "inputs": {}},
        "2": {"class_type": class_type, "inputs": inputs},
    }
    result = await validate_prompt("p", prompt, None, NodeRegistry(NODES))
    found = result.node_errors.get("2", {}).get("errors", [])
    assert result.valid is not bool(found)
    return [(error["type"], error["details"]) for error in found]


WRONG: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"grown.n1": None}, ("required_input_missing", "n1")),
    ({"grown.n1": 10}, ("value_bigger_than_max", "grown.n1")),
    ({"mode.width": 0}, ("value_smaller_than_min", "mode.width")),
    ({"mode.width": None}, ("required_input_missing", "width")),
    ({"mode": None}, ("required_input_missing", "mode")),
    ({"choice": "c"}, ("value_not_in_list", "choice: 'c' not in ['a', 'b']")),
    ({"mode": "none"}, ("value_not_in_list", "mode: 'none' not in ['size', 'match']")),
]


@pytest.mark.parametrize(("changes", "expected"), WRONG)
async def test_a_wrong_value_is_named(changes: dict[str, Any], expected: tuple[str, str]) -> None:
    assert await check("Checked", **changes) == [expected]


async def test_nested_inputs_are_checked_for_the_chosen_option_only() -> None:
    assert await check("Checked") == []
    assert await check("Checked", **{"grown.n3": 3}) == []
    assert await check("Checked", **{"mode": "match", "mode.to": ["1", 0]}) == []


@pytest.mark.parametrize(("slot", "kind"), [(0, None), (1, "LATENT"), (2, None)])
async def test_a_link_must_have_one_of_the_types(slot: int, kind: str | None) -> None:
    found = await check("Checked", **{"mode": "match", "mode.to": ["1", slot], "mode.width": None})
    if kind is None:
        assert found == []
    else:
        [(name, details)] = found
        assert name == "return_type_mismatch"
        assert kind in details
        assert "IMAGE,MASK" in details


async def test_a_nodes_own_check_sees_nested_values_and_replaces_the_range() -> None:
    assert await check("Judging", **{"grown.n0": 10}) == []
    found = await check("Judging", **{"grown.n0": 15, "grown.n1": 5, "choice": "b"})
    assert {kind for kind, _ in found} == {"custom_validation_failed"}
    assert "20 is too much for b" in found[0][1]
