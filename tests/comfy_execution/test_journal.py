"""The durable queue: what is on disk, and what a new process makes of it."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comfy_execution import jobs, journal
from comfy_execution.items import ExecutionStatus, NotStoredError, SubmissionKind
from comfy_execution.journal import Journal, open_journal
from comfy_execution.journal_lock import JournalInUseError
from comfy_execution.queue import PromptQueue
from comfy_execution.recovery import StartMode, recover
from tests.comfy_execution.support import Flag, make
from tests.support.waiting import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parents[2]
SUCCESS = ExecutionStatus("success", True, [])


def item(prompt_id: str, number: float = 0) -> tuple[Any, ...]:
    extra = {"client_id": "me", "create_time": 5}
    secrets = {"api_key_comfy_org": "k"}
    return (number, prompt_id, {"1": make("Show", value=1)}, extra, ["1"], secrets)


class Process:
    """Queue and journal as one server process has them; ``die`` is what kill -9 leaves."""

    def __init__(self, path: Path, mode: StartMode = StartMode.RESUME, **how: bool) -> None:
        self.journal = Journal(path)
        self.queue = PromptQueue(journal=self.journal)
        recover(self.queue, self.journal, mode, **how)

    def waiting(self) -> list[str]:
        return [entry[1] for entry in self.queue.queue]

    def start(self) -> int:
        found = self.queue.get(timeout=0)
        assert found is not None
        return found[1]

    def die(self) -> None:
        self.journal.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "queue.sqlite"


def test_pending_prompts_come_back_in_order_with_their_client(path: Path) -> None:
    first = Process(path)
    for name, number in (("c", 2), ("a", 0), ("b", 0)):
        first.queue.put(item(name, number))
    first.die()
    second = Process(path)
    assert second.waiting() == ["a", "b", "c"]
    assert second.queue.queue[0][3]["client_id"] == "me"
    assert second.queue.submit(item("a")).kind is SubmissionKind.DUPLICATE


def test_prompts_that_arrive_together_are_accepted_or_refused_each_for_itself(path: Path) -> None:
    first = Process(path)
    first.queue.put(item("known"))
    given = [item("a"), item("known", 3), item("a"), (1, "short"), item("b"), item("\ud800")]
    changed = (0, "known", {"1": make("Show", value=2)}, {"client_id": "me"}, ["1"])
    kinds = [getattr(o, "kind", type(o)) for o in first.queue.submit_all([*given, changed])]
    accepted, duplicate = SubmissionKind.ACCEPTED, SubmissionKind.DUPLICATE
    assert kinds[:5] == [accepted, duplicate, duplicate, ValueError, accepted]
    assert kinds[5:] == [UnicodeEncodeError, SubmissionKind.CONFLICT]
    assert first.waiting() == ["known", "a", "b"]
    first.die()
    assert Process(path).waiting() == ["known", "a", "b"]


def test_the_running_prompt_is_tried_again_once(path: Path) -> None:
    first = Process(path)
    first.queue.put(item("runs", 5))
    first.start()
    first.queue.put(item("waits", 1))
    first.die()
    second = Process(path)
    assert second.waiting() == ["runs", "waits"]
    second.start()
    second.die()
    third = Process(path)
    assert third.waiting() == ["waits"]
    entry = third.queue.get_history("runs")["runs"]
    assert entry["status"]["messages"][-1][1]["exception_type"] == "ServerCrashed"
    assert jobs.job_from_history("runs", entry)["status"] == "failed"
    third.die()
    fourth = Process(path)
    assert list(fourth.queue.history) == ["runs"]


def test_prompts_of_later_processes_stay_behind_those_of_earlier_ones(path: Path) -> None:
    first = Process(path)
    for name in ("a", "b", "c"):
        first.queue.put(item(name))
    first.queue.task_done(first.start(), {"outputs": {}, "meta": {}}, SUCCESS)
    first.die()
    second = Process(path)
    second.queue.put(item("d"))
    assert second.queue.next_number() == 1
    second.die()
    assert Process(path).waiting() == ["b", "c", "d"]


def test_after_a_native_crash_the_running_prompt_is_not_tried_again(path: Path) -> None:
    first = Process(path)
    first.queue.put(item("crashes"))
    first.queue.put(item("waits"))
    first.start()
    first.die()
    second = Process(path, retry_running=False)
    assert second.waiting() == ["waits"]
    assert list(second.queue.history) == ["crashes"]


def test_a_prompt_that_was_stopped_does_not_come_back(path: Path) -> None:
    first = Process(path)
    first.queue.put(item("stopped"))
    first.queue.put(item("waits"))
    first.start()
    assert first.queue.interrupt("stopped")
    first.die()  # before the prompt has ended, as when it hangs in native code
    second = Process(path)
    assert second.waiting() == ["waits"]
    entry = second.queue.get_history("stopped")["stopped"]
    assert jobs.job_from_history("stopped", entry)["status"] == "cancelled"


def test_a_prompt_that_is_left_to_the_next_process_has_not_lost_its_second_try(path: Path) -> None:
    for _ in range(4):
        process = Process(path)
        if not process.waiting():
            process.queue.put(item("long"))
        key = process.start()
        process.queue.interrupt(for_good=False)
        assert process.queue.leave_to_next_process(key)
        assert process.queue.get_tasks_remaining() == 0
        process.die()
    last = Process(path)
    assert last.waiting() == ["long"]
    key = last.start()
    last.queue.interrupt("long")
    assert not last.queue.leave_to_next_process(key)


def test_start_modes(path: Path) -> None:
    first = Process(path)
    first.queue.put(item("a"))
    first.die()
    paused = Process(path, StartMode.PAUSE)
    assert paused.waiting() == ["a"]
    assert paused.queue.paused
    paused.die()
    cleared = Process(path, StartMode.CLEAR)
    assert cleared.waiting() == []
    cleared.die()
    assert Process(path).waiting() == []


def test_order_deletion_and_history_survive(path: Path) -> None:
    first = Process(path)
    for name in "abcd":
        first.queue.put(item(name))
    first.queue.reorder(["d", "c"])
    first.queue.delete_queue_item(lambda entry: entry[1] == "c")
    key = first.start()
    first.queue.task_done(key, {"outputs": {"1": {"text": ["t"]}}, "meta": {}}, SUCCESS)
    first.die()
    second = Process(path)
    assert second.waiting() == ["a", "b"]
    assert second.queue.get_history("d")["d"]["outputs"] == {"1": {"text": ["t"]}}
    assert second.queue.history.jobs()[0]["status"] == "completed"
    second.queue.delete_history_item("d")
    second.die()
    assert list(Process(path).queue.history) == []


def test_temporary_files_do_not_outlive_the_process_that_wrote_them(path: Path) -> None:
    first = Process(path)
    first.queue.put(item("a"))
    saved, preview = ({"filename": "x.png", "subfolder": "", "type": t} for t in ("output", "temp"))
    outputs = {"1": {"images": [preview, saved], "text": ["t"]}, "2": {"images": [preview]}}
    first.queue.task_done(first.start(), {"outputs": outputs, "meta": {}}, SUCCESS)
    assert first.queue.get_history("a")["a"]["outputs"] == outputs
    first.die()
    second = Process(path)
    left = {"1": {"images": [saved], "text": ["t"]}, "2": {}}
    assert second.queue.get_history("a")["a"]["outputs"] == left
    assert second.queue.history.jobs()[0]["outputs_count"] == 1
    second.die()


def test_secrets_are_not_written(path: Path) -> None:
    first = Process(path)
    first.queue.put((*item("a")[:5], {"api_key_comfy_org": "very-s3cret"}))
    first.die()
    assert b"very-s3cret" not in b"".join(
        file.read_bytes() for file in path.parent.iterdir() if file.is_file()
    )


def test_a_journal_belongs_to_one_process_at_a_time(path: Path) -> None:
    first = Process(path)
    with pytest.raises(JournalInUseError, match="in use by another"):
        Journal(path)
    first.die()
    Journal(path).close()


def test_a_second_server_in_the_same_folder_gets_and_keeps_its_own(tmp_path: Path) -> None:
    one, two = open_journal(tmp_path, 8188), open_journal(tmp_path, 8189)
    assert (one.path.name, two.path.name) == ("queue.sqlite", "queue-8189.sqlite")
    one.close()
    two.close()
    again = open_journal(tmp_path, 8189)
    assert again.path == two.path
    again.close()


def test_a_server_waits_for_its_predecessor_on_the_same_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_journal(tmp_path, 8188)
    ending = threading.Timer(0.05, before.close)
    ending.start()
    after = open_journal(tmp_path, 8188)
    assert after.path == before.path
    monkeypatch.setattr(journal, "_PREDECESSOR_S", 0.0)
    with pytest.raises(JournalInUseError, match="port 8188"):
        open_journal(tmp_path, 8188)
    after.close()


def test_a_server_starts_though_its_journal_is_broken(tmp_path: Path) -> None:
    (tmp_path / "queue.sqlite").write_bytes(b"<html>" * 1000)
    opened = open_journal(tmp_path, 8188)
    assert opened.recover().pending == []
    opened.close()
    aside = [file for file in tmp_path.iterdir() if ".broken-" in file.name]
    assert aside[0].read_bytes() == b"<html>" * 1000


def test_a_file_that_is_no_journal_is_refused(path: Path) -> None:
    path.write_bytes(b"<html>" * 1000)
    with pytest.raises(sqlite3.DatabaseError):
        Journal(path)


def test_the_history_in_the_journal_is_bounded(path: Path) -> None:
    first = Process(path)
    first.queue.history.limit = 2
    for name in "abc":
        first.queue.put(item(name))
        first.queue.task_done(first.start(), {"outputs": {}, "meta": {}}, SUCCESS)
    assert list(first.queue.history) == ["b", "c"]
    first.queue.history.max_bytes = 10
    first.queue.put(item("d"))
    first.queue.task_done(first.start(), {"outputs": {}, "meta": {}}, SUCCESS)
    first.die()
    assert list(Process(path).queue.history) == ["d"]


class Disk:
    """Stands for the flush of the log: slow, or broken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flushes = 0
        self.started, self.may_end = threading.Event(), threading.Event()
        self.error: OSError | None = None
        monkeypatch.setattr(journal, "_sync", self.flush)

    def flush(self, descriptor: int) -> None:
        os.fsync(descriptor)
        self.flushes += 1
        self.started.set()
        assert self.may_end.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_a_prompt_may_start_while_the_disk_is_busy_but_is_answered_afterwards(
    path: Path, disk: Disk
) -> None:
    process = Process(path)
    submitting = threading.Thread(target=process.queue.put, args=(item("a"),))
    submitting.start()
    assert disk.started.wait(PATIENCE_S)
    found = process.queue.get(timeout=PATIENCE_S)
    assert found is not None
    process.queue.task_done(found[1], {"outputs": {}, "meta": {}}, SUCCESS)
    assert submitting.is_alive()
    assert "a" in process.queue.history
    disk.may_end.set()
    submitting.join(PATIENCE_S)
    process.die()
    assert list(Process(path).queue.history) == ["a"]


def test_those_who_wait_for_the_disk_share_its_next_flush(path: Path, disk: Disk) -> None:
    process = Process(path)
    names = [f"p{index}" for index in range(20)]
    clients = [threading.Thread(target=process.queue.put, args=(item(n),)) for n in names]
    clients[0].start()
    assert disk.started.wait(PATIENCE_S)
    for client in clients[1:]:
        client.start()
    while process.queue.get_tasks_remaining() < len(names):
        threading.Event().wait(0.001)
    disk.may_end.set()
    for client in clients:
        client.join(PATIENCE_S)
    assert disk.flushes <= 3
    process.die()
    assert sorted(Process(path).waiting()) == sorted(names)


def test_a_duplicate_is_not_answered_before_the_first_is_on_disk(path: Path, disk: Disk) -> None:
    process = Process(path)
    answers: list[SubmissionKind] = []
    threads = [
        threading.Thread(target=lambda: answers.append(process.queue.submit(item("a")).kind))
        for _ in range(2)
    ]
    threads[0].start()
    assert disk.started.wait(PATIENCE_S)
    threads[1].start()
    threads[1].join(0.02)
    assert answers == []
    disk.may_end.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(kind.name for kind in answers) == ["ACCEPTED", "DUPLICATE"]
    process.die()


@pytest.mark.parametrize("state", ["waiting", "running", "finished"])
def test_a_prompt_that_the_disk_refuses_is_taken_back(path: Path, disk: Disk, state: str) -> None:
    process = Process(path)
    flag = process.queue.interrupt_flag = Flag()
    disk.error = OSError(5, "input/output error")
    refused: list[Exception] = []

    def submit() -> None:
        try:
            process.queue.put(item("a"))
        except NotStoredError as error:
            refused.append(error)

    submitting = threading.Thread(target=submit)
    submitting.start()
    assert disk.started.wait(PATIENCE_S)
    if state != "waiting":
        key = process.start()
        if state == "finished":
            process.queue.task_done(key, {"outputs": {}, "meta": {}}, SUCCESS)
    disk.may_end.set()
    submitting.join(PATIENCE_S)
    assert "input/output error" in str(refused[0])
    assert process.waiting() == []
    assert flag.value == (state == "running")
    assert list(process.queue.history) == (["a"] if state == "finished" else [])
    process.die()
    after = Process(path)
    assert after.waiting() == []
    if state == "running":  # it was told to stop, so it does not come back
        entry = after.queue.get_history("a")["a"]
        assert entry["status"]["messages"][-1][0] == "execution_interrupted"


@pytest.mark.parametrize(
    "change",
    [
        lambda queue: queue.get(timeout=0),
        lambda queue: queue.cancel("waits"),
        lambda queue: queue.interrupt("runs"),
        lambda queue: queue.wipe_queue(),
        lambda queue: queue.reorder(["later"]),
        lambda queue: queue.task_done(key_of(queue), {"outputs": {}, "meta": {}}, SUCCESS),
        lambda queue: queue.delete_history_item("ended"),
        lambda queue: queue.wipe_history(),
        lambda queue: queue.put(item("new")),
    ],
    ids=["get", "cancel", "interrupt", "wipe", "reorder", "done", "delete", "forget", "put"],
)
def test_whoever_looks_does_not_wait_for_a_disk_that_stands_still(path: Path, change: Any) -> None:
    process = Process(path)
    for name in ("ended", "runs", "waits", "later"):
        process.queue.put(item(name))
    process.queue.task_done(process.start(), {"outputs": {}, "meta": {}}, SUCCESS)
    process.start()
    with process.journal._lock:  # as a statement does that waits for the disk
        changing = threading.Thread(target=change, args=(process.queue,))
        changing.start()
        changing.join(0.02)
        assert changing.is_alive()
        process.queue.get_current_queue()
        process.queue.get_tasks_remaining()
        process.queue.get_history()
        assert not process.queue.is_running("nobody")
    changing.join(PATIENCE_S)
    assert not changing.is_alive()
    process.die()


def key_of(queue: PromptQueue) -> int:
    return next(iter(queue.currently_running))


def test_a_full_disk_refuses_prompts_and_keeps_what_was_accepted(path: Path) -> None:
    process = Process(path)
    process.queue.put(item("a"))
    pages = process.journal._db.execute("PRAGMA page_count").fetchone()[0]
    process.journal._db.execute(f"PRAGMA max_page_count = {pages}")
    large = (0, "large", {"1": make("Show", value="x" * 100_000)}, {}, ["1"])
    with pytest.raises(NotStoredError, match="prompt large was not queued; make room"):
        process.queue.put(large)
    assert process.waiting() == ["a"]
    process.journal._db.execute(f"PRAGMA max_page_count = {pages + 1000}")
    process.queue.put(large)  # its id is free
    process.die()
    assert Process(path).waiting() == ["a", "large"]


CHILD = textwrap.dedent(
    """
    import itertools, pathlib, sys
    from comfy_execution.items import ExecutionStatus
    from comfy_execution.journal import Journal
    from comfy_execution.queue import PromptQueue
    from comfy_execution.recovery import recover

    journal = Journal(pathlib.Path(sys.argv[1]))
    queue = PromptQueue(journal=journal)
    recover(queue, journal)
    prompt = {"1": {"class_type": "Show", "inputs": {"value": 1}}}
    print("ready", flush=True)
    for index in itertools.count(int(sys.argv[2])):
        name = f"p{index:06}"
        queue.put((index, name, prompt, {"client_id": "me"}, ["1"]))
        print("accepted", name, flush=True)
        if index % 3 == 0:
            item, key = queue.get(timeout=0)
            queue.task_done(key, {"outputs": {}, "meta": {}}, ExecutionStatus("success", True, []))
            print("finished", item[1], flush=True)
    """
)


@pytest.fixture
def child(path: Path) -> Iterator[Any]:
    running: list[subprocess.Popen[str]] = []

    def start(first_index: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(first_index)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.skipif(os.name == "nt", reason="kill -9 is a POSIX matter")
def test_kill_9_at_any_moment_loses_no_accepted_prompt(path: Path, child: Any) -> None:
    accepted: list[str] = []
    finished: set[str] = set()
    chance = random.Random(7)
    for generation in range(3):
        process = child(generation * 1000)
        assert process.stdout is not None
        stop_after = chance.randint(5, 60)
        for count, line in enumerate(process.stdout):
            if count >= stop_after:
                os.kill(process.pid, signal.SIGKILL)
                break
            note_line(line, accepted, finished)
        for line in process.stdout:  # what it had said before it died
            note_line(line, accepted, finished)
        process.wait()
    last = Process(path)
    known = [*last.queue.history, *last.waiting()]
    assert set(accepted) <= set(known)
    assert len(known) == len(set(known))
    assert finished <= set(last.queue.history)
    waiting = [name for name in last.waiting() if name in accepted]
    assert waiting == [name for name in accepted if name in set(last.waiting())]
    last.die()


def note_line(line: str, accepted: list[str], finished: set[str]) -> None:
    word, _, name = line.strip().partition(" ")
    if word == "accepted":
        accepted.append(name)
    elif word == "finished":
        finished.add(name)
