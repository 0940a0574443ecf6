"""Plain graphs: links, outputs, hidden values, open-ended inputs, pictures."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from tests.blackbox.client import Client, fresh, graph
from tests.blackbox.conftest import House


def test_a_chain_gives_its_value_and_each_node_runs_once(client: Client) -> None:
    g = graph()
    number = g.node("TrialInt", value=fresh())
    added = g.node("TrialAdd", a=number.out(0), b=number.out(0))
    shown = g.node("TrialShow", value=added.out(0))
    done = client.run(g)
    assert done.shown(shown) == [2 * number.get_input("value")]
    assert sorted(done.ran) == sorted(g.nodes)


def test_a_result_used_in_two_places_is_made_once(client: Client) -> None:
    g = graph()
    by = fresh()
    split = g.node("TrialSplit", value=3 * by + 2, by=by)
    first = g.node("TrialShow", value=split.out(0))
    second = g.node("TrialShow", value=split.out(1))
    done = client.run(g)
    assert (done.shown(first), done.shown(second)) == ([3], [2])
    assert done.ran.count(split.id) == 1


def test_a_saved_picture_is_the_one_that_was_made(client: Client) -> None:
    g = graph()
    picture = g.node("TrialPicture", shade="white", width=48, height=16, count=2)
    saved = g.node("SaveImage", images=picture.out(0), filename_prefix="black/box")
    places = client.run(g).shown(saved, "images")
    assert [place["type"] for place in places] == ["output", "output"]
    assert {place["subfolder"] for place in places} == {"black"}
    found = Image.open(io.BytesIO(client.image(places[1])))
    assert found.size == (48, 16)
    assert found.convert("RGB").getextrema() == ((255, 255),) * 3


def test_a_previewed_picture_lies_in_temp(client: Client) -> None:
    g = graph()
    picture = g.node("TrialPicture", shade="black", width=8, height=8, count=1)
    seen = g.node("PreviewImage", images=picture.out(0))
    place = client.run(g).shown(seen, "images")[0]
    assert place["type"] == "temp"
    assert Image.open(io.BytesIO(client.image(place))).getextrema()[0] == (0, 0)


def test_constants_are_converted_to_the_declared_types(client: Client) -> None:
    g = graph()
    shown = [
        g.node("TrialShow", value=g.node("TrialInt", value="12").out(0)),
        g.node("TrialShow", value=g.node("TrialInt", value=3.9).out(0)),
        g.node("TrialShow", value=g.node("TrialFloat", value=2).out(0)),
        g.node("TrialShow", value=g.node("TrialText", value=7, choice=2).out(0)),
    ]
    done = client.run(g)
    assert [done.shown(node)[0] for node in shown] == [12, 3, 2.0, "72"]


def test_a_wrapped_list_is_a_constant(client: Client) -> None:
    g = graph()
    shown = g.node("TrialShow", value={"__value__": ["1", 0]})
    assert client.run(g).shown(shown) == [["1", 0]]


def test_hidden_values_arrive(client: Client) -> None:
    g = graph()
    node = g.node("TrialHidden", value=1)
    other = g.node("TrialShow", value=5)
    workflow = {"id": "w", "nodes": [{"id": 1}]}
    done = client.run(g, extra_data={"extra_pnginfo": {"workflow": workflow}})
    everyone = sorted([node.id, other.id])
    prompt, pnginfo, own_id, facts, unheard_of = done.shown(node)
    assert (prompt, pnginfo, own_id) == (everyone, {"workflow": workflow}, node.id)
    assert facts == ["TrialHidden", None, node.id, node.id, everyone, everyone]
    assert unheard_of in (7, None)


@pytest.mark.parametrize("kind", ["TrialPaidService", "TrialSchemaService"])
def test_a_paid_node_gets_the_secrets_and_nobody_else_sees_them(client: Client, kind: str) -> None:
    g = graph()
    node = g.node(kind, value=1)
    if kind == "TrialSchemaService":
        node = g.node("TrialShow", value=node.out(0))
    secrets = {"auth_token_comfy_org": "token-7", "api_key_comfy_org": "key-7"}
    done = client.run(g, extra_data={**secrets, "note": "kept"})
    assert done.shown(node) in (["token-7", "key-7"], ["token-7/key-7"])
    extra_data = done.entry["prompt"][3]
    assert extra_data["note"] == "kept"
    assert not set(secrets) & set(extra_data)


@pytest.mark.parametrize("kind", ["TrialSum", "TrialGraphWalkSum"])
def test_inputs_without_end(client: Client, kind: str) -> None:
    g = graph()
    numbers = [g.node("TrialInt", value=n) for n in range(5)]
    links = {f"any{i}": number.out(0) for i, number in enumerate(numbers)}
    total = g.node("TrialShow", value=g.node(kind, **links).out(0))
    assert client.run(g).shown(total) == [10]


def test_pictures_without_end(client: Client) -> None:
    g = graph()
    shades = ("black", "white", "grey", "white")
    made = [g.node("TrialPicture", shade=s, width=8, height=8, count=1) for s in shades]
    links = {f"picture{i}": picture.out(0) for i, picture in enumerate(made, 1)}
    mean = g.node("TrialShow", value=g.node("TrialAverage", **links).out(0))
    assert client.run(g).shown(mean) == [{"shape": [1, 8, 8, 3], "mean": 0.625}]


def test_outputs_without_end(client: Client) -> None:
    g = graph()
    fan = g.node("TrialFan", start=100, count=12)
    last = g.node("TrialShow", value=fan.out(11))
    assert client.run(g).shown(last) == [111]


@pytest.mark.parametrize("choice", [1, 2])
def test_a_switch_takes_any_type_and_makes_only_what_it_hands_on(
    client: Client, choice: int
) -> None:
    g = graph()
    number = fresh()
    values = [g.node("TrialInt", value=number), g.node("TrialText", value=str(number))]
    links = {f"value{i}": value.out(0) for i, value in enumerate(values, 1)}
    switch = g.node("TrialSwitch", choice=choice, **links)
    shown = g.node("TrialShow", value=switch.out(0))
    done = client.run(g)
    assert done.shown(shown) == [[number, str(number)][choice - 1]]
    assert values[choice - 1].id in done.ran
    assert values[2 - choice].id not in done.ran


def test_an_output_node_may_feed_others(client: Client) -> None:
    g = graph()
    first = g.node("TrialShowAndPass", value=1)
    second = g.node("TrialShowAndPass", value=first.out(0))
    shown = g.node("TrialShow", value=second.out(0))
    done = client.run(g)
    assert [done.shown(node) for node in (first, second, shown)] == [[1], [2], [3]]


@pytest.mark.parametrize("constant", [2.0, 0])
def test_unions_of_types_take_either_by_link_or_constant(client: Client, constant: float) -> None:
    g = graph()
    picture = g.node("TrialPicture", shade="grey", width=8, height=8, count=1)
    number = g.node("TrialFloat", value=3.0)
    links = [(picture.out(0), constant), (number.out(0), picture.out(0)), (number.out(0), 0.5)]
    scaled = [g.node("TrialScale", a=a, b=b) for a, b in links]
    shown = [g.node("TrialShow", value=node.out(0)) for node in scaled]
    done = client.run(g)
    assert done.shown(shown[0])[0]["mean"] == constant / 2
    assert done.shown(shown[1])[0]["mean"] == 1.5
    assert done.shown(shown[2]) == [1.5]
    assert not {node.id for node in scaled} & set(done.entry["outputs"])


def test_a_union_refuses_what_is_no_part_of_it(client: Client) -> None:
    g = graph()
    g.node("TrialScale", id="scaled", a=g.node("TrialText", value="x").out(0), b=1.0)
    errors = client.refused(g)["node_errors"]["scaled"]["errors"]
    assert "a cannot be STRING" in errors[0]["details"]


def test_an_output_node_that_shows_nothing_runs_for_its_own_sake(client: Client) -> None:
    g = graph()
    alone = g.node("TrialScale", a=g.node("TrialFloat", value=fresh()).out(0), b=2.0)
    for _ in range(2):
        done = client.run(g)
        assert done.succeeded
        assert done.entry["outputs"] == {}
        assert alone.id in {*done.ran, *done.cached}


def test_unused_nodes_do_not_run(client: Client) -> None:
    g = graph()
    g.node("TrialRaise", value=1, kind="ValueError")
    shown = g.node("TrialShow", value=fresh())
    assert client.run(g).ran == [shown.id]


def test_an_instance_outlives_its_prompt_where_results_do(house: House, client: Client) -> None:
    seen = []
    for value in (1, 2, 3):
        g = graph()
        calls = g.node("TrialCalls", value=value)
        shown = g.node("TrialShow", value=calls.out(0))
        seen += client.run(g).shown(shown)
    assert seen == ([1, 2, 3] if house.keeps else [1, 1, 1])


@pytest.mark.parametrize("targets", [["1"], ["2"], ["1", "2"]])
def test_only_the_named_outputs_run(client: Client, targets: list[str]) -> None:
    g = graph()
    for number in (1, 2):
        g.node("TrialShow", id=str(number), value=fresh())
    g.node("TrialRaise", id="3", value=1, kind="ValueError")
    g.node("TrialShow", id="4", value=["3", 0])
    done = client.run(g, partial_execution_targets=targets)
    assert done.succeeded
    assert sorted(done.ran) == targets
    assert sorted(done.entry["outputs"]) == targets


def test_no_target_that_exists_is_an_error(client: Client) -> None:
    g = graph()
    g.node("TrialShow", value=1)
    for targets in ([], ["nobody"]):
        answer = client.refused(g, partial_execution_targets=targets)
        assert answer["error"]["type"] == "prompt_no_outputs"


def test_packs_of_every_form_are_loaded_and_a_bad_one_is_skipped(house: House) -> None:
    listing: dict[str, Any] = house.server.get("/object_info")
    assert {"TrialInt", "TrialSchemaAdd", "TrialEntryNegative", "SaveImage"} <= set(listing)
    assert listing["TrialInt"]["python_module"] == "custom_nodes.trial-nodes"
    assert listing["TrialInt"]["display_name"] == "Trial: Int"
    assert listing["TrialPaidService"]["api_node"] is True
    assert "trial_broken" in house.server.log
