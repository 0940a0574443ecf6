"""The worker thread: order of frames, flags, and nodes that do not want to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from comfy_execution.breaker import Breaker, CallGuard, ForcedInterruption
from comfy_execution.context import check_interrupt
from comfy_execution.executor import PromptExecutor
from comfy_execution.journal import Journal
from comfy_execution.options import ExecutorOptions
from comfy_execution.progress import get_progress_state, make_progress_hook
from comfy_execution.queue import PromptQueue
from comfy_execution.registry import NodeRegistry
from comfy_execution.worker import Worker, WorkerHooks
from tests.comfy_execution.support import CLASSES, Flag, Witness, make, node
from tests.support.waiting import PATIENCE_S


class House:
    """Queue, executor, breaker and a running worker."""

    def __init__(
        self, classes: dict[str, type], journal: Journal | None = None, **hooks: Any
    ) -> None:
        self.sink, self.flag = Witness(), Flag()
        self.queue = PromptQueue(self.sink, interrupt=self.flag, journal=journal)
        self.sink.queue = self.queue
        registry = NodeRegistry({**CLASSES, **classes})
        self.executor = PromptExecutor(registry, self.sink, self.flag, ExecutorOptions())
        self.breaker = Breaker(
            self.executor.guard, self.flag.exception, self.queue.is_running, patience_s=0.03
        )
        self.queue.add_interrupt_listener(self.breaker.follow)
        self.worker = Worker(self.queue, self.executor, WorkerHooks(**hooks))
        self.finished: dict[str, threading.Event] = {}
        self.queue.add_finished_listener(lambda name: self.event(name).set())
        self.worker.start()

    def event(self, name: str) -> threading.Event:
        return self.finished.setdefault(name, threading.Event())

    def post(self, name: str, prompt: dict[str, Any], **extra: Any) -> None:
        outputs = [key for key, value in prompt.items() if value["class_type"] == "Show"]
        self.queue.put((0, name, prompt, {"client_id": "me", **extra}, outputs))

    def wait(self, name: str) -> dict[str, Any]:
        assert self.event(name).wait(PATIENCE_S), f"prompt {name} does not end"
        entry: dict[str, Any] = self.queue.get_history(name)[name]
        return entry

    def ending(self, name: str) -> str:
        return str(self.wait(name)["status"]["messages"][-1][0])


@pytest.fixture
def house() -> Iterator[Any]:
    built: list[House] = []

    def build(classes: dict[str, type] | None = None, **hooks: Any) -> House:
        built.append(House(classes or {}, **hooks))
        return built[-1]

    yield build
    for each in built:
        assert each.worker.stop(PATIENCE_S)
        assert each.sink.unrecorded == []


PROMPT = {"1": make("Number", value=1), "2": make("Show", value=["1", 0])}


def test_frames_from_queueing_to_the_end(house: Any) -> None:
    home = house()
    home.post("a", PROMPT)
    home.wait("a")
    while home.sink.names()[-1] != "node_figures":  # for those who count; sent to nobody
        time.sleep(0.001)
    names = home.sink.names()
    assert names[:4] == ["status", "status", "execution_start", "execution_cached"]
    assert names[-4:-1] == ["execution_success", "status", "executing"]
    assert home.sink.events[-2].payload() == {"node": None, "prompt_id": "a"}
    assert set(home.sink.events[-1].payload()["nodes"]) == {"1", "2"}


def test_a_prompt_that_cannot_even_start_fails_alone(house: Any) -> None:
    def refuse(extra: Any) -> None:
        if extra.get("bad"):
            raise RuntimeError("no such preview method")

    home = house(before_prompt=refuse)
    home.post("a", PROMPT, bad=True)
    home.post("b", PROMPT)
    assert home.ending("a") == "execution_error"
    assert home.ending("b") == "execution_success"


def test_flags_unload_and_forget(house: Any) -> None:
    unloaded = threading.Event()
    home = house(unload_models=unloaded.set)
    home.post("a", PROMPT)
    home.wait("a")
    home.queue.set_flag("free_memory", True)
    assert unloaded.wait(PATIENCE_S)
    home.post("b", PROMPT)
    messages = home.wait("b")["status"]["messages"]
    assert messages[1][1]["nodes"] == []


def test_what_is_freed_before_a_prompt_comes_is_freed_before_it_runs(house: Any) -> None:
    home = house()
    home.post("a", PROMPT)
    home.wait("a")
    for name in "bcdefghijk":  # the worker wakes for whichever it sees first
        home.queue.set_flag("free_memory", True)
        home.post(name, PROMPT)
        assert home.wait(name)["status"]["messages"][1][1]["nodes"] == []


def test_a_worker_that_stops_leaves_its_prompt_to_the_next_process(tmp_path: Path) -> None:
    running = threading.Event()

    def run(self: Any) -> tuple[int]:
        running.set()
        while True:
            check_interrupt()

    journal = Journal(tmp_path / "queue.sqlite")
    home = House({"Endless": node("Endless", run=run)}, journal)
    home.post("long", {"1": make("Endless"), "2": make("Show", value=["1", 0])})
    home.post("waits", PROMPT)
    assert running.wait(PATIENCE_S)
    assert home.worker.stop(PATIENCE_S)
    assert home.queue.get_history() == {}
    assert home.queue.currently_running == {}
    found = journal.recover()
    assert [item[1] for item, _ in found.pending] == ["long", "waits"]
    assert found.retried == []
    journal.close()


def test_an_idle_worker_has_time_for_other_work(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfy_execution.worker.IDLE_CHECK_S", 0.01)
    idle = threading.Event()
    house(idle=idle.set)
    assert idle.wait(PATIENCE_S)


def test_work_between_prompts_that_fails_does_not_end_the_worker(house: Any) -> None:
    def broken() -> None:
        raise OSError("disk")

    home = house(collect=broken)
    home.post("a", PROMPT)
    home.wait("a")
    home.post("b", PROMPT | {"1": make("Number", value=2)})
    assert home.ending("b") == "execution_success"


def busy(started: threading.Event, swallow: type[BaseException] | None = None) -> type:
    """A node that computes for ever, in Python, and may swallow exceptions."""

    swallowed = (swallow,) if swallow is not None else ()

    def run(self: Any) -> tuple[int]:
        started.set()
        count = 0
        while True:
            try:
                while True:
                    count += 1
            except swallowed:
                continue

    return node("Busy", run=run)


@pytest.mark.parametrize("swallow", [None, Flag.Stopped])
def test_a_busy_node_is_broken_out_of(house: Any, swallow: type[BaseException] | None) -> None:
    started = threading.Event()
    home = house({"Busy": busy(started, swallow)})
    home.post("a", {"1": make("Busy"), "2": make("Show", value=["1", 0])})
    home.post("b", PROMPT)
    assert started.wait(PATIENCE_S)
    assert home.queue.interrupt("a")
    assert home.ending("a") == "execution_interrupted"
    assert home.ending("b") == "execution_success"


def test_a_busy_async_node_is_broken_out_of(house: Any) -> None:
    started = threading.Event()

    async def run(self: Any) -> tuple[int]:
        import asyncio

        await asyncio.sleep(0.001)
        started.set()
        while True:
            pass

    home = house({"Busy": node("Busy", run=run)})
    home.post("a", {"1": make("Busy"), "2": make("Show", value=["1", 0])})
    assert started.wait(PATIENCE_S)
    assert home.queue.interrupt("a")
    assert home.ending("a") == "execution_interrupted"


def test_a_guard_lets_nothing_through_outside_of_node_code() -> None:
    guard = CallGuard()
    assert not guard.raise_inside(ForcedInterruption)
    guard.enter()
    assert guard.is_inside
    guard.leave()
    assert not guard.raise_inside(ForcedInterruption)


def test_an_exception_on_its_way_is_taken_back_when_the_node_has_ended() -> None:
    guard = CallGuard()
    guard.enter()
    raiser = threading.Thread(target=guard.raise_inside, args=(ForcedInterruption,))
    hit = False
    try:
        with guard._lock:  # the raiser waits here: the node ends at this very moment
            raiser.start()
            guard._thread_id = None
        raiser.join()
    except ForcedInterruption:
        hit = True
    guard.leave()
    assert not hit


def test_the_breaker_asks_for_a_restart_when_nothing_helps() -> None:
    asked = threading.Event()
    breaker = Breaker(
        CallGuard(), Flag.exception, lambda prompt_id: not asked.is_set(),
        patience_s=0.01, restart=asked.set, restart_after_s=0.02,
    )  # fmt: skip
    breaker.follow("a")
    assert asked.wait(PATIENCE_S)


def test_an_endless_check_for_changes_is_broken_out_of(house: Any) -> None:
    started = threading.Event()

    def spin(_: type, **__: Any) -> None:
        started.set()
        while True:
            sum(range(50))

    checking = node("Checking", run=lambda _: (1,), IS_CHANGED=classmethod(spin))
    home = house({"Checking": checking})
    home.post("a", {"1": make("Checking"), "2": make("Show", value=["1", 0])})
    home.post("b", PROMPT)
    assert started.wait(PATIENCE_S)
    home.queue.interrupt("a")
    assert home.ending("a") == "execution_interrupted"
    assert home.ending("b") == "execution_success"


def test_a_cancellation_between_checks_for_changes_is_noticed(house: Any) -> None:
    checks: list[str] = []
    home: Any = None

    def check(_: type, name: str) -> str:
        checks.append(name)
        if len(checks) == 2:
            home.queue.interrupt("a")
        return name

    inputs = {"required": {"name": ("STRING",)}}
    checked = node("Checked", inputs, run=lambda _, name: (name,), IS_CHANGED=classmethod(check))
    home = house({"Checked": checked})
    prompt = {str(i): make("Checked", name=f"n{i}") for i in range(5)}
    prompt |= {f"s{i}": make("Show", value=[str(i), 0]) for i in range(5)}
    home.post("a", prompt)
    assert home.ending("a") == "execution_interrupted"
    assert len(checks) == 2


def test_an_instance_that_is_long_in_the_making_is_broken_out_of(house: Any) -> None:
    started = threading.Event()

    def make_slowly(_: Any) -> None:
        started.set()
        while True:
            sum(range(50))

    home = house({"Heavy": node("Heavy", run=lambda _: (1,), __init__=make_slowly)})
    home.post("a", {"1": make("Heavy"), "2": make("Show", value=["1", 0])})
    assert started.wait(PATIENCE_S)
    home.queue.interrupt("a")
    assert home.ending("a") == "execution_interrupted"


def test_a_prompt_whose_results_cannot_be_recorded_does_not_run_for_ever(
    house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = house()
    prepare = home.queue.history.prepare

    def choosy(prompt_id: str, entry: dict[str, Any], *others: Any) -> Any:
        if entry["outputs"]:
            raise RecursionError("too deep")
        return prepare(prompt_id, entry, *others)

    monkeypatch.setattr(home.queue.history, "prepare", choosy)
    home.post("a", PROMPT)
    assert home.wait("a")["status"]["completed"]
    assert home.queue.get_tasks_remaining() == 0
    home.post("b", PROMPT)
    assert home.ending("b") == "execution_success"


def test_threads_of_a_node_that_count_steps_are_stopped_too(house: Any) -> None:
    counting = threading.Event()

    def count(_: Any) -> tuple[int]:
        step = make_progress_hook()

        def work() -> None:
            for index in range(100_000):
                step(index, 100_000)
                counting.set()
                time.sleep(0.001)

        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()
        return (1,)

    home = house({"Pool": node("Pool", run=count)})
    home.post("a", {"1": make("Pool"), "2": make("Show", value=["1", 0])})
    home.post("b", PROMPT)
    assert counting.wait(PATIENCE_S)
    home.queue.interrupt("a")
    assert home.ending("a") == "execution_interrupted"
    assert home.ending("b") == "execution_success"


def test_a_thread_that_outlives_its_prompt_is_heard_no_more(house: Any) -> None:
    may_go_on, done = threading.Event(), threading.Event()

    def start(_: Any) -> tuple[int]:
        step = make_progress_hook()

        def late() -> None:
            may_go_on.wait(PATIENCE_S)
            step(1, 2)
            get_progress_state().send_text("1", "late")
            done.set()

        threading.Thread(target=late).start()
        return (1,)

    home = house({"Leaves": node("Leaves", run=start)})
    home.post("a", {"1": make("Leaves"), "2": make("Show", value=["1", 0])})
    home.wait("a")
    while home.sink.names()[-1] != "node_figures":
        time.sleep(0.001)
    before = len(home.sink.events)
    may_go_on.set()
    assert done.wait(PATIENCE_S)
    assert home.sink.names()[before:] == []
