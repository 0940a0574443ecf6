"""What the machine offers, and the advice after memory ran out."""

from __future__ import annotations

import pytest
import torch

from comfy.devices import memory, report


def test_the_statistics_name_the_primary_device_with_its_memory() -> None:
    stats = report.system_stats()
    assert stats["system"]["ram_total"] >= stats["system"]["ram_free"] > 0
    assert stats["system"]["pytorch_version"] == torch.__version__
    assert stats["devices"][0]["vram_total"] >= stats["devices"][0]["vram_free"] > 0


def test_only_lack_of_memory_gets_the_advice() -> None:
    assert report.free_after_oom(ValueError("no")) is None
    advice = report.free_after_oom(torch.OutOfMemoryError("full"))
    assert advice is not None
    assert "--lowvram" in advice


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate "
                "memory: you tried to allocate 274877906944 bytes. Error code 12"
            ),
            "256.0 GiB were asked for",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0"), "20.0"),
        (MemoryError("Unable to allocate 5.00 TiB for an array with shape (5,)"), "5120.0 GiB"),
        (MemoryError(), "Memory ran out. "),
    ],
)
def test_whoever_noticed_it_lack_of_memory_reads_the_same(error: BaseException, asked: str) -> None:
    said = report.free_after_oom(error)
    assert said is not None
    assert said.startswith("Memory ran out")
    assert asked in said
    assert "free on cpu; " in said
    assert "All models were unloaded" in said
    assert "enforce fail" not in said


def test_what_has_no_room_is_refused_with_its_size_before_it_is_made() -> None:
    memory.require_room((1, 4, 64, 64), "a latent")
    with pytest.raises(memory.NotEnoughMemory, match=r"4096\.0 GiB") as hit:
        memory.require_room((2**20, 2**20), "a film")
    said = report.free_after_oom(hit.value)
    assert said is not None
    assert said.startswith("Not enough memory: a film of shape (1048576, 1048576) would take")
    assert "lower its width" in said
