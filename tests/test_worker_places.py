"""Which device a worker gets, and which machines may work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import folder_paths
from comfy.devices import accelerators, runtime
from comfy.interrupt import Interrupt
from utils.workers import device_shares, mark_shared_folders, why_not_shared


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with four CUDA devices."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(runtime, "get_runtime", lambda: SimpleNamespace(device=device))
    devices = [torch.device("cuda", index) for index in range(4)]
    monkeypatch.setattr(accelerators, "accelerator_devices", lambda: devices)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_each_worker_sees_a_device_of_its_own(machine: pytest.MonkeyPatch) -> None:
    shares = device_shares(3)
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["0", "1", "2"]
    assert all(share["HIP_VISIBLE_DEVICES"] == share["CUDA_VISIBLE_DEVICES"] for share in shares)


def test_devices_are_those_that_the_server_sees_in_its_order(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("CUDA_VISIBLE_DEVICES", "3,0,GPU-7,1")
    shares = device_shares(3)
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["3", "0", "GPU-7"]


def test_more_workers_than_devices_are_refused(machine: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--workers 5 needs .* this machine has 4 \(cuda\)"):
        device_shares(5)


def test_without_accelerator_workers_share_the_threads(machine: pytest.MonkeyPatch) -> None:
    cpu = SimpleNamespace(device=torch.device("cpu"))
    machine.setattr(runtime, "get_runtime", lambda: cpu)
    machine.setattr(torch, "get_num_threads", lambda: 8)
    assert device_shares(3) == [{"OMP_NUM_THREADS": "2"}] * 3
    assert device_shares(16) == [{"OMP_NUM_THREADS": "1"}] * 16
    machine.setenv("OMP_NUM_THREADS", "5")
    assert device_shares(2) == [{"OMP_NUM_THREADS": "5"}] * 2


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """A server's folders."""
    old = folder_paths.base_path
    folder_paths.set_base_directory(str(tmp_path))
    for name in ("input", "output", "temp"):
        (tmp_path / name).mkdir()
    yield tmp_path
    folder_paths.set_base_directory(old)


def test_a_machine_with_other_folders_may_not_work(base: Path) -> None:
    mark = mark_shared_folders(8188)
    assert why_not_shared(mark) is None
    (copy,) = (base / "input").glob(".latentloom-*")
    for spoil in (lambda: copy.write_text("of an earlier server"), copy.unlink):
        spoil()
        assert f"{base / 'input'} on " in str(why_not_shared(mark))
        assert "mount" in str(why_not_shared(mark))


def test_an_input_folder_that_nobody_may_write_is_not_checked(
    base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark_shared_folders(8188)
    (file,) = (base / "input").glob(".latentloom-*")
    file.unlink()
    file.mkdir()  # so that even root cannot write it
    mark = mark_shared_folders(8188)
    assert f"{base / 'input'} cannot be written" in caplog.text
    assert why_not_shared(mark) is None
    (base / "output" / file.name).unlink()
    assert f"{base / 'output'} on " in str(why_not_shared(mark))
    (base / "temp" / file.name).unlink()
    (base / "temp" / file.name).mkdir()
    with pytest.raises(OSError, match="temp"):
        mark_shared_folders(8188)


def test_an_interruption_can_be_meant_for_elsewhere() -> None:
    interrupt, stopped = Interrupt(), list[bool]()
    interrupt.elsewhere = lambda: stopped.append(True)
    interrupt.set()
    assert stopped == [True]
    assert not interrupt.is_set()
