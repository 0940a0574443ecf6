"""Several workers: prompts run side by side in processes that may die, and nobody notices but them.

The tests share one server and run in order; the last one goes on without workers in its folder.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.blackbox.client import Client, Outcome, connected, fresh, graph, is_end
from tests.blackbox.conftest import arguments
from tests.blackbox.marks import Marks
from tests.blackbox.test_crash import until
from tests.support.prompts import demo_prompt
from tests.support.server_process import ServerProcess, start_server

PREVIEW = b"\x00\x00\x00\x01"
PAINTED = [demo_prompt(seed=seed, steps=2, size=(64, 64), prefix="same") for seed in (1, 2)]


class Mill(Marks):
    """A server with several workers."""

    def __init__(self, base: Path, *options: str) -> None:
        super().__init__(base)
        self.pictures: list[bytes] = []  # of `PAINTED`, by workers
        self.server: ServerProcess = start_server(base, *arguments(base), *options)
        self.idle()

    def restart(self) -> None:
        """Goes on without workers, in the same folder and on the same port."""
        assert self.server.stop() == 0
        self.server = start_server(self.base, *arguments(self.base), port=self.server.port)

    def workers(self) -> list[dict[str, Any]]:
        """What the server says of them."""
        found: list[dict[str, Any]] = self.server.get("/system_stats")["workers"]
        return found

    def idle(self) -> None:
        """Waits until both can take a prompt."""
        until(lambda: all(worker["state"] == "idle" for worker in self.workers()))

    def running(self) -> list[str]:
        """Ids of prompts that run."""
        return [item[1] for item in self.server.get("/queue")["queue_running"]]

    def until_running(self, *prompt_ids: str) -> None:
        """Waits until these prompts run, and no others."""
        until(lambda: sorted(self.running()) == sorted(prompt_ids))

    def pid(self, prompt_id: str) -> int:
        """Process of the worker that runs a prompt."""
        return next(int(w["pid"]) for w in self.workers() if w["prompt_id"] == prompt_id)


@pytest.fixture(scope="module")
def mill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mill]:
    """The server of this module; it and the one after it compute with one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        mill = Mill(tmp_path_factory.mktemp("mill"), "--workers", "2")
        yield mill
        mill.server.stop()


@pytest.fixture
def clients(mill: Mill) -> Iterator[tuple[Client, Client]]:
    """Two people."""
    with connected(mill.server) as one, connected(mill.server) as other:
        yield one, other


def all_news(client: Client, prompt_id: str) -> Outcome:
    """As ``follow``, with the frames of other prompts, if any came."""
    done = Outcome(prompt_id)
    for frame in client.frames():
        if isinstance(frame, bytes):
            done.binary.append(frame)
        else:
            done.frames.append(frame)
            if is_end(frame, prompt_id):
                break
    done.entry = client.server.get(f"/history/{prompt_id}")[prompt_id]
    return done


def test_two_prompts_run_at_once_and_their_news_reach_their_owners(
    mill: Mill, clients: tuple[Client, Client]
) -> None:
    ids = []
    for value, client in enumerate(clients):
        g = graph()
        wait = g.node("TrialHeld", id="wait", value=value, path=str(mill.base / "both"))
        steps = g.node("TrialSteps", id="steps", value=wait.out(0), steps=3, picture=True)
        told = g.node("TrialTell", id="tell", value=steps.out(0), text=f"of {value}")
        g.node("TrialShow", id="shown", value=told.out(0))
        ids.append(client.queue(g))
    mill.until_running(*ids)
    (mill.base / "both").touch()
    for value, client in enumerate(clients):
        done = all_news(client, ids[value])
        assert {frame["data"].get("prompt_id", ids[value]) for frame in done.frames} == {ids[value]}
        assert done.shown("shown") == [value]
        assert [data["value"] for data in done.data("progress")] == [1, 2, 3]
        assert done.ran == ["wait", "steps", "tell", "shown"]
        assert done.data("trial.told") == [{"text": f"of {value}", "broken": None}]
        assert any(frame.startswith(PREVIEW) for frame in done.binary)
        kinds = [kind for kind, _ in done.entry["status"]["messages"]]
        assert kinds == ["execution_start", "execution_cached", "execution_success"]


def test_one_of_two_is_cancelled_and_without_a_name_all_that_run(
    mill: Mill, clients: tuple[Client, Client]
) -> None:
    one, other = clients
    ids = [client.queue(mill.held(fresh())) for client in (one, other, one)]
    mill.until_running(*ids[:2])
    mill.server.post("/interrupt", {"prompt_id": ids[1]})
    stopped = other.follow(ids[1])
    assert [data["prompt_id"] for data in stopped.data("execution_interrupted")] == [ids[1]]
    mill.until_running(ids[0], ids[2])
    mill.server.post("/interrupt", b"")
    for prompt_id in (ids[0], ids[2]):
        mill.server.wait(prompt_id)
        assert mill.server.get(f"/api/jobs/{prompt_id}")["status"] == "cancelled"
    assert mill.running() == []


def test_results_are_known_where_they_were_made_until_memory_is_freed(
    mill: Mill, clients: tuple[Client, Client]
) -> None:
    ids = [client.queue(prompt) for client, prompt in zip(clients, PAINTED)]
    mill.pictures = [mill.server.picture(mill.server.wait(name), "7") for name in ids]
    assert len(list((mill.base / "results").glob("same_*.png"))) == 2  # none over the other
    mill.idle()
    query = {"prompt": PAINTED[1], "client_id": clients[1].client_id}
    kept = mill.server.post("/validate", query)[1]["plan"]["cached"]
    assert set(kept) >= {"1", "2", "3", "4", "5"}
    assert mill.server.get("/memory")["models"]
    mill.server.post("/free", {"unload_models": True, "free_memory": True})
    until(lambda: not mill.server.get("/memory")["models"])
    until(lambda: not mill.server.post("/validate", query)[1]["plan"]["cached"])


def test_a_killed_worker_costs_its_prompt_a_second_start_and_the_other_nothing(
    mill: Mill, clients: tuple[Client, Client]
) -> None:
    values = fresh(), fresh()
    ids = [c.queue(mill.held(v)) for c, v in zip(clients, values)]
    until(lambda: [mill.marked(value) for value in values] == [1, 1])
    os.kill(mill.pid(ids[0]), signal.SIGKILL)
    mill.release(*values)
    for client, prompt_id, value in zip(clients, ids, values):
        assert client.follow(prompt_id).shown("shown") == [value]
    assert [mill.marked(value) for value in values] == [2, 1]
    assert "ended (SIGKILL); starting it again" in mill.server.log


def test_native_code_that_crashes_fails_its_prompt_only_and_the_next_server_goes_on(
    mill: Mill, clients: tuple[Client, Client]
) -> None:
    mill.idle()
    g, value = graph(), fresh()
    good = clients[1].queue(mill.held(value))
    until(lambda: mill.marked(value) == 1)
    abort = g.node("TrialAbort", id="abort", value=1)
    g.node("TrialShow", value=abort.out(0))
    crashed = clients[0].run(g)
    assert not crashed.succeeded
    assert crashed.error["exception_type"] == "ServerCrashed"
    until(lambda: "Fatal Python error: Aborted" in mill.server.log)
    assert mill.running() == [good]
    mill.restart()  # what runs is left to it
    mill.release(value)
    assert mill.server.wait(good)["outputs"]["shown"]["value"] == [value]
    assert mill.marked(value) == 2
    alone = [mill.server.picture(mill.server.run(prompt), "7") for prompt in PAINTED]
    assert alone == mill.pictures
