"""Frames: their order, progress by every door, previews, and who receives them."""

from __future__ import annotations

import io
import json
import struct
import time
from typing import Any

import pytest
from PIL import Image

from tests.blackbox.client import Client, connected, fresh, graph
from tests.blackbox.conftest import House, only_classic

KINDS = ("TrialSteps", "TrialStepsByApi", "TrialStepsByApiSync")


def stepping(kind: str, steps: int = 3, picture: bool = False) -> Any:
    """A graph whose node "steps" reports so many steps."""
    g = graph()
    node = g.node(kind, id="steps", value=fresh(), steps=steps, picture=picture)
    g.node("TrialShow", id="shown", value=node.out(0))
    return g


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_reported(client: Client, kind: str) -> None:
    done = client.run(stepping(kind))
    steps = [(step["node"], step["value"], step["max"]) for step in done.data("progress")]
    assert steps == [("steps", n, 3) for n in (1, 2, 3)]
    states = [data["nodes"]["steps"] for data in done.data("progress_state")]
    reached = [(state["state"], state["value"]) for state in states]
    assert reached[:5] == [
        ("running", 0), ("running", 1), ("running", 2), ("running", 3), ("finished", 3),
    ]  # fmt: skip
    last = done.data("progress_state")[-1]["nodes"]
    assert {node_id: state["state"] for node_id, state in last.items()} == {
        "steps": "finished",
        "shown": "finished",
    }


def test_frames_come_in_the_documented_order(client: Client) -> None:
    done = client.run(stepping("TrialSteps", steps=1))
    names = [frame["type"] for frame in done.frames if frame["type"] != "status"]
    assert names == [
        "execution_start", "execution_cached",
        "progress_state", "executing", "progress_state", "progress", "progress_state",
        "progress_state", "executing", "executed", "progress_state",
        "execution_success", "executing",
    ]  # fmt: skip
    kinds = [kind for kind, _ in done.entry["status"]["messages"]]
    assert kinds == ["execution_start", "execution_cached", "execution_success"]
    for _, data in done.entry["status"]["messages"]:
        assert abs(data["timestamp"] / 1000 - time.time()) < 120


@pytest.mark.parametrize("kind", KINDS)
def test_previews_for_clients_that_understand_them(house: House, kind: str) -> None:
    with connected(house.server) as client:
        client.send_flags(supports_preview_metadata=True)
        done = client.run(stepping(kind, steps=2, picture=True))
    assert done.succeeded
    assert 1 <= len(done.binary) <= 2  # a picture that a newer one has overtaken is left out
    for frame in done.binary:
        event, length = struct.unpack(">II", frame[:8])
        metadata = json.loads(frame[8 : 8 + length])
        assert event == 4
        assert (metadata["node_id"], metadata["prompt_id"]) == ("steps", done.prompt_id)
        assert metadata["image_type"] == "image/jpeg"
        assert max(Image.open(io.BytesIO(frame[8 + length :])).size) in (64, 512)


def test_previews_for_all_others(client: Client) -> None:
    done = client.run(stepping("TrialSteps", steps=2, picture=True))
    assert {struct.unpack(">II", frame[:8]) for frame in done.binary} == {(1, 1)}
    assert Image.open(io.BytesIO(done.binary[0][8:])).size == (64, 32)


def test_overlapping_async_nodes_report_each_for_itself(client: Client) -> None:
    g = graph()
    steps = {"one": 3, "two": 5, "three": 4}
    for name, count in steps.items():
        node = g.node("TrialNapSteps", id=name, value=fresh(), steps=count, seconds=0.1)
        g.node("TrialShow", id=f"{name}-shown", value=node.out(0))
    done = client.run(g)
    for name, count in steps.items():
        assert done.shown(f"{name}-shown") == [f"{name}:0"]
        own = [step for step in done.data("progress") if step["node"] == name]
        assert [(step["value"], step["max"]) for step in own] == [
            (n, count) for n in range(1, count + 1)
        ]
    order = [step["node"] for step in done.data("progress")]
    assert order != sorted(order, key=list(steps).index)  # they did overlap


def test_a_bar_that_names_its_node_may_count_in_fractions(client: Client) -> None:
    g = graph()
    dozes = [g.node("TrialDoze", id=name, value=fresh(), seconds=0.05) for name in ("a", "b")]
    for doze in dozes:
        g.node("TrialShow", value=doze.out(0))
    done = client.run(g)
    assert done.succeeded
    for name in ("a", "b"):
        own = [step for step in done.data("progress") if step["node"] == name]
        assert own
        assert {step["max"] for step in own} == {0.05}
        assert [step["value"] for step in own] == sorted(step["value"] for step in own)


def test_progress_goes_to_the_owner_alone(client: Client, second_client: Client) -> None:
    mine = client.queue(stepping("TrialSteps", picture=True))
    theirs = second_client.queue(stepping("TrialSteps", picture=True))
    for own, prompt_id in ((client, mine), (second_client, theirs)):
        done = own.follow(prompt_id)
        assert done.succeeded
        assert done.binary
        for frame in done.frames:
            assert frame["data"].get("prompt_id", prompt_id) == prompt_id
    assert {frame["type"] for frame in client.waiting()} <= {"status"}


def test_progress_that_nobody_owns_goes_to_everybody(client: Client) -> None:
    status, answer = client.server.post("/prompt", {"prompt": stepping("TrialSteps").finalize()})
    assert status == 200
    data = client.wait_for("progress", prompt_id=answer["prompt_id"])
    assert data["node"] == "steps"


def test_text_and_messages_of_a_pack_arrive_as_strict_json(client: Client) -> None:
    g = graph()
    told = g.node("TrialTell", id="told", value=fresh(), text="half way ½")
    g.node("TrialShow", value=told.out(0))
    done = client.run(g)
    assert done.data("trial.told") == [{"text": "half way ½", "broken": None}]
    event, length = struct.unpack(">II", done.binary[0][:8])
    assert (event, done.binary[0][8 : 8 + length]) == (3, b"told")
    assert done.binary[0][8 + length :].decode() == "half way ½"


@only_classic
def test_a_client_that_comes_back_hears_what_runs(house: House, client: Client) -> None:
    g = graph()
    polite = g.node("TrialPolite", id="polite", value=fresh(), seconds=30)
    g.node("TrialShow", value=polite.out(0))
    prompt_id = client.queue(g)
    client.wait_for("executing", node="polite")
    client.close()
    with connected(house.server, client.client_id) as again:
        assert again.wait_for("status")["sid"] == client.client_id
        assert again.wait_for("executing") == {"node": "polite"}
        house.server.post("/interrupt", {"prompt_id": prompt_id})
        again.wait_for("execution_interrupted", prompt_id=prompt_id)


@only_classic
def test_a_newer_socket_takes_over_and_the_older_may_close(house: House, client: Client) -> None:
    with connected(house.server, client.client_id) as newer:
        newer.wait_for("status")
        client.close()
        assert newer.run(stepping("TrialSteps")).succeeded
