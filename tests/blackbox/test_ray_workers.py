"""Workers in actors of a Ray cluster that is made for the test; skipped where Ray is missing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from tests.blackbox.client import connected, fresh
from tests.blackbox.test_crash import until
from tests.blackbox.test_workers import Mill
from tests.support.prompts import demo_prompt

pytest.importorskip("ray", reason="ray is not installed: pip install 'latentloom[ray]'")


@pytest.fixture(scope="module")
def mill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mill]:
    """A server with two workers in Ray actors."""
    mill = Mill(tmp_path_factory.mktemp("ray"), "--ray", "local", "--ray-workers", "2")
    yield mill
    mill.server.stop()


def test_two_actors_run_prompts_at_once_and_one_is_cancelled(mill: Mill) -> None:
    assert [worker["name"] for worker in mill.workers()] == ["ray-1", "ray-2"]
    with connected(mill.server) as one, connected(mill.server) as other:
        value = fresh()
        ids = [one.queue(mill.held(fresh())), other.queue(mill.held(value))]
        mill.until_running(*ids)
        mill.release(value)
        assert other.follow(ids[1]).shown("shown") == [value]
        mill.server.post("/interrupt", {"prompt_id": ids[0]})
        assert one.follow(ids[0]).data("execution_interrupted")


def test_an_actor_paints_and_its_previews_arrive(mill: Mill) -> None:
    with connected(mill.server) as client:
        prompt = demo_prompt(seed=fresh(), steps=4, size=(64, 64))
        done = client.run(prompt, extra_data={"preview_method": "latent2rgb"})
        assert done.succeeded
        assert len(done.data("progress")) == 4
        assert done.binary
        assert mill.server.picture(done.entry, "7").startswith(b"\x89PNG")


def test_a_killed_process_and_a_killed_actor_cost_a_second_start(mill: Mill) -> None:
    mill.idle()
    with connected(mill.server) as client:
        for kill_actor in (False, True):
            value = fresh()
            prompt_id = client.queue(mill.held(value))
            until(lambda: mill.marked(value) == 1)  # noqa: B023 - called before the loop goes on
            pid = mill.pid(prompt_id)
            os.kill(psutil.Process(pid).ppid() if kill_actor else pid, signal.SIGKILL)
            mill.release(value)
            assert client.follow(prompt_id).shown("shown") == [value]
            assert mill.marked(value) == 2


def test_a_lost_cluster_is_joined_again_and_the_server_lives(mill: Mill) -> None:
    mill.idle()
    with connected(mill.server) as client:
        value = fresh()
        prompt_id = client.queue(mill.held(value))
        until(lambda: mill.marked(value) == 1)
        family = psutil.Process(mill.server.process.pid).children(recursive=True)
        joined = next(p for p in family if any("ray_actors import" in word for word in p.cmdline()))
        joined.kill()
        mill.release(value)
        assert client.follow(prompt_id).shown("shown") == [value]


def test_the_server_ends_and_leaves_no_process(mill: Mill) -> None:
    left = psutil.Process(mill.server.process.pid).children(recursive=True)
    assert mill.server.stop() == 0
    until(lambda: not [process for process in left if process.is_running()])
