"""The seam between server and workers, both ends in this process, and who gets which prompt."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from comfy_execution import events
from comfy_execution.executor import PromptExecutor
from comfy_execution.graph_utils import is_link
from comfy_execution.items import ItemTexts, QueueItem
from comfy_execution.journal import Journal
from comfy_execution.pending import PendingPrompts
from comfy_execution.planning import plan_prompt
from comfy_execution.queue import PromptQueue
from comfy_execution.registry import NodeRegistry
from comfy_execution.worker import Worker
from comfy_execution.workers import messages
from comfy_execution.workers.affinity import MOST_OVERTAKEN, NO_MODELS, Chooser, Models, models_of
from comfy_execution.workers.channel import ChannelClosed, Launcher, PipeChannel, WorkerChannel
from comfy_execution.workers.messages import Message
from comfy_execution.workers.place import Place
from comfy_execution.workers.pool import WorkerPool
from comfy_execution.workers.ray_bridge import RayLauncher
from comfy_execution.workers.seat import Seat, WorkerQueue
from tests.comfy_execution.support import Flag, NodeBase, Number, Recorder, Show, Witness
from tests.support.waiting import PATIENCE_S
from utils.save_turns import SaveTurns

CODEC = messages.PictureCodec(bytes, bytes)

# --- messages -------------------------------------------------------------------------------------

NODE = events.NodeProgress("5:1", "p", "5", None, "5", "running", 1.0, 2.0)
SAMPLES: list[Any] = [
    events.ExecutionStart("p", 1, "c"),
    events.ExecutionCached(("1", "2"), "p", 1, "c"),
    events.Executing("1", "p", "1", "c"),
    events.ProgressState("p", (NODE,), "c", True),
    events.Progress(1, 2, "p", "1", None),
    events.Executed("1", "1", {"images": [{"filename": "ü.png"}]}, "p", "c"),
    events.ExecutionSuccess("p", 1),
    events.ExecutionError("p", "1", "Node", ("1",), "no", "ValueError", ("line\n",), (), ("2",), 3),
    events.ExecutionInterrupted("p", "1", "Node", ("1",), 2, "c"),
    events.NodeFigures("p", {"1": {"wall_ms": 0.5}}),
    events.Preview("JPEG", b"\x00\xff", 64, {"node_id": "1"}, "c"),
    events.ProgressText("half \ud83d of it", "1", "p", "c"),
    events.CustomEvent("mine", {"value": [1, None]}, None),
]


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: type(event).__name__)
def test_an_event_crosses_the_seam_unchanged(event: Any) -> None:
    sent = messages.dump(messages.event_message(event, CODEC))
    came = messages.event_from(messages.load(sent), CODEC)
    assert type(came) is type(event)
    assert came.payload() == event.payload()
    assert (came.client_id, came.broadcast, came.name) == (
        event.client_id, event.broadcast, event.name,
    )  # fmt: skip
    assert getattr(came, "image", None) == getattr(event, "image", None)


def test_every_event_has_a_way_over_the_seam() -> None:
    kinds = {kind for kind in vars(events).values() if hasattr(kind, "broadcast")}
    named = {kind.__name__ for kind in kinds} - {"Event", "Status"}
    assert set(messages.EVENTS) == named == {type(event).__name__ for event in SAMPLES}


# --- who gets which prompt ------------------------------------------------------------------------


@dataclass
class Seatable:
    """A place, as far as choosing goes."""

    name: str
    models: Models = NO_MODELS
    last_used: int = 0
    client: object = ""
    without: set[str] = field(default_factory=set)

    def lacks(self, entry: Any) -> bool:
        return any(n["class_type"] in self.without for n in entry.item[2].values())


class Load(NodeBase):
    RETURN_TYPES = ("MODEL", "CLIP")


REGISTRY = NodeRegistry({"Load": Load, "Number": Number, "Show": Show})


def loading(name: str) -> dict[str, Any]:
    """A prompt that loads one model."""
    return {
        "1": {"class_type": "Load", "inputs": {"file": name}},
        "2": {"class_type": "Show", "inputs": {"value": ["1", 0]}},
    }


def waiting(*prompts: tuple[str, str | None], number: float = 0) -> PendingPrompts:
    """A queue of (model, client) pairs, ids "0", "1", ..."""
    pending = PendingPrompts()
    for place, (model, client) in enumerate(prompts):
        extra = {"client_id": client} if client else {}
        item: QueueItem = (number + place, str(place), loading(model), extra, ["2"], {})
        pending.add(item, ItemTexts.of(item), pending.next_arrival())
    return pending


def having(model: str) -> Models:
    """What a place has that ran this model."""
    return models_of(loading(model), REGISTRY)


def chosen(chooser: Chooser, pending: PendingPrompts, *places: Seatable) -> tuple[str, str]:
    """Takes out the next prompt; its id and its place."""
    found = chooser.choose(pending, places)
    assert found is not None
    pending.remove([found[0]])
    return found[0].prompt_id, found[1].name


def test_a_prompt_goes_to_the_worker_that_has_its_models() -> None:
    a, b = Seatable("a", having("x"), 1), Seatable("b", having("y"), 2)
    pending = waiting(("y", "me"), ("x", "me"))
    chooser = Chooser(REGISTRY)
    assert chosen(chooser, pending, a, b) == ("0", "b")
    assert chosen(chooser, pending, a) == ("1", "a")


def test_models_are_told_by_what_loaders_are_given() -> None:
    assert having("x") == having("x") != having("y")
    assert not models_of({"1": {"class_type": "Number", "inputs": {"value": 1}}}, REGISTRY)
    prompt = loading("x") | {"3": {"class_type": "Gone", "inputs": {}}, "4": {"class_type": "Load"}}
    assert len(models_of(prompt, REGISTRY)) == 1
    assert is_link(prompt["2"]["inputs"]["value"])


def test_without_its_models_anywhere_a_prompt_goes_where_none_are_lost() -> None:
    used, empty = Seatable("used", having("x"), 1), Seatable("empty")
    assert chosen(Chooser(REGISTRY), waiting(("y", "me")), used, empty) == ("0", "empty")
    older = Seatable("older", having("z"), 1)
    younger = Seatable("younger", having("x"), 2)
    assert chosen(Chooser(REGISTRY), waiting(("y", "me")), younger, older) == ("0", "older")


def test_among_equals_a_prompt_goes_where_its_client_s_results_are() -> None:
    mine = Seatable("mine", having("x"), 2, client="me")
    older = Seatable("older", having("x"), 1, client="you")
    for client, place in (("me", "mine"), ("you", "older"), ("they", "older")):
        assert chosen(Chooser(REGISTRY), waiting(("x", client)), mine, older) == ("0", place)


def test_a_fitting_prompt_overtakes_but_the_first_does_not_starve() -> None:
    place = Seatable("a", having("x"), 1)
    pending = waiting(("y", "me"), *[("x", f"other-{n}") for n in range(9)])
    chooser = Chooser(REGISTRY)
    order = [chosen(chooser, pending, place)[0] for _ in range(MOST_OVERTAKEN + 1)]
    assert order == ["1", "2", "3", "4", "0"]


def test_nobody_s_own_order_changes() -> None:
    place = Seatable("a", having("x"), 1)
    for client in ("me", None):
        pending = waiting(("y", client), ("x", client))
        assert chosen(Chooser(REGISTRY), pending, place) == ("0", "a")
    pending = waiting(("y", "me"), ("z", "you"), ("x", "you"))
    assert chosen(Chooser(REGISTRY), pending, place) == ("0", "a")


def test_what_was_put_in_front_is_not_overtaken() -> None:
    place = Seatable("a", having("x"), 1)
    pending = waiting(("y", "me"), ("x", "you"), number=-2)
    assert chosen(Chooser(REGISTRY), pending, place) == ("0", "a")


def test_a_prompt_whose_nodes_a_worker_lacks_waits_for_another() -> None:
    poor = Seatable("poor", without={"Load"})
    pending = waiting(("x", "me"), ("x", "you"))
    assert Chooser(REGISTRY).choose(pending, [poor]) is None
    item: QueueItem = (5, "n", {"1": {"class_type": "Number", "inputs": {}}}, {}, [], {})
    pending.add(item, ItemTexts.of(item), pending.next_arrival())
    assert chosen(Chooser(REGISTRY), pending, poor) == ("n", "poor")


# --- both ends ------------------------------------------------------------------------------------


class Wait(NodeBase):
    """Works until it is stopped, or told to go on."""

    RETURN_TYPES = ("INT",)
    go_on = threading.Event()

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("INT",)}}

    def run(self, value: int) -> tuple[int]:
        self.calls.append(value)
        while not self.go_on.wait(0.002):
            Seated.flags[threading.get_ident()].check()
        return (value,)


class OneFlag(Flag):
    """A flag for each worker, as each process has its own."""

    is_seen = True  # by the node

    def check(self) -> None:
        if self.value and self.is_seen:
            self.value = False
            raise self.exception


class Relay(Recorder):
    """What a worker's executor publishes to."""

    def __init__(self, channel: PipeChannel) -> None:
        super().__init__()
        self._channel = channel

    def publish(self, event: events.Event) -> None:
        with contextlib.suppress(ChannelClosed):
            self._channel.send(messages.event_message(event, CODEC))


class Seated(WorkerChannel):
    """A worker in threads of this process."""

    flags: ClassVar[dict[int, OneFlag]] = {}

    def __init__(self, name: str) -> None:
        here, self._there = socket.socketpair()
        self._pipe = PipeChannel(here.makefile("rb"), here.makefile("wb"))
        self._inside = PipeChannel(self._there.makefile("rb"), self._there.makefile("wb"))
        self.name = name
        self.code: int | None = 0
        threading.Thread(target=lambda: asyncio.run(self._work()), daemon=True).start()

    async def _work(self) -> None:
        registry, flag = NodeRegistry(CLASSES), OneFlag()
        self.queue = queue = WorkerQueue(interrupt=flag, history_limit=2)
        executor = PromptExecutor(registry, Relay(self._inside), flag)
        worker = Worker(queue, executor)

        async def plan(prompt: Any, outputs: Any, extra: Any) -> Any:
            return await plan_prompt(prompt, outputs, registry, executor.caches.outputs, extra)

        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        seat = Seat(
            self._inside, queue, {}, plan, list, lambda: loop.call_soon_threadsafe(ended.set)
        )
        worker.start()
        self.flags[worker._thread.ident or 0] = flag
        about = {"device": "none", "pid": 0, "host": self.name, "nodes": list(registry)}
        serving = asyncio.ensure_future(seat.serve(about))
        await asyncio.wait(
            {serving, asyncio.ensure_future(ended.wait())}, return_when="FIRST_COMPLETED"
        )
        await asyncio.to_thread(worker.stop)
        self.die(0)

    def die(self, code: int) -> None:
        """Ends as a process does that a signal (negative) or itself ends."""
        self.code = self.code or code
        with contextlib.suppress(OSError):
            self._there.shutdown(socket.SHUT_RDWR)

    def send(self, message: Mapping[str, Any]) -> None:
        self._pipe.send(message)

    def receive(self) -> Message:
        return self._pipe.receive()

    def kill(self) -> None:
        self.die(-signal.SIGKILL)

    def exit_code(self) -> int | None:
        return self.code


class House:
    """A queue with places; the workers are in threads."""

    def __init__(self, count: int = 2, journal: Journal | None = None) -> None:
        self.sink = NewsRecorder()
        self.queue = PromptQueue(self.sink, journal=journal)
        self.sink.queue = self.queue
        self.started: list[Seated] = []
        self.pool = WorkerPool(
            self.queue,
            [Place(str(n + 1), self, self.queue, self.sink, CODEC) for n in range(count)],
            NodeRegistry(CLASSES),
            self.sink,
        )
        for place in self.pool.places:
            place.start()
        self.pool.start()
        until(lambda: all(place.is_ready for place in self.pool.places))

    def launch(self, name: str) -> Seated:
        """Is the launcher, too."""
        self.started.append(Seated(name))
        return self.started[-1]

    def submit(self, name: str, class_type: str = "Wait", value: int = 0, **extra: Any) -> None:
        """Queues a prompt."""
        prompt = {
            "1": {"class_type": class_type, "inputs": {"value": value}},
            "2": {"class_type": "Show", "inputs": {"value": ["1", 0]}},
        }
        self.queue.submit((1, name, prompt, {"client_id": name, **extra}, ["2"]))

    def worker_of(self, prompt_id: str) -> Seated:
        """The worker that runs a prompt."""
        name = next(h["name"] for h in self.pool.health() if h["prompt_id"] == prompt_id)
        return [seated for seated in self.started if seated.name == name][-1]

    def ended(self, prompt_id: str) -> dict[str, Any]:
        """Waits for the end of a prompt; its history."""
        until(lambda: prompt_id in self.queue.get_history(prompt_id))
        entry: dict[str, Any] = self.queue.get_history(prompt_id)[prompt_id]
        return entry

    def kinds(self, prompt_id: str) -> list[str]:
        """Names of the messages in its history."""
        return [kind for kind, _ in self.ended(prompt_id)["status"]["messages"]]


class NewsRecorder(Witness):
    """The server, as places know it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[Any, ...]] = []
        self._item: ContextVar[QueueItem | None] = ContextVar("item", default=None)
        self.owners: list[tuple[str, str | None]] = []

    def publish(self, event: events.Event) -> None:
        super().publish(event)
        item = self._item.get()
        prompt_id = getattr(event, "prompt_id", None)
        if prompt_id is not None and item is not None:
            self.owners.append((prompt_id, item[1]))

    def send_sync(self, event: str | int, data: Any, sid: str | None = None) -> None:
        self.sent.append((event, data, sid))

    @contextlib.contextmanager
    def news_of(self, item: QueueItem | None) -> Iterator[None]:
        token = self._item.set(item)
        yield
        self._item.reset(token)

    def client_info(self, client_id: str | None) -> Any:
        return {"feature_flags": {}}


CLASSES: dict[str, Any] = {"Wait": Wait, "Number": Number, "Show": Show}


def until(holds: Callable[[], Any]) -> None:
    """Polls until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


@pytest.fixture
def house() -> Iterator[House]:
    """Two workers; what still runs at the end is let go."""
    Wait.go_on.clear()
    Wait.calls.clear()
    house = House()
    yield house
    Wait.go_on.set()
    house.pool.stop()
    assert house.sink.unrecorded == []


def running(house: House) -> set[str]:
    """Ids of prompts that a worker has begun."""
    begun = {e.prompt_id for e in list(house.sink.events) if isinstance(e, events.Executing)}
    return begun & {item[1] for item in house.queue.get_running()}


def test_two_prompts_run_at_once_and_each_event_is_news_of_its_own(house: House) -> None:
    for name in "ab":
        house.submit(name, value=ord(name))
    until(lambda: running(house) == {"a", "b"})
    Wait.go_on.set()
    for name in "ab":
        assert house.ended(name)["outputs"] == {"2": {"value": [ord(name)]}}
        assert house.kinds(name) == ["execution_start", "execution_cached", "execution_success"]
    until(
        lambda: len(
            [e for e in house.sink.events if e == events.Executing(None, "b", client_id="b")]
        )
    )
    assert {owner for _, owner in house.sink.owners} == {"a", "b"}
    assert all(prompt_id == owner for prompt_id, owner in house.sink.owners)


def test_a_stop_hits_its_prompt_whenever_it_comes(house: House) -> None:
    for name in "abcd":
        house.submit(name)
    until(lambda: running(house) == {"a", "b"})
    assert house.queue.interrupt("b")
    until(lambda: running(house) == {"a", "c"})
    assert house.kinds("b")[-1] == "execution_interrupted"
    assert house.queue.interrupt()  # all that run
    until(lambda: running(house) == {"d"})
    assert house.kinds("a")[-1] == house.kinds("c")[-1] == "execution_interrupted"
    for turn in range(20):  # at the very moment a prompt is handed over
        name = f"early-{turn}"
        house.submit(name)
        until(lambda: house.queue.is_running(name))  # noqa: B023
        house.queue.interrupt(name)
        assert house.kinds(name)[-1] == "execution_interrupted"
    assert running(house) == {"d"}


def test_a_worker_that_is_killed_gives_its_prompt_a_second_start_and_no_third(house: House) -> None:
    house.submit("a", value=1)
    house.submit("b", value=2)
    until(lambda: running(house) == {"a", "b"})
    house.worker_of("a").die(-signal.SIGKILL)
    until(lambda: Wait.calls.count(1) == 2)
    house.worker_of("a").die(-signal.SIGKILL)
    assert house.ended("a")["status"]["messages"][-1][1]["exception_type"] == "ServerCrashed"
    assert Wait.calls.count(1) == 2
    assert running(house) == {"b"}
    told = [e for e in house.sink.events if isinstance(e, events.ExecutionError)]
    assert [(e.prompt_id, e.client_id) for e in told] == [("a", "a")]
    Wait.go_on.set()
    assert house.ended("b")["status"]["completed"]
    house.submit("c", "Number", 3)
    assert house.ended("c")["outputs"] == {"2": {"value": [3]}}


def test_native_code_that_crashes_a_worker_is_not_tried_again(house: House) -> None:
    house.submit("a", value=1)
    until(lambda: running(house) == {"a"})
    house.worker_of("a").die(-signal.SIGSEGV)
    assert house.ended("a")["status"]["messages"][-1][0] == "execution_error"
    assert Wait.calls == [1]


def test_a_stopped_prompt_whose_worker_had_to_end_is_cancelled(house: House) -> None:
    house.submit("a", value=1)
    until(lambda: running(house) == {"a"})
    for flag in Seated.flags.values():
        flag.is_seen = False
    house.queue.interrupt("a")
    house.worker_of("a").die(75)
    assert house.kinds("a") == ["execution_interrupted"]
    assert house.sink.named("execution_interrupted")[-1]["prompt_id"] == "a"
    assert Wait.calls == [1]


def test_a_worker_that_cannot_even_end_itself_is_killed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfy_execution.workers.place.GRACE_S", 0.02)
    for place in house.pool.places:
        place._kill_after_s = 0.02
    for flag in Seated.flags.values():
        flag.is_seen = False
    house.submit("a", value=1)
    until(lambda: running(house) == {"a"})
    house.queue.interrupt("a")
    assert house.kinds("a") == ["execution_interrupted"]
    house.submit("b", "Number", 3)
    assert house.ended("b")["outputs"] == {"2": {"value": [3]}}


def test_a_prompt_that_no_worker_can_run_fails_with_what_is_missing(house: House) -> None:
    house.submit("a", "Rare")
    message = house.ended("a")["status"]["messages"][-1][1]["exception_message"]
    assert "worker 1: Rare; worker 2: Rare" in message
    until(lambda: house.sink.owners.count(("a", "a")) == 2)  # the error, and that nothing runs


def test_a_dry_run_asks_the_worker_and_free_makes_all_forget(house: House) -> None:
    house.submit("a", "Number", 5)
    entry = house.ended("a")
    until(lambda: not house.queue.get_running())
    plan = asyncio.run(house.pool.plan(entry["prompt"][2], ["2"], {"client_id": "a"}))
    assert plan is not None
    assert set(plan.cached) == {"1", "2"}
    house.queue.set_flag("free_memory", True)

    def knows_nothing() -> bool:
        planned = asyncio.run(house.pool.plan(entry["prompt"][2], ["2"], {"client_id": "a"}))
        return planned is not None and not planned.cached

    until(knows_nothing)


def test_a_prompt_that_a_node_submits_is_the_server_s(monkeypatch: pytest.MonkeyPatch) -> None:
    class Again(NodeBase):
        RETURN_TYPES = ("INT",)

        def run(self) -> tuple[int]:
            prompt = {
                "1": {"class_type": "Number", "inputs": {"value": 7}},
                "2": {"class_type": "Show", "inputs": {"value": ["1", 0]}},
            }
            queue = home.started[0].queue
            queue.put((0, "again", prompt, {}, ["2"]))
            assert queue.get_tasks_remaining() == 1
            return (1,)

    monkeypatch.setitem(CLASSES, "Again", Again)
    home = House(1)
    home.queue.submit((5, "first", {"1": {"class_type": "Again"}}, {}, ["1"]))
    assert home.ended("again")["outputs"] == {"2": {"value": [7]}}
    assert home.ended("first")["status"]["completed"]
    home.pool.stop()


def test_what_runs_at_the_end_waits_for_the_next_process(tmp_path: Path) -> None:
    Wait.go_on.clear()
    journal = Journal(tmp_path / "queue.sqlite")
    house = House(1, journal)
    for name in "ab":
        house.submit(name)
    until(lambda: running(house) == {"a"})
    assert house.pool.stop()
    left = journal.recover()
    assert [item[1] for item, _ in left.pending] == ["a", "b"]
    assert not left.retried
    journal.close()


def test_what_was_stopped_is_not_started_again_by_a_dead_worker(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "queue.sqlite")
    queue = PromptQueue(journal=journal)
    queue.submit((0, "a", {}, {}, []))
    found = queue.get()
    assert found is not None
    queue.interrupt("a")
    assert not queue.put_back(found[1])
    journal.close()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_worker_that_dies_before_it_has_its_prompt_keeps_it_from_no_other(
    is_stopped: bool,
) -> None:
    sink = NewsRecorder()
    queue = PromptQueue(sink)
    place = Place("1", cast(Launcher, None), queue, sink, CODEC)  # it has no worker any more
    queue.submit((1, "a", {}, {"client_id": "me"}, []))
    found = queue.get()
    assert found is not None
    place.take(found[0], NO_MODELS)
    if is_stopped:
        place.stop("a")
    place.run(found[1])
    assert place.health()["prompt_id"] is None
    assert not queue.get_running()
    if is_stopped:
        messages = queue.get_history("a")["a"]["status"]["messages"]
        assert [kind for kind, _ in messages] == ["execution_interrupted"]
        assert sink.events[-1] == events.Executing(None, "a", client_id="me")
    else:
        again = queue.get(timeout=0)
        assert again is not None
        assert again[0][1] == "a"


class Starting(WorkerChannel):
    """A worker that never gets ready."""

    def __init__(self) -> None:
        self._killed = threading.Event()

    def send(self, message: Mapping[str, Any]) -> None:
        """Nobody reads it."""

    def receive(self) -> Message:
        self._killed.wait()
        raise ChannelClosed

    def kill(self) -> None:
        self._killed.set()

    def exit_code(self) -> int | None:
        return -signal.SIGKILL


def test_a_worker_that_still_starts_does_not_hold_the_end_up() -> None:
    class Launcher:
        def launch(self, name: str) -> WorkerChannel:
            return Starting()

    sink = NewsRecorder()
    queue = PromptQueue(sink)
    place = Place("1", Launcher(), queue, sink, CODEC)
    pool = WorkerPool(queue, [place], NodeRegistry(CLASSES), sink)
    place.start()
    assert pool.stop(timeout_s=10.0)  # it would have been false after all of them


def test_a_prompt_that_is_put_back_comes_first_and_once() -> None:
    queue = PromptQueue()
    for number, name in ((3, "a"), (-1, "b"), (0, "c")):
        queue.submit((number, name, {}, {}, []))
    taken = [queue.get() for _ in range(3)]
    assert [t[0][1] for t in taken if t] == ["b", "c", "a"]
    last = taken[2]
    assert last is not None
    queue.submit((-7, "d", {}, {}, []))
    assert queue.put_back(last[1])
    again = queue.get()
    assert again is not None
    assert again[0][1] == "a"
    assert not queue.put_back(again[1])


# --- what is around them --------------------------------------------------------------------------


def test_a_missing_ray_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(OSError, match=r"-m pip install ray"):
        RayLauncher("local", 1, [], {})


def test_who_saves_under_a_prefix_first_is_waited_for(tmp_path: Path) -> None:
    one, other = SaveTurns(str(tmp_path / "locks")), SaveTurns(str(tmp_path / "locks"))
    one.take(str(tmp_path), "picture")
    one.take(str(tmp_path), "picture")  # a node may ask twice
    other.take(str(tmp_path), "another")
    other.give_back()
    done = threading.Event()

    def wait() -> None:
        other.take(str(tmp_path), "picture")
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not done.wait(0.05)
    one.give_back()
    thread.join(PATIENCE_S)
    assert done.is_set()
    other.give_back()


def test_who_waits_to_save_can_be_stopped(tmp_path: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    one = SaveTurns(str(tmp_path))
    one.take(str(tmp_path), "picture")
    with pytest.raises(KeyboardInterrupt):
        SaveTurns(str(tmp_path), stop).take(str(tmp_path), "picture")
    one.give_back()


def test_a_disk_without_locks_is_said_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", refuse)
    with pytest.raises(OSError, match=r"cannot be locked \(No locks available\).*--temp-directory"):
        SaveTurns(str(tmp_path)).take(str(tmp_path), "picture")
