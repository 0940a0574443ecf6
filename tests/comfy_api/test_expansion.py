"""Dynamic inputs: which plain inputs a prompt uses, and how values are nested."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

LINK = ["9", 0]


def expanded(inputs: list[Any], live: dict[str, Any]) -> Any:
    schema = io.Schema("N", inputs=inputs)
    schema.validate()
    return schema.expand(live)


def test_a_growing_list_requires_the_first_and_takes_those_in_the_prompt() -> None:
    template = io.Autogrow.TemplatePrefix(io.Image.Input("image"), "image", min=2, max=50)
    live = {"images.image0": LINK, "images.image7": LINK, "images.image99": LINK}
    found = expanded([io.Autogrow.Input("images", template)], live)
    assert list(found.sections["required"]) == ["images.image0", "images.image1"]
    assert list(found.sections["optional"]) == ["images.image7"]
    assert found.nest({"images.image0": 1, "images.image7": 2}) == {
        "images": {"image0": 1, "image7": 2}
    }


def test_an_empty_growing_list_is_an_empty_dictionary() -> None:
    template = io.Autogrow.TemplateNames(io.Int.Input("n"), ["a", "b"], min=1)
    found = expanded([io.Autogrow.Input("some", template, optional=True)], {})
    assert found.sections == {"required": {}}
    assert found.nest({}) == {"some": {}}


def test_a_choice_brings_the_inputs_of_the_chosen_option_only() -> None:
    options = [
        io.DynamicCombo.Option("size", [io.Int.Input("width"), io.Int.Input("height")]),
        io.DynamicCombo.Option("factor", [io.Float.Input("by", optional=True)]),
    ]
    inputs = [io.DynamicCombo.Input("mode", options), io.Image.Input("image")]
    found = expanded(inputs, {"mode": "factor", "mode.by": 2.0, "image": LINK})
    assert found.sections == {
        "required": {"mode": ("COMBO", {"options": ["size", "factor"]}), "image": ("IMAGE", {})},
        "optional": {"mode.by": ("FLOAT", {})},
    }
    assert found.nest({"mode": "factor", "mode.by": 2.0, "image": 1}) == {
        "mode": {"mode": "factor", "by": 2.0},
        "image": 1,
    }
    assert list(expanded(inputs, {"mode": "none"}).sections["required"]) == ["mode", "image"]


def test_a_slot_brings_its_inputs_when_connected() -> None:
    inputs = [io.DynamicSlot.Input(io.Mask.Input("mask"), [io.Float.Input("strength")])]
    assert expanded(inputs, {}).sections == {"required": {}, "optional": {"mask": ("MASK", {})}}
    found = expanded(inputs, {"mask": LINK})
    assert list(found.sections["required"]) == ["mask.strength"]
    assert found.nest({"mask": 1, "mask.strength": 0.5}) == {"mask": {"mask": 1, "strength": 0.5}}


def test_dynamic_inputs_nest_in_each_other() -> None:
    template = io.Autogrow.TemplatePrefix(io.Int.Input("n"), "n", min=1)
    options = [io.DynamicCombo.Option("many", [io.Autogrow.Input("list", template)])]
    found = expanded([io.DynamicCombo.Input("mode", options)], {"mode": "many"})
    assert list(found.sections["required"]) == ["mode", "mode.list.n0"]
    assert found.nest({"mode": "many", "mode.list.n0": 4}) == {
        "mode": {"mode": "many", "list": {"n0": 4}}
    }


def test_the_first_inputs_of_an_optional_template_are_optional() -> None:
    template = io.Autogrow.TemplatePrefix(io.Int.Input("n", optional=True), "n", min=1)
    found = expanded([io.Autogrow.Input("some", template)], {"some.n0": 1})
    assert found.sections == {"required": {}, "optional": {"some.n0": ("INT", {})}}
    assert template.as_dict()["input"] == {"required": {}, "optional": {"n": ("INT", {})}}
