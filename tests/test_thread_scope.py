"""Threads and pools that a node starts work in the folders of its user, and of nobody else."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest

import folder_paths
from utils.thread_scope import inherited_by_threads


@pytest.fixture(autouse=True)
def inheriting() -> Iterator[None]:
    with inherited_by_threads():
        yield


def whose() -> str:
    return folder_paths.scoped_user()


def by_thread(ask: Callable[[], str]) -> str:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    return found[0]


def by_subclass(ask: Callable[[], str]) -> str:
    class Asking(threading.Thread):
        found = ""

        def run(self) -> None:
            self.found = ask()

    thread = Asking(daemon=True)
    thread.start()
    thread.join()
    return thread.found


def by_replaced_run(ask: Callable[[], str]) -> str:
    found: list[str] = []
    thread = threading.Thread()
    thread.run = lambda: found.append(ask())  # type: ignore[method-assign]
    thread.start()
    thread.join()
    return found[0]


def by_timer(ask: Callable[[], str]) -> str:
    found: list[str] = []
    timer = threading.Timer(0, lambda: found.append(ask()))
    timer.start()
    timer.join()
    return found[0]


def by_pool(ask: Callable[[], str]) -> str:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask).result()


def by_map(ask: Callable[[], str]) -> str:
    with ThreadPoolExecutor(2) as pool:
        (found,) = set(pool.map(lambda _: ask(), range(5)))
        return found


def by_old_pool(ask: Callable[[], str]) -> str:
    with ThreadPool(1) as pool:
        return str(pool.apply(ask))


def by_loop(ask: Callable[[], str]) -> str:
    async def run() -> str:
        loop = asyncio.get_running_loop()
        plain = await loop.run_in_executor(None, ask)
        assert await asyncio.to_thread(ask) == plain
        return plain

    return asyncio.run(run())


WAYS = [
    by_thread, by_subclass, by_replaced_run, by_timer, by_pool, by_map, by_old_pool, by_loop,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_thread_has_the_scope_in_which_it_was_started(way: Callable[..., str]) -> None:
    assert way(whose) == ""
    with folder_paths.user_scope("ann"):
        assert way(whose) == "ann"
        assert way(lambda: by_thread(lambda: by_pool(whose))) == "ann"
        assert way(folder_paths.get_output_directory).endswith("ann")
    with folder_paths.user_scope(None):
        assert way(whose) == "*"
    assert way(whose) == ""


def test_a_pool_that_outlives_a_prompt_works_for_each_giver_in_turn() -> None:
    with ThreadPoolExecutor(1) as pool:
        for user in ("ann", "bob"):
            with folder_paths.user_scope(user):
                assert pool.submit(whose).result() == user
        assert pool.submit(whose).result() == ""


def test_what_a_thread_asks_for_and_saves_counts_for_its_user() -> None:
    saved: list[str] = []
    with folder_paths.user_scope("ann", before_save=lambda: saved.append("ann")):
        by_thread(folder_paths.get_output_directory)
        by_pool(lambda: str(folder_paths.require_room()))
        assert folder_paths.scope_uses() == 1
    assert saved == ["ann"]


def test_a_threads_own_changes_stay_with_it_and_it_leaves_nothing() -> None:
    def other() -> str:
        with folder_paths.user_scope("bob"):
            return whose()

    with folder_paths.user_scope("ann"):
        assert by_thread(other) == "bob"
        assert whose() == "ann"
        thread = threading.Thread(target=whose)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError):
            thread.start()
    gc.disable()
    try:
        gone = weakref.ref(started := threading.Thread(target=whose))
        with folder_paths.user_scope("ann"):
            started.start()
            started.join()
        del started
        assert gone() is None
    finally:
        gc.enable()


def test_errors_of_given_work_arrive_and_the_originals_come_back() -> None:
    changed: Any = (threading.Thread.start, ThreadPoolExecutor.submit)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result()
    with inherited_by_threads():
        pass
    assert (threading.Thread.start, ThreadPoolExecutor.submit) == changed
