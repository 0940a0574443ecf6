"""Declarations: options in the listing, mistakes that are refused, derived attributes."""

from __future__ import annotations

import enum
import subprocess
import sys
from typing import Any

import pytest

from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker
from comfy_execution.spec import spec_from_class


class Flavour(enum.Enum):
    sweet = "sweet"
    sour = "sour"


ALL_OPTIONS: list[tuple[Any, list[Any]]] = [
    (
        io.Boolean.Input("a", default=True, label_on="yes", label_off="no", tooltip="t"),
        ["BOOLEAN", {"tooltip": "t", "default": True, "label_on": "yes", "label_off": "no"}],
    ),
    (
        io.Int.Input("a", default=1, control_after_generate=io.ControlAfterGenerate.fixed),
        ["INT", {"default": 1, "control_after_generate": "fixed"}],
    ),
    (
        io.Float.Input("a", min=0.0, round=0.01, display_mode=io.NumberDisplay.gradient_slider),
        ["FLOAT", {"min": 0.0, "round": 0.01, "display": "gradientslider"}],
    ),
    (
        io.String.Input("a", multiline=True, placeholder="p", dynamic_prompts=True),
        ["STRING", {"multiline": True, "placeholder": "p", "dynamicPrompts": True}],
    ),
    (
        io.Combo.Input("a", Flavour, default=Flavour.sour),
        ["COMBO", {"default": "sour", "multiselect": False, "options": ["sweet", "sour"]}],
    ),
    (
        io.Combo.Input("a", [1, 2], upload=io.UploadType.image, image_folder=io.FolderType.output),
        [
            "COMBO",
            {
                "multiselect": False,
                "options": [1, 2],
                "image_upload": True,
                "image_folder": "output",
            },
        ],
    ),
    (
        io.Combo.Input("a", remote=io.RemoteOptions("/r", True, timeout=5)),
        [
            "COMBO",
            {
                "multiselect": False,
                "options": [],
                "remote": {
                    "route": "/r",
                    "refresh_button": True,
                    "control_after_refresh": "first",
                    "timeout": 5,
                },
            },
        ],
    ),
    (
        io.MultiCombo.Input("a", ["x", "y"], default=["x"], placeholder="some", chip=True),
        [
            "COMBO",
            {
                "default": ["x"],
                "multiselect": True,
                "options": ["x", "y"],
                "multi_select": {"placeholder": "some", "chip": True},
            },
        ],
    ),
    (
        io.Model.Input("a", lazy=True, raw_link=True, advanced=True, extra_dict={"own": 1}),
        ["MODEL", {"lazy": True, "rawLink": True, "advanced": True, "own": 1}],
    ),
    (
        io.MultiType.Input(io.Float.Input("a", default=1.0), [io.Int, io.Image]),
        ["FLOAT,INT,IMAGE", {"default": 1.0}],
    ),
    (
        io.DynamicSlot.Input(io.Int.Input("a", default=1), [io.String.Input("b")]),
        [
            "COMFY_DYNAMICSLOT_V3",
            {
                "slotType": "INT",
                "inputs": {"required": {"b": ("STRING", {"multiline": False})}},
                "forceInput": True,
            },
        ],
    ),
    (io.Color.Input("a"), ["COLOR", {"default": "#ffffff", "socketless": True}]),
    (io.Custom("MINE").Input("a", display_name="A"), ["MINE", {"display_name": "A"}]),
]


@pytest.mark.parametrize(("declared", "expected"), ALL_OPTIONS)
def test_an_input_lists_its_options(declared: Any, expected: list[Any]) -> None:
    assert [declared.get_io_type(), declared.as_dict()] == expected


def test_unset_options_are_not_sent_and_falsy_ones_are() -> None:
    assert io.Int.Input("a", default=0, min=0).as_dict() == {"default": 0, "min": 0}


def test_each_type_owns_its_inner_classes() -> None:
    one, other = io.Custom("ONE"), io.Custom("OTHER")
    assert one.Input is not other.Input
    assert one.Input.Parent is one
    assert one.Output().get_io_type() == "ONE"


def test_own_types_can_be_declared_as_classes() -> None:
    @io.comfytype(io_type="WALK")
    class Walk(io.ComfyTypeIO):
        Type = list

        class Input(io.Input):
            def __init__(self, id: str) -> None:
                super().__init__(id, tooltip="steps")

    assert Walk.Input("w").get_io_type() == "WALK"
    assert Walk.Input("w").Type is list
    assert Walk.Output(display_name="w").io_type == "WALK"


WRONG: list[tuple[io.Schema, str]] = [
    (io.Schema(""), "empty node_id"),
    (io.Schema("N", inputs=[io.Int.Input("a"), io.Mask.Input("a")]), "'N'.*two inputs.*'a'"),
    (io.Schema("N", inputs=[io.Int.Input("a.b")]), "'a.b' is empty or holds a dot"),
    (
        io.Schema("N", outputs=[io.Int.Output("a"), io.Int.Output("a")]),
        r"several outputs.*\['a'\]",
    ),
    (
        io.Schema("N", inputs=[io.DynamicCombo.Input("c", [])]),
        "dynamic combo 'c' has the keys",
    ),
    (
        io.Schema(
            "N",
            inputs=[io.DynamicCombo.Input("c", [io.DynamicCombo.Option("k", [io.Int.Input("c")])])],
        ),
        "option 'k' of dynamic combo 'c': two inputs have the id 'c'",
    ),
    (io.Schema("N", inputs=[io.MultiType.Input("m", [])]), "'m' accepts no type"),
    (io.Schema("N", price_badge=io.PriceBadge("", engine="jsonata")), "empty expression"),
    (io.Schema("N", price_badge=io.PriceBadge("1", engine="js")), "engine 'js'"),
]


@pytest.mark.parametrize(("schema", "message"), WRONG)
def test_a_wrong_schema_is_refused_by_name(schema: io.Schema, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schema.validate()


def test_a_growing_list_checks_its_template() -> None:
    with pytest.raises(ValueError, match="min 3 and 2 names"):
        io.Autogrow.TemplatePrefix(io.Image.Input("i"), "i", min=3, max=2)
    with pytest.raises(ValueError, match="cannot hold the dynamic input"):
        io.Autogrow.TemplateNames(io.DynamicCombo.Input("c", []), ["a"])


def test_output_and_paid_nodes_ask_for_what_they_need() -> None:
    schema = io.Schema("N", is_output_node=True, is_api_node=True, hidden=[io.Hidden.prompt])
    schema.finalize()
    schema.finalize()
    assert [hidden.value for hidden in schema.hidden] == [
        "PROMPT",
        "EXTRA_PNGINFO",
        "AUTH_TOKEN_COMFY_ORG",
        "API_KEY_COMFY_ORG",
    ]


def test_rare_keys_are_listed_only_where_they_say_something() -> None:
    plain = io.Schema("N").node_info("nodes")
    rare = io.Schema(
        "N",
        inputs=[io.Int.Input("count")],
        is_input_list=True,
        is_dev_only=True,
        has_intermediate_output=True,
        search_aliases=["other"],
        essentials_category="Basics",
        price_badge=io.PriceBadge("count * 2", io.PriceBadgeDepends(widgets=["count"])),
    ).node_info("nodes")
    assert {key: rare[key] for key in rare.keys() - plain.keys()} == {
        "is_input_list": True,
        "has_intermediate_output": True,
        "dev_only": True,
        "search_aliases": ["other"],
        "essentials_category": "Basics",
        "price_badge": {
            "engine": "jsonata",
            "depends_on": {
                "widgets": [{"name": "count", "type": "INT"}],
                "inputs": [],
                "input_groups": [],
            },
            "expr": "count * 2",
        },
    }


class Parent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema("Parent", inputs=[io.Int.Input("a")], outputs=[io.Int.Output("x")])

    @classmethod
    def execute(cls, a: int) -> Any:
        return {0: None, 1: (1,), 2: {"result": (2,), "ui": {"text": ["t"]}}, 3: 3}.get(
            a, ExecutionBlocker(None)
        )


class Child(Parent):
    CATEGORY = "mine"

    @classmethod
    def define_schema(cls) -> io.Schema:
        schema = super().define_schema()
        schema.outputs.append(io.String.Output(is_output_list=True, tooltip="help"))
        return schema


def test_a_derived_node_has_a_schema_of_its_own() -> None:
    assert Parent.RETURN_TYPES == ("INT",)
    assert Child.RETURN_TYPES == ("INT", "STRING")
    assert Child.RETURN_NAMES == ("x", "STRING")
    assert Child.OUTPUT_IS_LIST == (False, True)
    assert Child.OUTPUT_TOOLTIPS == (None, "help")
    assert Child.CATEGORY == "mine"
    assert Parent.CATEGORY == "sd"
    assert Parent.RETURN_TYPES == ("INT",)


def test_a_schema_node_can_be_called_as_packages_call_classic_ones() -> None:
    node = Parent()
    output = getattr(node, Parent.FUNCTION)(a=1)
    assert output.result == (1,)
    assert output[0] == 1
    assert list(output) == [1]
    assert Parent.EXECUTE_NORMALIZED(a=0).result is None
    assert Parent.EXECUTE_NORMALIZED(a=2).ui_dict() == {"text": ["t"]}
    assert isinstance(Parent.EXECUTE_NORMALIZED(a=9).args[0], ExecutionBlocker)
    with pytest.raises(TypeError, match="execute of Parent returned int"):
        Parent.EXECUTE_NORMALIZED(a=3)


def test_a_graph_is_refused_unless_the_schema_allows_it() -> None:
    with pytest.raises(ValueError, match="enable_expand"):
        Parent.NORMALIZE_OUTPUT(io.NodeOutput(expand={}))


def test_an_execution_has_its_own_locked_class() -> None:
    first = Parent.PREPARE_CLASS_CLONE({"unique_id": "1", "prompt": {"1": {}}})
    second = Parent.PREPARE_CLASS_CLONE({io.Hidden.unique_id: "2"})
    third = Parent.PREPARE_CLASS_CLONE({"UNIQUE_ID": "3"})
    assert [clone.hidden.unique_id for clone in (first, second, third)] == ["1", "2", "3"]
    assert second.hidden.prompt is None
    assert Parent.hidden.unique_id is None
    assert issubclass(first, Parent)
    assert first.__name__ == "Parent"
    assert first.GET_BASE_CLASS() is Parent
    with pytest.raises(AttributeError, match="cannot set 'count' on Parent"):
        first.count = 1  # type: ignore[attr-defined]


def test_a_class_without_schema_says_so() -> None:
    class Bare(io.ComfyNode):
        pass

    with pytest.raises(NotImplementedError, match="Bare has no define_schema"):
        spec_from_class("Bare", Bare)


def test_schemas_load_without_numerics() -> None:
    code = (
        "import sys; import comfy_api.latest, comfy_api.version_list, comfy_api.feature_flags;"
        "print(sorted({'torch', 'numpy', 'PIL', 'av'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_node_is_listed_under_the_name_it_was_registered_with() -> None:
    info = spec_from_class("Another name", Parent).node_info()  # type: ignore[attr-defined]
    assert info["name"] == "Another name"
    assert list(info) == list(Parent.GET_NODE_INFO_V1())
