"""The limits of a container count where they are lower than what the machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from comfy.devices import container, memory, pinning, processor, report
from comfy.devices.container import Container

MIB = 1024 * 1024
CPU = torch.device("cpu")


def tree(root: Path, membership: str, files: dict[str, Any]) -> Container:
    """A container whose control groups hold the given files."""
    (root / "self").write_text(membership, "ascii")
    for name, value in files.items():
        file = root / "mount" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n", "ascii")
    return Container(root / "mount", root / "self")


def v2(root: Path, limit: Any = 512 * MIB, **more: Any) -> Container:
    files = {
        "memory.max": limit,
        "memory.current": 300 * MIB,
        "memory.stat": f"anon 1\nfile 2\ninactive_file {60 * MIB}\nactive_file {40 * MIB}",
    }
    return tree(root, "0::/\n", {**files, **more})  # fmt: skip


def v1(root: Path, limit: Any = 512 * MIB) -> Container:
    name = "memory/docker/abc/memory."
    return tree(root, "9:name=systemd:/\n4:memory:/docker/abc\n0::/\n", {
        "memory/memory.limit_in_bytes": 9223372036854771712,
        "memory/memory.usage_in_bytes": 900 * MIB,
        f"{name}limit_in_bytes": limit, f"{name}usage_in_bytes": 300 * MIB,
        f"{name}memsw.limit_in_bytes": 640 * MIB, f"{name}memsw.usage_in_bytes": 328 * MIB,
        f"{name}stat": f"inactive_file 5\ntotal_inactive_file {60 * MIB}\n"
        f"total_active_file {40 * MIB}",
    })  # fmt: skip


@pytest.mark.parametrize("make", [v1, v2])
def test_memory_is_the_lower_of_machine_and_container(
    make: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(container, "CONTAINER", make(tmp_path))
    assert memory.get_total_memory(CPU) == 512 * MIB
    assert memory.total_ram_mib() == 512
    free = memory.get_free_memory(CPU)  # 300 of 512 are in use, and 100 of these reclaimable
    assert free == min(312 * MIB, psutil.virtual_memory().available)
    assert pinning.pinned_limit() == int(512 * MIB * pinning.PINNED_SHARE)
    system = report.system_stats()["system"]
    assert (system["ram_total"], system["ram_free"]) == (512 * MIB, 312 * MIB)


@pytest.mark.parametrize("make", [v1, v2])
@pytest.mark.parametrize("limit", ["max", 9223372036854771712, -1, "", "nonsense", 1 << 59])
def test_no_limit_and_one_above_the_machine_change_nothing(
    make: Any, limit: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    total = psutil.virtual_memory().total
    monkeypatch.setattr(container, "CONTAINER", make(tmp_path, limit))
    assert memory.get_total_memory(CPU) == total
    assert memory.get_free_memory(CPU) > 0


def test_the_lowest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    inner = tree(tmp_path, "0::/pod/box\n", {
        "pod/memory.max": 100, "pod/memory.current": 90, "pod/memory.stat": "",
        "pod/box/memory.max": 200, "pod/box/memory.current": 20,
        "pod/cpu.max": "150000 100000", "pod/box/cpu.max": "max 100000",
        "pod/memory.swap.max": 70, "pod/memory.swap.current": 30,
    })  # fmt: skip
    assert (inner.ram_limit(), inner.ram_left(), inner.swap_left()) == (100, 10, 40)
    assert inner.cpu_limit() == 1.5


def test_swap_of_the_first_version_is_what_its_sum_leaves(tmp_path: Path) -> None:
    assert v1(tmp_path).swap_left() == (640 - 512 - (328 - 300)) * MIB


def test_a_container_that_does_not_see_the_hosts_names_is_read_at_its_root(tmp_path: Path) -> None:
    inside = tree(tmp_path, "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n", {
        "memory/memory.limit_in_bytes": 100, "memory/memory.usage_in_bytes": 30,
        "cpu,cpuacct/cpu.cfs_quota_us": 50000, "cpu,cpuacct/cpu.cfs_period_us": 100000,
    })  # fmt: skip
    assert (inside.ram_limit(), inside.ram_left(), inside.cpu_limit()) == (100, 70, 0.5)


def test_other_systems_have_no_limits(tmp_path: Path) -> None:
    for nowhere in (Container(tmp_path / "no", tmp_path / "none"), tree(tmp_path, "0::/../..", {})):
        answers = (nowhere.ram_limit(), nowhere.ram_left(), nowhere.swap_left())
        assert (*answers, nowhere.cpu_limit()) == (None, None, None, None)


def test_a_tensor_beyond_the_containers_memory_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        container, "CONTAINER", v2(tmp_path, **{"memory.swap.max": 0, "memory.swap.current": 0})
    )
    with pytest.raises(memory.NotEnoughMemory, match="noise"):
        memory.require_room((400 * MIB // 4,), "noise")
    with pytest.raises(memory.NotEnoughMemory):
        memory.require_capacity(600 * MIB, "the decoder", CPU)


def test_threads_follow_the_processors_of_the_container(tmp_path: Path, monkeypatch: Any) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(container, "CONTAINER", v2(tmp_path, **{"cpu.max": "250000 100000"}))
    try:
        torch.set_num_threads(8)
        processor.heed_cpu_limit()
        assert torch.get_num_threads() == 3
        torch.set_num_threads(2)
        processor.heed_cpu_limit()
        assert torch.get_num_threads() == 2
        torch.set_num_threads(8)
        monkeypatch.setenv("OMP_NUM_THREADS", "8")
        processor.heed_cpu_limit()
        assert torch.get_num_threads() == 8
    finally:
        torch.set_num_threads(before)
