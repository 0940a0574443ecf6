"""The queue: order, duplicates, cancelling, history."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from comfy_execution import history, jobs
from comfy_execution.items import (
    CancelOutcome,
    ExecutionStatus,
    PromptIdConflictError,
    SubmissionKind,
)
from comfy_execution.queue import PromptQueue
from tests.comfy_execution.support import Flag, Recorder, make

SUCCESS = ExecutionStatus("success", True, [])


def item(prompt_id: str, number: float = 0, **extra: Any) -> tuple[Any, ...]:
    return (number, prompt_id, {"1": make("Show", value=1)}, extra, ["1"])


def ids(items: list[Any]) -> list[str]:
    return [entry[1] for entry in items]


@pytest.fixture
def sink() -> Recorder:
    return Recorder()


@pytest.fixture
def flag() -> Flag:
    return Flag()


@pytest.fixture
def queue(sink: Recorder, flag: Flag) -> PromptQueue:
    return PromptQueue(sink, interrupt=flag)


def finish_next(queue: PromptQueue) -> str:
    found = queue.get(timeout=0)
    assert found is not None
    queue.task_done(found[1], {"outputs": {}, "meta": {}}, SUCCESS)
    return str(found[0][1])


def test_smaller_numbers_run_first_and_equal_ones_in_order_of_arrival(queue: PromptQueue) -> None:
    for prompt_id, number in (("z", 1), ("b", 0), ("a", 0), ("front", -3), ("c", 7.5)):
        queue.put(item(prompt_id, number))
    assert [finish_next(queue) for _ in range(5)] == ["front", "b", "a", "z", "c"]


def test_every_change_tells_the_number_of_prompts(queue: PromptQueue, sink: Recorder) -> None:
    queue.put(item("a"))
    queue.put(item("b"))
    finish_next(queue)
    queue.wipe_queue()
    counts = [data["status"]["exec_info"]["queue_remaining"] for data in sink.named("status")]
    assert counts == [1, 2, 2, 1, 0]


def test_the_same_id_and_body_again_is_the_first_job(queue: PromptQueue) -> None:
    assert queue.submit(item("a", create_time=1)).kind is SubmissionKind.ACCEPTED
    assert queue.submit(item("a", create_time=2)).kind is SubmissionKind.DUPLICATE
    assert queue.submit(item("a", client_id="other")).kind is SubmissionKind.CONFLICT
    assert queue.get_tasks_remaining() == 1
    finish_next(queue)
    assert queue.submit(item("a", create_time=3)).kind is SubmissionKind.DUPLICATE
    with pytest.raises(PromptIdConflictError, match="'a'"):
        queue.put(item("a", client_id="other"))


@pytest.mark.parametrize("extra", [{}, {"note": "n"}])
def test_the_time_of_acceptance_is_kept_but_makes_no_difference(
    queue: PromptQueue, extra: dict[str, Any]
) -> None:
    assert queue.submit(item("a", create_time=1, **extra)).kind is SubmissionKind.ACCEPTED
    assert queue.submit(item("a", **extra, create_time=2)).kind is SubmissionKind.DUPLICATE
    finish_next(queue)
    assert queue.get_history("a")["a"]["prompt"][3] == {**extra, "create_time": 1}


def test_an_id_is_free_again_once_its_prompt_was_deleted(queue: PromptQueue) -> None:
    queue.put(item("a"))
    assert queue.delete_queue_item(lambda entry: entry[1] == "a")
    assert not queue.delete_queue_item(lambda entry: entry[1] == "a")
    assert queue.submit(item("a", other=1)).kind is SubmissionKind.ACCEPTED


def test_five_and_six_item_entries_are_taken_and_secrets_are_never_shown(
    queue: PromptQueue,
) -> None:
    queue.put((*item("six"), {"api_key_comfy_org": "s3cret"}))
    queue.put(item("five", auth_token_comfy_org="t0ken", note="n"))
    found = queue.get(timeout=0)
    assert found is not None
    assert found[0][5] == {"api_key_comfy_org": "s3cret"}
    queue.task_done(found[1], {"outputs": {}, "meta": {}}, SUCCESS)
    assert queue.get_current_queue()[1][0][3] == {"note": "n"}
    assert "s3cret" not in str(queue.get_history())
    with pytest.raises(ValueError, match="got 2 values"):
        queue.put((1, "short"))


def test_an_interruption_hits_the_named_running_prompt_only(queue: PromptQueue, flag: Flag) -> None:
    queue.put(item("a"))
    queue.put(item("b"))
    assert not queue.interrupt("a")
    queue.get(timeout=0)
    assert not queue.interrupt("b")
    assert not flag.value
    assert queue.interrupt("a")
    assert flag.value
    flag.clear()
    assert queue.interrupt()
    assert flag.value


def test_a_late_interruption_is_dropped_when_the_next_prompt_starts(
    queue: PromptQueue, flag: Flag
) -> None:
    queue.put(item("a"))
    queue.put(item("b"))
    found = queue.get(timeout=0)
    queue.interrupt("a")
    assert found is not None
    queue.task_done(found[1], {"outputs": {}, "meta": {}}, SUCCESS)
    queue.get(timeout=0)
    assert not flag.value


def test_cancelling_says_what_it_did(queue: PromptQueue) -> None:
    for name in ("done", "running", "waiting"):
        queue.put(item(name))
    finish_next(queue)
    queue.get(timeout=0)
    assert queue.cancel("running") is CancelOutcome.INTERRUPTED
    assert queue.cancel("waiting") is CancelOutcome.REMOVED
    assert queue.cancel("done") is CancelOutcome.FINISHED
    assert queue.cancel("nobody") is CancelOutcome.UNKNOWN
    assert queue.cancel("waiting") is CancelOutcome.FINISHED


@pytest.mark.parametrize("how", ["cancel", "delete", "clear"])
def test_a_prompt_that_was_taken_out_is_known_by_its_id_and_in_no_list(
    queue: PromptQueue, how: str
) -> None:
    told: list[str] = []
    queue.add_finished_listener(told.append)
    queue.put(item("a"))
    if how == "cancel":
        queue.cancel("a")
    elif how == "delete":
        queue.delete_queue_item(lambda entry: entry[1] == "a")
    else:
        queue.wipe_queue()
    assert told == ["a"]
    entry = queue.get_history("a")["a"]
    assert entry["prompt"] == [0, "a", {"1": make("Show", value=1)}, {}, ["1"]]
    assert jobs.job_from_history("a", entry)["status"] == "cancelled"
    assert queue.get_history() == {}
    assert queue.history.jobs() == []
    assert queue.submit(item("a")).kind is SubmissionKind.ACCEPTED  # its id is free
    assert queue.get_history("a") == {}
    assert finish_next(queue) == "a"
    assert queue.get_history("a")["a"]["status"]["completed"]


def test_prompts_that_were_taken_out_are_forgotten_in_time(
    queue: PromptQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_REMOVED", 3)
    for index in range(5):
        queue.put(item(str(index)))
    queue.wipe_queue()
    assert [bool(queue.get_history(str(index))) for index in range(5)] == [False] * 2 + [True] * 3
    monkeypatch.setattr(history, "MOST_REMOVED_BYTES", 10)
    queue.put(item("large"))
    queue.wipe_queue()
    assert queue.get_history("large") == {}
    queue.wipe_history()
    assert queue.get_history("4") == {}


def test_reordering_and_renumbering(queue: PromptQueue) -> None:
    for index, name in enumerate("abcd"):
        queue.put(item(name, index))
    assert queue.reorder(["d", "nobody", "b"]) == ["d", "b", "a", "c"]
    queue.put(item("last", 9))
    assert ids(queue.queue) == ["d", "b", "a", "c", "last"]
    assert queue.set_number("last", -1)
    assert not queue.set_number("nobody", 0)
    assert ids(queue.queue) == ["last", "d", "b", "a", "c"]


def test_many_prompts_are_taken_out_at_once(queue: PromptQueue, sink: Recorder) -> None:
    for index in range(6):
        queue.put(item(str(index), -index))
    sink.events.clear()
    assert queue.delete_items(["1", "4", "nobody", "1"], lambda entry: entry[1] != "4") == 1
    assert queue.delete_items(["2", "5"]) == 2
    assert queue.delete_items(["2"]) == 0
    assert ids(queue.queue) == ["4", "3", "0"]
    assert sink.names() == ["status", "status"]
    assert queue.set_number("4", 9)
    assert queue.delete_items(["4"]) == 1
    assert [finish_next(queue) for _ in range(2)] == ["3", "0"]


def test_a_paused_queue_hands_out_nothing(queue: PromptQueue) -> None:
    queue.put(item("a"))
    queue.pause()
    assert queue.get(timeout=0) is None
    queue.resume()
    assert finish_next(queue) == "a"


def test_a_flag_wakes_the_worker(queue: PromptQueue) -> None:
    threading.Timer(0.01, queue.set_flag, ("free_memory", True)).start()
    assert queue.get(timeout=5) is None
    assert queue.get_flags(reset=False) == {"free_memory": True}
    assert queue.get_flags() == {"free_memory": True}
    assert queue.get_flags() == {}


def test_the_history_shows_the_prompt_as_it_was_accepted(queue: PromptQueue) -> None:
    queue.put(item("a"))
    found = queue.get(timeout=0)
    assert found is not None
    found[0][2]["added"] = make("Number")
    queue.task_done(found[1], {"outputs": {"1": {"text": ["x"]}}, "meta": {}}, SUCCESS)
    entry = queue.get_history("a")["a"]
    assert list(entry["prompt"][2]) == ["1"]
    assert entry["outputs"] == {"1": {"text": ["x"]}}
    assert entry["status"] == {"status_str": "success", "completed": True, "messages": []}
    assert queue.get_history("nobody") == {}


def test_history_pages(queue: PromptQueue) -> None:
    for index in range(5):
        queue.put(item(str(index)))
        finish_next(queue)
    assert list(queue.get_history()) == ["0", "1", "2", "3", "4"]
    assert list(queue.get_history(max_items=2)) == ["3", "4"]
    assert list(queue.get_history(max_items=2, offset=1)) == ["1", "2"]
    assert list(queue.get_history(offset=3)) == ["3", "4"]
    assert list(queue.get_history(max_items=0)) == []
    assert queue.get_history(max_items=1, map_function=lambda entry: entry["prompt"][1]) == {
        "4": "4"
    }


def test_the_history_is_bounded(sink: Recorder) -> None:
    queue = PromptQueue(sink, history_limit=3)
    for index in range(5):
        queue.put(item(str(index)))
        finish_next(queue)
    assert list(queue.history) == ["2", "3", "4"]
    queue.delete_history_item("3")
    queue.delete_history_item("nobody")
    assert list(queue.history) == ["2", "4"]
    queue.wipe_history()
    assert len(queue.history) == 0


def test_the_history_is_bounded_in_bytes(queue: PromptQueue) -> None:
    queue.history.max_bytes = 4000
    for index in range(6):
        queue.put(item(str(index), noise=random.Random(index).randbytes(800).hex()))
        finish_next(queue)
    kept = list(queue.history)
    assert 1 < len(kept) < 6
    assert kept[-1] == "5"
    queue.put(item("huge", noise=random.Random(7).randbytes(9000).hex()))
    finish_next(queue)
    assert list(queue.history) == ["huge"]  # the newest one is always there
    queue.put(item("small"))
    finish_next(queue)
    assert list(queue.history) == ["small"]


def test_those_who_wait_are_told_when_a_prompt_is_in_the_history(queue: PromptQueue) -> None:
    told: list[str] = []
    queue.add_finished_listener(lambda name: told.append(name if queue.get_history(name) else ""))
    queue.put(item("a"))
    finish_next(queue)
    assert told == ["a"]
