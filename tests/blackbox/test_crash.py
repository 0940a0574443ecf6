"""Deaths of the process: native code, kill -9, the end of the supervisor. No prompt is lost.

The tests share one folder and run in order, each going on where the one before left off.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from comfy_execution.graph_utils import GraphBuilder
from tests.blackbox.client import END_TIMEOUT_S, connected, fresh, graph
from tests.blackbox.conftest import arguments
from tests.blackbox.marks import Marks
from tests.support.server_process import ServerProcess, start_server
from tests.support.waiting import PATIENCE_S


class Fort(Marks):
    """A server that dies and comes back, in the same folder and on the same port."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.arguments = [*arguments(base), "--restart-after", "1.5"]
        self.server: ServerProcess = start_server(base, *self.arguments)

    def restart(self) -> None:
        """Starts a new server at once, as launchers do."""
        self.server = start_server(self.base, *self.arguments, port=self.server.port)

    @property
    def child(self) -> int:
        """Process that serves; its parent is the supervisor."""
        return psutil.Process(self.server.process.pid).children()[0].pid

    def queue(self, prompt: GraphBuilder, **fields: Any) -> str:
        """Posts a prompt that must be accepted."""
        status, answer = self.server.post("/prompt", {"prompt": prompt.finalize(), **fields})
        assert status == 200, answer
        return str(answer["prompt_id"])

    def history(self, prompt_id: str) -> Any:
        """Waits for the end of a prompt, whoever dies meanwhile."""
        return until(lambda: self.ask(f"/history/{prompt_id}").get(prompt_id))

    def ask(self, path: str) -> Any:
        """GETs JSON; empty while nobody serves."""
        try:
            return self.server.get(path, timeout_s=5)
        except OSError:
            return {}


def until(found: Callable[[], Any]) -> Any:
    """Polls until something is found."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while time.monotonic() < deadline:
        value = found()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def has_ended(pid: int) -> bool:
    """Whether a process runs no more; an orphan that nobody has waited for yet counts as ended."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def fort(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fort]:
    """The server of this module."""
    fort = Fort(tmp_path_factory.mktemp("fort"))
    yield fort
    fort.server.stop()


def test_a_native_crash_costs_its_own_job_only(fort: Fort) -> None:
    g = graph()
    abort = g.node("TrialAbort", id="abort", value=1)
    g.node("TrialShow", value=abort.out(0))
    before, after = fresh(), fresh()
    fort.server.post("/api/queue/pause", {})
    done = fort.queue(fort.mark(before))
    crashing = fort.queue(g, client_id="unlucky")
    waiting = fort.queue(fort.mark(after), client_id="patient")
    first_child = fort.child
    fort.server.post("/api/queue/resume", {})

    entry = fort.history(waiting)
    assert entry["outputs"]["shown"]["value"] == [after]
    assert entry["prompt"][3]["client_id"] == "patient"
    assert fort.history(done)["outputs"]["shown"]["value"] == [before]
    assert (fort.marked(before), fort.marked(after)) == (1, 1)
    crashed = fort.history(crashing)
    kind, error = crashed["status"]["messages"][-1]
    assert (kind, error["exception_type"]) == ("execution_error", "ServerCrashed")
    assert fort.ask(f"/api/jobs/{crashing}")["status"] == "failed"
    assert fort.child != first_child
    log = fort.server.log
    assert "Fatal Python error: Aborted" in log
    assert "trial-nodes/hostile.py" in log  # whose node it was
    with connected(fort.server, "patient") as client:
        assert client.run(fort.mark(fresh())).succeeded


def test_a_killed_child_comes_back_with_its_queue_in_order(fort: Fort) -> None:
    values = [fresh() for _ in range(4)]
    ids = [fort.queue(fort.held(values[0]), client_id="me")]
    until(lambda: fort.marked(values[0]) == 1)
    ids += [fort.queue(fort.mark(v), client_id=f"me-{v}") for v in values[1:3]]
    ids.append(fort.queue(fort.mark(values[3]), front=True))
    os.kill(fort.child, signal.SIGKILL)
    fort.release(values[0])

    entries = [fort.history(prompt_id) for prompt_id in ids]
    assert [entry["outputs"]["shown"]["value"][0] for entry in entries] == values
    assert [fort.marked(value) for value in values] == [2, 1, 1, 1]
    order = list(fort.server.get("/history?max_items=4"))
    assert order == [ids[0], ids[3], ids[1], ids[2]]
    assert entries[1]["prompt"][3]["client_id"] == f"me-{values[1]}"


def test_with_the_supervisor_the_child_ends_and_the_port_is_free(fort: Fort) -> None:
    value = fresh()
    running = fort.queue(fort.held(value))
    waiting = [fort.queue(fort.mark(fresh())) for _ in range(2)]
    until(lambda: fort.marked(value) == 1)
    child = fort.child
    fort.server.process.kill()
    fort.server.process.wait()
    fort.restart()
    until(lambda: has_ended(child))
    fort.release(value)
    for prompt_id in (running, *waiting):
        assert fort.history(prompt_id)["status"]["status_str"] == "success"
    assert fort.marked(value) == 2


def test_a_prompt_that_dies_twice_is_given_up(fort: Fort) -> None:
    value = fresh()
    running = fort.queue(fort.held(value))
    for times in (1, 2):
        until(lambda: fort.marked(value) == times)  # noqa: B023 - called before the loop goes on
        os.kill(fort.child, signal.SIGKILL)
        until(lambda: not fort.ask("/prompt"))
    entry = fort.history(running)
    assert entry["status"]["messages"][-1][1]["exception_type"] == "ServerCrashed"
    assert fort.marked(value) == 2
    after = fresh()
    assert fort.history(fort.queue(fort.mark(after)))["outputs"]["shown"]["value"] == [after]


def test_what_was_cancelled_does_not_come_back(fort: Fort) -> None:
    value = fresh()
    stuck = fort.queue(fort.mark(value, seconds=60.0))
    until(lambda: fort.marked(value) == 1)
    fort.server.post("/interrupt", {"prompt_id": stuck})
    os.kill(fort.child, signal.SIGKILL)
    fort.history(stuck)
    assert fort.ask(f"/api/jobs/{stuck}")["status"] == "cancelled"
    assert fort.marked(value) == 1


def test_native_code_that_never_ends_costs_a_restart(fort: Fort) -> None:
    g = graph()
    stuck = g.node("TrialNative", id="stuck", value=fresh(), seconds=600.0)
    g.node("TrialShow", value=stuck.out(0))
    hanging, after = fort.queue(g, client_id="unlucky"), fresh()
    waiting = fort.queue(fort.mark(after), client_id="patient")
    until(lambda: any(item[1] == hanging for item in fort.ask("/queue")["queue_running"]))
    child = fort.child
    assert fort.server.post(f"/api/jobs/{hanging}/cancel", {}) == (200, {"cancelled": True})

    entry = fort.history(waiting)
    assert entry["outputs"]["shown"]["value"] == [after]
    assert entry["prompt"][3]["client_id"] == "patient"
    assert fort.marked(after) == 1
    assert fort.child != child
    assert has_ended(child)
    assert fort.ask(f"/api/jobs/{hanging}")["status"] == "cancelled"
    kinds = [kind for kind, _ in fort.history(hanging)["status"]["messages"]]
    assert kinds == ["execution_interrupted"]


def test_a_server_that_is_told_to_end_leaves_its_work_to_the_next(fort: Fort) -> None:
    value = fresh()
    running, waiting = fort.queue(fort.held(value)), fort.queue(fort.mark(fresh()))
    until(lambda: fort.marked(value) == 1)
    fort.server.process.terminate()
    fort.server.process.wait(PATIENCE_S)
    fort.release(value)
    fort.restart()
    entry = fort.history(running)
    assert entry["outputs"]["shown"]["value"] == [value]
    assert fort.marked(value) == 2
    assert fort.history(waiting)["status"]["status_str"] == "success"


def test_an_ordinary_end_leaves_no_process(fort: Fort) -> None:
    child = fort.child
    begin = time.monotonic()
    assert fort.server.stop() == 0
    until(lambda: has_ended(child))
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    assert time.monotonic() - begin < 5 * max(1.0, busy)
