"""Prompts that are refused before anything runs, and those of which a part is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.blackbox.client import Client, graph


def error_types(answer: Any, node_id: str) -> list[str]:
    """Types of a node's errors."""
    return [error["type"] for error in answer["node_errors"][node_id]["errors"]]


def checked(client: Client, kind: str, a: Any, b: Any) -> Any:
    """Runs one checked addition of constants; the sum, or the types of its errors."""
    g = graph()
    g.node("TrialShow", id="shown", value=g.node(kind, id="checked", a=a, b=b).out(0))
    status, answer = client.submit(g)
    if status == 200:
        return client.follow(answer["prompt_id"]).shown("shown")[0]
    return error_types(answer, "checked")


FAILED = ["custom_validation_failed"]
TOO_BIG = ["value_bigger_than_max"]
TOO_SMALL = ["value_smaller_than_min"]


@pytest.mark.parametrize(
    ("kind", "a", "b", "expected"),
    [
        ("TrialChecked", 3, 4, 7),
        ("TrialChecked", 11, 4, TOO_BIG),
        ("TrialChecked", 11, -1, TOO_BIG + TOO_SMALL),
        ("TrialChecked", "many", 1, ["invalid_input_type"]),
        ("TrialCheckedOne", 98, 1, 99),
        ("TrialCheckedOne", 99, 1, FAILED),
        ("TrialCheckedOne", 1, 11, TOO_BIG),
        ("TrialCheckedTwo", 20, -10, 10),
        ("TrialCheckedTwo", 6, 5, FAILED * 2),
        ("TrialCheckedTypes", 3, 4, 7),
        ("TrialCheckedTypes", 3, 40, TOO_BIG),
        ("TrialCheckedAll", 900, -900, 0),
        ("TrialCheckedAll", 1000, 1, FAILED * 2),
        ("TrialCheckedTypesAndAll", 900, 99, 999),
        ("TrialCheckedTypesAndAll", 9000, 1, None),
        ("TrialCheckedFalse", 1, 1, FAILED),
        ("TrialCheckedRaising", 1, 1, ["exception_during_validation"]),
        ("TrialCheckedAsync", 10, 1, 11),
        ("TrialCheckedAsync", 11, 1, FAILED),
    ],
)
def test_checks_of_constants(client: Client, kind: str, a: Any, b: Any, expected: Any) -> None:
    found = checked(client, kind, a, b)
    if expected is None:
        assert set(found) == set(FAILED)
    else:
        assert (
            sorted(found) == sorted(expected) if isinstance(expected, list) else found == expected
        )


def test_the_reason_a_check_gives_is_passed_on(client: Client) -> None:
    g = graph()
    g.node("TrialShow", value=g.node("TrialCheckedOne", id="checked", a=99, b=1).out(0))
    answer = client.refused(g)
    details = answer["node_errors"]["checked"]["errors"][0]["details"]
    assert details == "a - 99 is never allowed"
    assert answer["error"]["type"] == "prompt_outputs_failed_validation"


SOURCES = {"INT": ("TrialInt", 4), "FLOAT": ("TrialFloat", 4.0), "STRING": ("TrialText", "4")}


@pytest.mark.parametrize(
    ("kind", "types", "expected"),
    [
        ("TrialChecked", ("INT", "INT"), 8),
        ("TrialChecked", ("INT", "FLOAT"), ["return_type_mismatch"]),
        ("TrialCheckedOne", ("STRING", "INT"), ["return_type_mismatch"]),
        ("TrialCheckedTypes", ("INT", "INT"), 8),
        ("TrialCheckedTypes", ("STRING", "STRING"), "44"),
        ("TrialCheckedTypes", ("STRING", "INT"), FAILED),
        ("TrialCheckedTypes", ("FLOAT", "FLOAT"), FAILED),
        ("TrialCheckedTypesAndAll", ("FLOAT", "INT"), 8.0),
        ("TrialCheckedTypesAndAll", ("STRING", "INT"), FAILED),
        ("TrialCheckedTwo", ("INT", "INT"), 8),
    ],
)
def test_checks_of_links(client: Client, kind: str, types: tuple[str, str], expected: Any) -> None:
    g = graph()
    links = []
    for name in types:
        source, value = SOURCES[name]
        links.append(g.node(source, value=value).out(0))
    g.node("TrialShow", id="shown", value=g.node(kind, id="checked", a=links[0], b=links[1]).out(0))
    status, answer = client.submit(g)
    if isinstance(expected, list):
        assert status == 400
        assert set(error_types(answer, "checked")) == set(expected)
    else:
        assert status == 200, answer
        assert client.follow(answer["prompt_id"]).shown("shown") == [expected]


@pytest.mark.parametrize(("value", "is_fine"), [(4, True), (3, False), (12, True)])
def test_schema_checks(client: Client, value: int, is_fine: bool) -> None:
    """The node's own check takes the place of the range check, as with classic nodes."""
    g = graph()
    shown = g.node("TrialSchemaShow", value=g.node("TrialSchemaChecked", value=value).out(0))
    if is_fine:
        assert client.run(g).shown(shown, "text") == [str(value)]
    else:
        client.refused(g)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, "required_input_missing"),
        ({"shade": "pink"}, "value_not_in_list"),
        ({"shade": "black", "width": 4}, "value_smaller_than_min"),
        ({"shade": "black", "width": 4096}, "value_bigger_than_max"),
        ({"shade": "black", "width": "wide"}, "invalid_input_type"),
        ({"shade": "black", "width": [1, 2, 3]}, "bad_linked_input"),
    ],
)
def test_built_in_checks(client: Client, inputs: dict[str, Any], expected: str) -> None:
    g = graph()
    given = {"width": 16, "height": 16, "count": 1, **inputs}
    g.node("PreviewImage", images=g.node("TrialPicture", id="checked", **given).out(0))
    answer = client.refused(g)
    assert expected in error_types(answer, "checked")
    assert answer["node_errors"]["checked"]["dependent_outputs"] == ["1"]


@pytest.mark.parametrize("slot", [-1, 1, 99, 0.5])
def test_a_slot_that_is_not_there(client: Client, slot: float) -> None:
    g = graph()
    number = g.node("TrialInt", value=1)
    g.node("TrialAdd", id="added", a=[number.id, slot], b=1)
    g.node("TrialShow", value=["added", 0])
    answer = client.refused(g)
    text = str(answer["node_errors"]["added"])
    assert "TrialInt" in text
    assert str(slot) in text


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_of_an_open_ended_node_that_returned_less(client: Client, slot: int) -> None:
    g = graph()
    fan = g.node("TrialFan", start=0, count=3)
    g.node("TrialShow", value=[fan.id, slot])
    status, answer = client.submit(g)
    if slot < 0:
        assert status == 400
    else:
        message = client.follow(answer["prompt_id"]).error["exception_message"]
        assert all(part in message for part in (f"output {slot} of node {fan.id}", "3 outputs"))


def test_an_output_without_errors_runs_beside_one_with(client: Client) -> None:
    g = graph()
    good = g.node("TrialShow", value=1)
    g.node("TrialShow", id="bad", value=g.node("TrialAdd", id="culprit", a=1).out(0))
    g.node("TrialShow", id="orphan", value=["nobody", 0])
    done = client.run(g)
    assert done.shown(good) == [1]
    assert list(done.entry["outputs"]) == [good.id]
    assert set(done.node_errors) == {"culprit", "orphan"}
    assert done.node_errors["culprit"]["dependent_outputs"] == ["bad"]


def test_a_link_to_nowhere_names_the_missing_node(client: Client) -> None:
    g = graph()
    g.node("TrialShow", id="shown", value=["nobody", 0])
    answer = client.refused(g)
    assert "nobody" in str(answer["node_errors"]["shown"])


def test_a_class_that_does_not_exist_is_named(client: Client) -> None:
    g = graph()
    g.node("TrialShow", value=g.node("NoSuchClass", id="odd").out(0))
    error = client.refused(g)["error"]
    assert error["type"] in ("invalid_prompt", "missing_node_type")
    assert "odd" in error["details"]
    assert "NoSuchClass" in str(error)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_cycle_is_refused_and_named(client: Client, length: int) -> None:
    g = graph()
    nodes = [g.node("TrialAdd", id=f"n{i}", b=1) for i in range(length)]
    for i, node in enumerate(nodes):
        node.set_input("a", nodes[(i + 1) % length].out(0))
    g.node("TrialShow", value=nodes[0].out(0))
    answer = client.refused(g)
    for node in nodes:
        assert "dependency_cycle" in error_types(answer, node.id)


@pytest.mark.parametrize(
    "prompt", [{}, {"1": None}, {"1": {"inputs": {}}}, {"1": {"class_type": "TrialShow"}}]
)
def test_what_is_no_prompt(client: Client, prompt: dict[str, Any]) -> None:
    assert client.refused(prompt)["error"]["message"]


def test_a_dry_run_says_what_would_run(client: Client) -> None:
    g = graph()
    shown = g.node("TrialShow", value=g.node("TrialStamp", id="stamp", value=1, always=True).out(0))
    status, answer = client.server.post("/api/validate", {"prompt": g.finalize()})
    assert (status, answer["valid"], answer["outputs"]) == (200, True, [shown.id])
    assert set(answer["plan"]["would_run"]) == {"stamp", shown.id}
    status, answer = client.server.post("/api/validate", {"prompt": {"1": {"class_type": "X"}}})
    assert (status, answer["valid"]) == (200, False)
    assert "X" in str(answer["error"])
