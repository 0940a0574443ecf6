"""Cancelling: at once, only the named job, and the next one runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from comfy_execution.graph_utils import GraphBuilder
from tests.blackbox.client import Client, fresh, graph
from tests.blackbox.conftest import House, only_classic
from tests.support.prompts import demo_prompt

pytestmark = only_classic

Within = Callable[..., None]


def working(kind: str, **inputs: Any) -> GraphBuilder:
    """A graph whose node "work" takes long."""
    g = graph()
    node = g.node(kind, id="work", value=fresh(), seconds=60.0, **inputs)
    g.node("TrialShow", id="shown", value=node.out(0))
    return g


def cancelled(client: Client, prompt_id: str, how: str = "interrupt") -> float:
    """Cancels a running prompt; seconds until its owner was told that it has ended."""
    begin = time.monotonic()
    if how == "interrupt":
        status, _ = client.server.post("/interrupt", {"prompt_id": prompt_id})
    else:
        status, answer = client.server.post(f"/api/jobs/{prompt_id}/cancel", {})
        assert answer == {"cancelled": True}
    assert status == 200
    done = client.follow(prompt_id)
    took_s = time.monotonic() - begin
    assert len(done.data("execution_interrupted")) == 1
    assert not done.data("execution_error")
    assert done.entry["status"]["status_str"] == "error"
    assert client.server.get(f"/api/jobs/{prompt_id}")["status"] == "cancelled"
    return took_s


def works_on(client: Client) -> None:
    """The server runs the next prompt."""
    g = graph()
    shown = g.node("TrialShow", value=fresh())
    assert client.run(g).shown(shown)


@pytest.mark.parametrize("how", ["interrupt", "job"])
def test_a_sampler_stops_within_a_quarter_of_a_second(
    client: Client, within: Within, how: str
) -> None:
    def stopped() -> float:
        prompt_id = client.queue(demo_prompt(seed=fresh(), steps=500, size=(256, 256)))
        client.wait_for("progress", prompt_id=prompt_id, value=2)
        return cancelled(client, prompt_id, how)

    within(0.25, stopped)
    works_on(client)


def test_a_decoder_stops_between_tiles(client: Client, within: Within) -> None:
    prompt = demo_prompt(seed=fresh(), steps=1, size=(1024, 1024))
    tiles = {"tile_size": 64, "overlap": 16, "temporal_size": 8, "temporal_overlap": 4}
    prompt["6"] = {
        "class_type": "VAEDecodeTiled",
        "inputs": {"samples": ["4", 0], "vae": ["1", 2], **tiles},
    }

    def stopped() -> float:
        prompt_id = client.queue(prompt)
        client.wait_for("progress", prompt_id=prompt_id, node="6")
        return cancelled(client, prompt_id)

    within(0.25, stopped)
    works_on(client)


def test_a_large_picture_stops_while_it_is_saved(
    client: Client, house: House, within: Within
) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (2000, 2000, 3), np.uint8)
    Image.fromarray(noise).save(house.server.base / "input" / "noise.bmp")

    def stopped() -> float:
        g = graph()
        picture = g.node("LoadImage", image="noise.bmp")
        prefix = f"stopped{fresh()}"
        g.node("SaveImage", id="save", images=picture.out(0), filename_prefix=prefix)
        prompt_id = client.queue(g)
        client.wait_for("executing", prompt_id=prompt_id, node="save")
        time.sleep(0.1)
        took_s = cancelled(client, prompt_id)
        folder = house.server.base / "results"
        assert not list(folder.glob(f"{prefix}*"))  # what is not whole is not left behind
        return took_s

    within(0.25, stopped)
    works_on(client)


@pytest.mark.parametrize(
    ("kind", "goal_s"),
    [
        ("TrialPolite", 0.25),
        ("TrialNap", 0.25),
        ("TrialBusy", 1.5),
        ("TrialSpin", 1.5),
        ("TrialStubborn", 2.0),
    ],
)
def test_other_work_stops_too(client: Client, within: Within, kind: str, goal_s: float) -> None:
    def stopped() -> float:
        prompt_id = client.queue(working(kind))
        client.wait_for("executing", node="work", prompt_id=prompt_id)
        time.sleep(0.05)
        return cancelled(client, prompt_id)

    within(goal_s, stopped)
    works_on(client)


def test_a_search_without_end_stops_and_holds_nobody_up(
    client: Client, house: House, within: Within
) -> None:
    flags = {"case_insensitive": True, "multiline": False, "dotall": False}

    def answered() -> None:
        assert house.server.get("/queue")["queue_running"]

    def stopped() -> float:
        g = graph()
        text = "a" * 100 + f"! {fresh()}"
        found = g.node("RegexMatch", id="work", string=text, regex_pattern="(a+)+$", **flags)
        g.node("PreviewAny", source=found.out(0))
        prompt_id = client.queue(g)
        client.wait_for("executing", node="work", prompt_id=prompt_id)
        time.sleep(0.05)
        within(0.25, answered)
        return cancelled(client, prompt_id)

    within(0.25, stopped)
    works_on(client)


def test_only_the_named_job_is_hit(client: Client, house: House) -> None:
    first, second = client.queue(working("TrialPolite")), client.queue(working("TrialPolite"))
    third = client.queue(working("TrialPolite"))
    client.wait_for("executing", node="work", prompt_id=first)
    house.server.post("/interrupt", {"prompt_id": second})
    house.server.post("/interrupt", {"prompt_id": "nobody"})
    running = house.server.get("/queue")["queue_running"]
    assert [item[1] for item in running] == [first]
    house.server.post("/api/jobs/cancel", {"job_ids": [second, "nobody"]})
    assert house.server.get(f"/api/jobs/{second}")["status"] == "cancelled"
    cancelled(client, first)
    client.wait_for("executing", node="work", prompt_id=third)
    house.server.post("/interrupt", {"prompt_id": first})  # it has ended: nothing happens
    assert [item[1] for item in house.server.get("/queue")["queue_running"]] == [third]
    cancelled(client, third)


def test_without_a_name_whatever_runs_is_stopped(client: Client, house: House) -> None:
    prompt_id = client.queue(working("TrialPolite"))
    client.wait_for("executing", node="work")
    house.server.post("/interrupt", b"")
    assert client.follow(prompt_id).data("execution_interrupted")
    house.server.post("/interrupt", {})  # nothing runs: the next prompt is not hit
    works_on(client)


def test_a_cancelled_prompt_leaves_correct_results_behind(client: Client) -> None:
    g = graph()
    value = fresh()
    number = g.node("TrialInt", value=value)
    before = g.node("TrialShow", id="before", value=number.out(0))
    polite = g.node("TrialPolite", id="work", value=number.out(0), seconds=60.0)
    g.node("TrialShow", id="shown", value=polite.out(0))
    prompt_id = client.queue(g)
    client.wait_for("executing", node="work")
    cancelled(client, prompt_id)
    polite.set_input("seconds", 0.0)
    done = client.run(g)
    assert done.shown("shown") == [value]
    assert done.shown(before) == [value]
    assert number.id not in done.ran
