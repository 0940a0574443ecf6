"""Validation beyond the recorded cases: size, wildcards, custom checks, clear errors."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from comfy_execution import blame
from comfy_execution.registry import NodeRegistry
from comfy_execution.turns import Turns
from comfy_execution.types import accepts
from comfy_execution.validation import ValidationResult, validate_prompt
from tests.comfy_execution.support import CLASSES, Prompt, make, node, spec_free


def check(prompt: Any, classes: dict[str, type] | None = None, **how: Any) -> ValidationResult:
    registry = NodeRegistry({**CLASSES, **(classes or {})})
    return asyncio.run(validate_prompt("id", prompt, how.get("targets"), registry))


def types_of(result: ValidationResult, node_id: str) -> list[str]:
    return [error["type"] for error in result.node_errors[node_id]["errors"]]


def with_show(entry: dict[str, Any]) -> Prompt:
    return {"1": entry, "2": make("Show", value=["1", 0])}


class Wild(str):
    """A type that never differs, as packages make it."""

    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return False


@pytest.mark.parametrize(
    ("received", "expected", "fits"),
    [
        ("IMAGE", "IMAGE", True),
        ("IMAGE", "MASK", False),
        ("*", "MASK", True),
        ("IMAGE", "*", True),
        ("IMAGE,MASK", "MASK , LATENT", True),
        ("IMAGE,MASK", "LATENT", False),
        ("COMFY_MATCHTYPE_V3", "LATENT", True),
        (Wild("anything"), "MASK", True),
        ("IMAGE", Wild("anything"), True),
        (["a", "b"], ["a", "b"], True),
        (["a", "b"], ["a"], False),
        (["a", "b"], "COMBO", True),
        ("COMBO", ["a"], True),
        (["a"], "IMAGE", False),
        (["a"], "*", True),
    ],
)
def test_types(received: Any, expected: Any, fits: bool) -> None:
    assert accepts(received, expected) is fits


def test_values_are_converted_in_the_prompt() -> None:
    kinds = {"i": "INT", "f": "FLOAT", "s": "STRING", "b": "BOOLEAN", "n": "BOOLEAN"}
    inputs = {"required": {name: (kind,) for name, kind in kinds.items()}}
    prompt = with_show(make("Typed", i="7", f="1.5", s=3, b=1, n="false"))
    assert check(prompt, {"Typed": node("Typed", inputs)}).valid
    assert prompt["1"]["inputs"] == {"i": 7, "f": 1.5, "s": "3", "b": True, "n": False}


@pytest.mark.parametrize(
    ("declared", "value", "expected"),
    [
        (("INT", {"min": 1}), 0, ["value_smaller_than_min"]),
        (("FLOAT", {"max": 1.0}), 1.5, ["value_bigger_than_max"]),
        (("INT",), "x", ["invalid_input_type"]),
        (("INT",), float("inf"), ["invalid_input_type"]),
        ((["a", "b"],), "c", ["value_not_in_list"]),
        (([1, 2],), 1.0, []),
        ((["a"], {"min": 0}), "a", []),
        (("COMBO", {"options": ["x"]}), "y", ["value_not_in_list"]),
        (("COMBO", {"options": [], "remote": {}}), "y", []),
        (("COMBO", {"options": ["x", "y"], "multiselect": True}), {"__value__": ["x"]}, []),
        (
            ("COMBO", {"options": ["x"], "multiselect": True}),
            {"__value__": ["x", "z"]},
            ["value_not_in_list"],
        ),
        ("BARE", {"any": "thing"}, []),
        (["INT", {"max": 3}], 4, ["value_bigger_than_max"]),
        (("IMAGE",), ["1", 0, 0], ["bad_linked_input"]),
        (("IMAGE",), ["1", True], ["bad_linked_input"]),
        (("IMAGE",), {"__value__": ["1", 0]}, []),
        (("INT",), {"__value__": ["1", 0]}, ["invalid_input_type"]),
        (("STRING",), {"__value__": ["1", 0]}, []),
    ],
)
def test_literals(declared: Any, value: Any, expected: list[str]) -> None:
    kind = node("Kind", {"required": {"x": declared}})
    result = check(with_show(make("Kind", x=value)), {"Kind": kind})
    assert (types_of(result, "1") if result.node_errors else []) == expected


@pytest.mark.parametrize(
    ("bounds", "written", "meant"),
    [
        ({"min": 0, "max": 2**64 - 1}, "18446744073709552000", 2**64 - 1),
        ({"min": -(2**63), "max": 2**63 - 1}, "9223372036854776000", 2**63 - 1),
        ({"min": -(2**63), "max": 2**63 - 1}, "-9223372036854776000", -(2**63)),
        ({"min": 0, "max": 2**64 - 1}, "18446744073709550000", 18446744073709550000),
        ({"min": 0, "max": 2**64 - 1}, "1.8446744073709552e19", 2**64 - 1),
        ({"min": 0, "max": 2**64 - 1}, "1.8446744073709556e19", None),
        ({"min": -(2**63), "max": 2**63 - 1}, "-9.223372036854776e18", -(2**63)),
        ({"min": 0, "max": 2**64 - 1}, "18446744073709551616", None),
        ({"min": 0, "max": 2**64 - 1}, "18446744073709552001", None),
    ],
)
def test_the_bound_that_a_browser_rounds_is_the_bound(
    bounds: dict[str, int], written: str, meant: int | None
) -> None:
    kind = node("Kind", {"required": {"seed": ("INT", bounds)}})
    prompt = with_show(make("Kind", seed=json.loads(written)))
    assert check(prompt, {"Kind": kind}).valid is (meant is not None)
    assert prompt["1"]["inputs"]["seed"] == (json.loads(written) if meant is None else meant)


@pytest.mark.parametrize(
    ("entry", "words"), [(5, "a number"), (None, "null"), ("x", "a string"), ([], "a list")]
)
def test_what_is_no_node_is_told_in_words_of_json(entry: Any, words: str) -> None:
    result = check({"1": entry})
    assert result.error is not None
    assert result.error["details"].startswith(f"node '1' is {words}; expected an object")


def test_a_long_option_list_is_not_repeated() -> None:
    kind = node("Kind", {"required": {"x": ([str(i) for i in range(21)],)}})
    result = check(with_show(make("Kind", x="no")), {"Kind": kind})
    error = result.node_errors["1"]["errors"][0]
    assert error["details"] == "x: 'no' not in (list of length 21)"
    assert error["extra_info"]["input_config"] is None


@pytest.mark.parametrize("slot", [-1, 1, 10**9, 0.5])
def test_a_bad_slot_names_source_slot_and_count(slot: float) -> None:
    result = check({"1": make("Number", value=1), "2": make("Show", value=["1", slot])})
    error = result.node_errors["2"]["errors"][0]
    assert error["type"] == "linked_output_not_found"
    for part in (f"output {slot}", "node '1'", "Number", "1 outputs"):
        assert part in error["details"]


def test_open_ended_outputs_have_every_slot() -> None:
    class Endless(tuple):  # type: ignore[type-arg]
        def __getitem__(self, index: Any) -> Any:
            return "INT"

    kind = node("Endless", RETURN_TYPES=Endless(("INT",)))
    prompt = {"1": make("Endless"), "2": make("Show", value=["1", 42])}
    assert check(prompt, {"Endless": kind}).valid


def test_a_workflow_in_the_editors_format_is_recognised() -> None:
    result = check({"nodes": [], "links": [], "version": 0.4})
    assert result.error is not None
    assert result.error["type"] == "invalid_prompt"
    assert "Export (API)" in result.error["details"]


@pytest.mark.parametrize("broken", [{"1": 5}, {"1": None}, {"1": {"class_type": 7}}, {"1": {}}])
def test_nodes_that_are_none_are_refused(broken: Any) -> None:
    result = check(broken)
    assert result.error is not None
    assert result.error["type"] == "invalid_prompt"


@pytest.mark.parametrize("meta", [None, "text", [], {"title": 5}])
def test_an_unknown_class_is_told_whatever_its_title_is(meta: Any) -> None:
    error = check({"1": {"class_type": "NoSuchClass", "inputs": {}, "_meta": meta}}).error
    assert error is not None
    assert "NoSuchClass" in str(error)


@pytest.mark.parametrize("inputs", [None, [], "text"])
def test_inputs_that_are_no_object_are_a_node_error(inputs: Any) -> None:
    result = check({"1": {"class_type": "Show", "inputs": inputs}})
    assert types_of(result, "1") == ["node_inputs_missing"]


def test_an_error_lists_the_outputs_that_depend_on_it_and_spares_the_others() -> None:
    prompt = {
        "bad": make("Number", value="x"),
        "a": make("Show", value=["bad", 0]),
        "sum": make("Add", a=["bad", 0], b=1),
        "b": make("Show", value=["sum", 0]),
        "good": make("Number", value=1),
        "c": make("Show", value=["good", 0]),
    }
    result = check(prompt)
    assert result.valid
    assert result.outputs == ["c"]
    assert result.node_errors["bad"]["dependent_outputs"] == ["a", "b"]


def test_errors_behind_undeclared_links_count() -> None:
    prompt = {"1": make("Number", value="x"), "2": make("Show", value=1, extra=["1", 0])}
    assert not check(prompt).valid


def test_nodes_no_output_needs_are_not_checked() -> None:
    prompt = {"1": make("Number", value="x"), "2": make("Show", value=1)}
    assert check(prompt).valid


def test_two_thousand_nodes_in_a_circle() -> None:
    count = 2000
    prompt = {f"n{i}": make("Add", a=[f"n{(i + 1) % count}", 0], b=1) for i in range(count)}
    prompt["show"] = make("Show", value=["n0", 0])
    result = check(prompt)
    assert not result.valid
    error = next(iter(result.node_errors.values()))["errors"][0]
    assert error["type"] == "dependency_cycle"
    assert error["extra_info"]["cycle_length"] == count
    assert len(str(result.node_errors)) < 1_000_000


def test_a_small_cycle_is_reported_on_each_of_its_nodes() -> None:
    prompt = {
        "1": make("Add", a=["2", 0], b=1),
        "2": make("Add", a=["1", 0], b=["3", 0]),
        "3": make("Number", value=1),
        "4": make("Show", value=["2", 0]),
        "5": make("Show", value=["3", 0]),
    }
    result = check(prompt)
    assert result.outputs == ["5"]
    assert set(result.node_errors) == {"1", "2"}
    info = result.node_errors["1"]["errors"][0]["extra_info"]
    assert sorted(info["cycle_nodes"]) == ["1", "2"]


def test_a_graph_where_everything_links_to_everything_is_checked_quickly() -> None:
    names = [f"i{n}" for n in range(120)]
    mesh = node("Mesh", spec_free(*names))

    def links(i: int) -> dict[str, Any]:
        return {names[j]: [f"n{(i + j + 1) % 120}", 0] for j in range(119)}

    prompt = {f"n{i}": make("Mesh", **links(i), i119=1) for i in range(120)}
    prompt["show"] = make("Show", value=["n0", 0])
    assert not check(prompt, {"Mesh": mesh}).valid


def test_five_thousand_nodes_in_a_chain() -> None:
    prompt = {"n0": make("Number", value=0)}
    prompt |= {f"n{i}": make("Add", a=[f"n{i - 1}", 0], b=1) for i in range(1, 5000)}
    prompt["show"] = make("Show", value=["n4999", 0])
    assert check(prompt).valid


def test_an_own_check_gets_constants_only_and_takes_over_range_and_types() -> None:
    seen: list[dict[str, Any]] = []

    class Own:
        RETURN_TYPES = ("INT",)
        FUNCTION = "run"

        @classmethod
        def INPUT_TYPES(cls) -> dict[str, Any]:
            return {"required": {"n": ("INT", {"max": 3}), "link": ("MASK",), "mode": (["a"],)}}

        @classmethod
        def VALIDATE_INPUTS(cls, n: int, link: Any, input_types: dict[str, Any]) -> Any:
            seen.append({"n": n, "link": link, "input_types": input_types})
            return True

    prompt = {
        "0": make("Number", value=1),
        "1": make("Own", n=99, link=["0", 0], mode="a"),
        "2": make("Show", value=["1", 0]),
    }
    assert check(prompt, {"Own": Own}).valid
    assert seen == [{"n": 99, "link": None, "input_types": {"link": "INT"}}]
    prompt["1"]["inputs"]["mode"] = "z"
    assert types_of(check(prompt, {"Own": Own}), "1") == ["value_not_in_list"]


@pytest.mark.parametrize(
    ("answer", "details"), [(False, ["a", "b"]), ("why not", ["a - why not", "b - why not"])]
)
def test_a_check_of_everything_names_every_input(answer: Any, details: list[str]) -> None:
    kind = node(
        "Own", {"required": {"a": ("INT",), "b": ("INT",)}},
        VALIDATE_INPUTS=classmethod(lambda cls, **kwargs: answer),
    )  # fmt: skip
    result = check(with_show(make("Own", a=1, b=2)), {"Own": kind})
    assert [e["details"] for e in result.node_errors["1"]["errors"]] == details


@pytest.mark.parametrize("place", ["VALIDATE_INPUTS", "INPUT_TYPES"])
def test_a_class_that_fails_to_answer_is_an_error_of_its_node(place: str) -> None:
    def broken(cls: type, **_: Any) -> Any:
        raise RuntimeError("no disk")

    kind = node("Broken", {"required": {"a": ("INT",)}}, **{place: classmethod(broken)})
    result = check(with_show(make("Broken", a=1)), {"Broken": kind})
    assert set(types_of(result, "1")) == {"exception_during_validation"}
    assert result.node_errors["1"]["errors"][0]["extra_info"]["exception_type"] == "RuntimeError"


def test_an_async_check_is_awaited() -> None:
    async def slow(cls: type, a: int) -> Any:
        await asyncio.sleep(0)
        return "late" if a == 1 else True

    kind = node("Own", {"required": {"a": ("INT",)}}, VALIDATE_INPUTS=classmethod(slow))
    assert not check(with_show(make("Own", a=1)), {"Own": kind}).valid
    assert check(with_show(make("Own", a=2)), {"Own": kind}).valid


def test_input_types_is_asked_once_per_class_and_purpose() -> None:
    asked = 0

    def declare(cls: type) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return {"required": {"a": ("INT",)}}

    kind = node("Costly", RETURN_TYPES=("INT",), INPUT_TYPES=classmethod(declare))
    prompt = {f"{i}": make("Costly", a=i) for i in range(50)}
    prompt["show"] = make("Show", value=["0", 0], **{f"x{i}": [f"{i}", 0] for i in range(50)})
    assert check(prompt, {"Costly": kind}).valid
    assert asked == 1


def test_a_missing_input_is_named_though_the_class_check_needs_it() -> None:
    def refuse(_: type, value: int) -> bool:
        raise RuntimeError(value)

    strict = node("Strict", {"required": {"value": ("INT",)}}, VALIDATE_INPUTS=classmethod(refuse))
    missing = check(with_show(make("Strict")), {"Strict": strict})
    assert types_of(missing, "1") == ["required_input_missing"]
    failing = check(with_show(make("Strict", value=1)), {"Strict": strict})
    assert types_of(failing, "1") == ["exception_during_validation"]


@pytest.mark.parametrize("value", ["nan", "NaN", float("nan")])
def test_not_a_number_is_no_number(value: Any) -> None:
    real = node("Real", {"required": {"value": ("FLOAT", {"min": 0.0, "max": 1.0})}})
    assert types_of(check(with_show(make("Real", value=value)), {"Real": real}), "1") == [
        "invalid_input_type"
    ]


def test_others_get_their_turn_while_a_large_prompt_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Turns, "due", True)
    shared = make("Number", value="x")
    prompt = {"0": shared} | {f"n{i}": make("Show", value=["0", 0]) for i in range(200)}
    turns = 0

    async def watch() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def both() -> ValidationResult:
        watcher = asyncio.create_task(watch())
        result = await validate_prompt("id", prompt, None, NodeRegistry(CLASSES))
        watcher.cancel()
        return result

    assert not asyncio.run(both()).valid
    assert turns > 5 * len(prompt)  # classes, links, values, outputs, dependents


def test_ten_thousand_outputs_in_error_are_each_told() -> None:
    prompt = {f"n{i}": make("Show") for i in range(10_000)} | {"good": make("Show", value=1)}
    result = check(prompt)
    assert result.outputs == ["good"]
    assert len(result.node_errors) == 10_000
    assert all(found["dependent_outputs"] == [name] for name, found in result.node_errors.items())


def test_what_depends_on_thousands_of_nodes_in_error_is_named_within_bounds() -> None:
    prompt = {"n0": make("Add", a=0, b="x")}
    prompt |= {f"n{i}": make("Add", a=[f"n{i - 1}", 0], b="x") for i in range(1, 5000)}
    prompt |= {f"o{i}": make("Show", value=["n4999", 0]) for i in range(5000)}
    result = check(prompt)
    named = [found["dependent_outputs"] for found in result.node_errors.values()]
    assert len(named) == 5000
    assert named[0][:2] == ["o0", "o1"]
    assert min(map(len, named)) == 1
    assert sum(map(len, named)) < 1.1 * blame.MOST_NAMED


@pytest.mark.parametrize("seed", range(20))
def test_blame_is_what_walking_from_each_error_gives(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randrange(2, 30)
    prompt: Prompt = {}
    for i in range(count):
        a = [f"n{chance.randrange(i)}", 0] if i and chance.random() < 0.8 else i
        b = "x" if chance.random() < 0.1 else 1
        prompt[f"n{i}"] = make("Add", a=a, b=b)
        if chance.random() < 0.4:
            prompt[f"o{i}"] = make("Show", value=[f"n{i}", 0])
    prompt["last"] = make("Show", value=[f"n{count - 1}", 0])

    def needed(name: str) -> set[str]:
        links = [v[0] for v in prompt[name]["inputs"].values() if isinstance(v, list)]
        return {name}.union(*map(needed, links))

    outputs = {name: needed(name) for name in prompt if prompt[name]["class_type"] == "Show"}
    bad = {name for name in prompt if prompt[name]["inputs"].get("b") == "x"}
    result = check(prompt)
    assert result.outputs == [name for name, need in outputs.items() if not need & bad]
    assert {name: found["dependent_outputs"] for name, found in result.node_errors.items()} == {
        name: [output for output, need in outputs.items() if name in need]
        for name in bad
        if any(name in need for need in outputs.values())
    }
