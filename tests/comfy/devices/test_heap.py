"""What the process's heap keeps, in processes of their own: the setting is for good."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from comfy.devices import heap
from comfy.devices.heap import _glibc

PROGRAM = """
import ctypes, json, resource, sys
from pathlib import Path
from comfy.devices.heap import HEAP

library = ctypes.CDLL(None)
malloc, free = library.malloc, library.free
malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
free.argtypes = [ctypes.c_void_p]
PAGE, SIZE = 4096, 64 * 2**20

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def fill():
    block = malloc(SIZE)
    ctypes.memset(block, 1, SIZE)
    return block

if sys.argv[1] == "keep":
    HEAP.keep_pages()
before, start = faults(), resident()  # before any block is free in the heap, which would serve
with HEAP.keeping_up_to(SIZE // 2):
    free(fill())
    within, mapped_anew = resident() - start, faults() - before
free(fill())
after_it = resident() - start
HEAP.tidy()
blocks = [fill() for _ in range(3)]
wall = malloc(1000)  # the heap cannot shrink below it
full = resident()
for block in blocks:
    free(block)
freed, before = resident(), faults()
free(fill())
again = faults() - before
HEAP.tidy()
after = resident() - (full - 3 * SIZE)
json.dump({
    "within": within / SIZE, "mapped anew": mapped_anew * PAGE / SIZE,
    "after it": after_it / SIZE,
    "kept": (freed - (full - 3 * SIZE)) / SIZE, "faults": again * PAGE / SIZE,
    "after": after / SIZE, "keeps": HEAP.keeps_pages,
    "given": HEAP.give_back(),
}, sys.stdout)
"""

needs_glibc = pytest.mark.skipif(_glibc() is None, reason="another C library")


def run(mode: str) -> dict[str, float]:
    command = [sys.executable, "-c", PROGRAM, mode]
    seen: dict[str, float] = json.loads(
        subprocess.run(command, capture_output=True, check=True).stdout
    )
    return seen


@needs_glibc
def test_freed_blocks_stay_for_the_next_operation_until_they_are_given_back() -> None:
    seen = run("keep")
    assert seen["keeps"] is True
    assert seen["kept"] == pytest.approx(3, abs=0.1)
    assert seen["faults"] < 0.1, "a block was mapped anew"
    assert seen["after"] == pytest.approx(0, abs=0.1)


@needs_glibc
def test_while_large_blocks_are_not_to_stay_they_go_back_at_once() -> None:
    seen = run("keep")
    assert seen["mapped anew"] == pytest.approx(1, abs=0.1)
    assert seen["within"] == pytest.approx(0, abs=0.1)
    assert seen["after it"] == pytest.approx(1, abs=0.1), "nothing stays any more"


@needs_glibc
def test_without_the_setting_nothing_is_kept_and_there_is_nothing_to_give_back() -> None:
    seen = run("leave")
    assert seen["keeps"] is False
    assert seen["given"] is False
    assert seen["kept"] == pytest.approx(0, abs=0.1)


def test_of_several_threads_the_smallest_size_counts_and_none_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, parameter: int, value: int) -> int:
            told.append((parameter, value))
            return 1

    monkeypatch.setattr(heap, "_glibc", Library)
    own = heap.Heap()
    assert own.keep_pages()
    first, second = own.keeping_up_to(64), own.keeping_up_to(32)
    with first:
        second.__enter__()  # of another thread, which goes on for longer
        assert told[-1] == (heap.M_MMAP_THRESHOLD, 32)
    assert told[-1] == (heap.M_MMAP_THRESHOLD, 32)
    second.__exit__(None, None, None)
    with pytest.raises(ValueError, match="decoder"), own.keeping_up_to(16):
        raise ValueError("decoder")
    assert told[-2:] == [(heap.M_MMAP_THRESHOLD, size) for size in (16, heap.LARGEST_IN_HEAP)]
