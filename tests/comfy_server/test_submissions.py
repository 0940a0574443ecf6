"""Prompts that arrive while others are being written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from comfy_execution.admission import Outcome
from comfy_execution.items import Submission, SubmissionKind
from comfy_server.submissions import Submissions
from tests.support.waiting import PATIENCE_S


class Disk:
    """Stands in for the queue: slow until told otherwise, and it remembers what came together."""

    def __init__(self) -> None:
        self.is_free = threading.Event()
        self.batches: list[list[str]] = []

    def submit_all(self, given: Sequence[Sequence[Any]]) -> list[Outcome]:
        self.is_free.wait(PATIENCE_S)
        self.batches.append([item[1] for item in given])
        if "breaks" in self.batches[-1]:
            raise OSError("the disk is full")
        return [ValueError("no") if item[1] == "bad" else _accepted(item[1]) for item in given]


def _accepted(name: str) -> Submission:
    return Submission(SubmissionKind.ACCEPTED, name, 0)


async def _given(submissions: Submissions, *names: str) -> list[asyncio.Task[Submission]]:
    tasks = [asyncio.create_task(submissions.submit((0, name))) for name in names]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_those_that_wait_for_the_disk_go_in_together_and_in_order() -> None:
    disk = Disk()
    submissions = Submissions(disk.submit_all)
    tasks = await _given(submissions, "a")
    tasks += await _given(submissions, "b", "c", "d")
    disk.is_free.set()
    answers = await asyncio.gather(*tasks)
    assert [answer.prompt_id for answer in answers] == ["a", "b", "c", "d"]
    assert disk.batches == [["a"], ["b", "c", "d"]]


async def test_each_is_told_of_its_own_mistake_only() -> None:
    disk = Disk()
    disk.is_free.set()
    tasks = await _given(Submissions(disk.submit_all), "a", "bad", "b")
    with pytest.raises(ValueError, match="no"):
        await tasks[1]
    assert (await tasks[0]).prompt_id == "a"
    assert (await tasks[2]).prompt_id == "b"


async def test_a_client_that_goes_takes_nobody_with_it() -> None:
    disk = Disk()
    submissions = Submissions(disk.submit_all)
    first, second = await _given(submissions, "a", "b")
    first.cancel()
    disk.is_free.set()
    assert (await second).prompt_id == "b"
    assert disk.batches == [["a", "b"]]


async def test_a_disk_that_fails_once_is_asked_again() -> None:
    disk = Disk()
    disk.is_free.set()
    submissions = Submissions(disk.submit_all)
    with pytest.raises(OSError, match="full"):
        await submissions.submit((0, "breaks"))
    assert (await submissions.submit((0, "a"))).prompt_id == "a"
