"""Weights that nothing wrote to lend their memory without being read; every write is seen."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from comfy.weights import page_table, write_watch
from comfy.weights.assign import assign_weights
from comfy.weights.lending import LentWeight
from comfy.weights.pages import WeightMemory
from comfy.weights.sources import source_of
from comfy.weights.state_dict import load_torch_file
from comfy.weights.write_watch import Watch, watch
from tests.comfy.weights.test_lending import Holder, bits, lent_of, loaded, lora

SHAPE = (1024, 1024)
PAGES = 4 * 1024 * 1024 // mmap.PAGESIZE


def is_watched() -> bool:
    return watch(WeightMemory().empty(SHAPE, torch.float32).zero_()) is not None


@pytest.fixture
def watching() -> None:
    if not is_watched():
        pytest.skip("this system does not note writes")


@pytest.fixture
def no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> bool:
        raise AssertionError("the weight was read")

    monkeypatch.setattr(LentWeight, "_gives", refuse)


def watched() -> tuple[torch.Tensor, Watch]:
    tensor = WeightMemory().empty(SHAPE, torch.float32).zero_()
    made = watch(tensor)
    assert made is not None
    return tensor, made


def read_into(tensor: torch.Tensor, folder: Path) -> None:
    (folder / "bytes").write_bytes(b"7" * 5)
    with open(folder / "bytes", "rb", buffering=0) as file:
        file.readinto(tensor.numpy().reshape(-1).view("uint8")[9000:].data)


def write_as_debugger(tensor: torch.Tensor, _: Path) -> None:
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(tensor.data_ptr() + 12345)
        memory.write(b"7")


WRITES: dict[str, Callable[[torch.Tensor, Path], Any]] = {
    "first element": lambda t, _: t[0, 0].fill_(1),
    "last element": lambda t, _: t[-1, -1].fill_(1),
    "the same value": lambda t, _: t[5, 5].fill_(0),
    "data": lambda t, _: t.data.mul_(2),
    "array": lambda t, _: t.numpy().__setitem__((3, 4), 1),
    "view of another type": lambda t, _: t.view(torch.int16)[7, 7].fill_(1),
    "pointer": lambda t, _: ctypes.memset(t.data_ptr() + 4096 * 100, 1, 1),
    "system call": read_into,
    "debugger": write_as_debugger,
    "product": lambda t, _: torch.mm(torch.ones(1024, 1), torch.ones(1, 1024), out=t),
}


@pytest.mark.usefixtures("watching")
@pytest.mark.parametrize("kind", WRITES)
def test_every_way_of_writing_is_seen(kind: str, tmp_path: Path) -> None:
    tensor, made = watched()
    assert made.saw_nothing(tensor)
    assert tensor.sum() == 0
    assert made.saw_nothing(tensor)
    WRITES[kind](tensor, tmp_path)
    assert not made.saw_nothing(tensor)
    again = watch(tensor)
    assert again is not None
    assert again.saw_nothing(tensor)
    assert not made.saw_nothing(tensor)


@pytest.mark.usefixtures("watching")
def test_a_write_to_any_page_is_seen() -> None:
    tensor, _ = watched()
    for page in range(0, PAGES, 13):
        made = watch(tensor)
        assert made is not None
        tensor.view(-1)[page * mmap.PAGESIZE // 4 + page % 1024] = 1
        assert not made.saw_nothing(tensor)


@pytest.mark.usefixtures("watching")
def test_pages_that_are_dropped_are_not_taken_for_what_they_were() -> None:
    mapping = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(mapping, dtype=torch.float32).view(SHAPE).fill_(1)
    made = watch(tensor)
    assert made is not None
    mapping.madvise(mmap.MADV_DONTNEED, 0, mmap.PAGESIZE)
    assert not made.saw_nothing(tensor)
    assert tensor[0, 0] == 0


@pytest.mark.usefixtures("watching")
def test_only_the_tensor_as_it_was_is_vouched_for() -> None:
    tensor, made = watched()
    other, _ = watched()
    assert not made.saw_nothing(other)
    assert not made.saw_nothing(tensor.T)
    assert not made.saw_nothing(tensor[1:])
    assert not made.saw_nothing(tensor.view(torch.int32))
    assert not made.saw_nothing(tensor.view(512, 2048))
    assert made.saw_nothing(tensor)
    made.end()
    assert not made.saw_nothing(tensor)


def test_small_tensors_are_not_watched() -> None:
    assert watch(torch.zeros(10)) is None


@pytest.mark.usefixtures("watching")
def test_a_fork_is_not_vouched_for_and_disturbs_nothing() -> None:
    tensor, made = watched()
    child = os.fork()
    if not child:
        seen = made.saw_nothing(tensor)
        ctypes.memset(tensor.data_ptr(), 1, 1)
        made.end()
        os._exit(int(seen))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert made.saw_nothing(tensor)
    assert tensor[0, 0] == 0


def refuse_call(*_: Any) -> None:
    raise OSError(errno.EINVAL, "invalid")


REFUSALS: dict[str, tuple[str, Any, str]] = {
    "another processor": ("SYSTEM_CALLS", {}, "x86-64"),
    "a container": (
        "SYSTEM_CALLS", dict.fromkeys(write_watch.SYSTEM_CALLS, 1_000_000), "containers",
    ),
    "an old kernel": ("_control", refuse_call, "Linux 6.7"),
}  # fmt: skip
"""What is not as it should be -> (name in the module, its value there, word of the message)."""


@pytest.fixture(params=REFUSALS)
def refused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A system that does not note writes; the word that says why."""
    name, value, word = REFUSALS[request.param]
    monkeypatch.setattr(write_watch, name, value)
    write_watch._descriptor.cache_clear()
    yield word
    write_watch._descriptor.cache_clear()


def test_a_system_that_refuses_says_why_once_and_weights_are_compared(
    refused: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compared: list[torch.Size] = []

    def compare(weight: LentWeight, source: torch.Tensor, rows: torch.Tensor) -> bool:
        compared.append(rows.shape)
        return gives(weight, source, rows)

    gives = LentWeight._gives
    monkeypatch.setattr(LentWeight, "_gives", compare)
    with caplog.at_level("INFO", logger=write_watch.__name__):
        module = loaded(tmp_path, SHAPE)
        assert not is_watched()
    (message,) = [record.getMessage() for record in caplog.records]
    assert refused in message
    assert "compared with its file" in message
    assert lent_of(module).patch([lora(SHAPE)])
    assert compared == [SHAPE]


def test_a_single_refusal_leaves_the_others_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_watched():
        pytest.skip("this system does not note writes")
    with monkeypatch.context() as patched:
        patched.setattr(write_watch, "_control", refuse_call)
        assert not is_watched()
    assert is_watched()


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("watching", "no_comparison")
@pytest.mark.parametrize(
    ("stored", "used"), [(torch.float16, torch.float32), (torch.float32, torch.bfloat16)]
)
@pytest.mark.parametrize(
    ("shape", "channels_last"), [((1024, 1040), False), ((512, 256, 3, 3), True)]
)
def test_a_large_weight_is_patched_without_reading_it(
    stored: torch.dtype, used: torch.dtype, shape: tuple[int, ...], channels_last: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    module = loaded(tmp_path, shape, stored, used, channels_last)
    before = bits(module.weight)
    for _ in range(2):  # what is taken back is watched again
        lent = lent_of(module)
        assert lent.patch([lora(shape)])
        assert lent.patch([lora(shape, 1)])
        lent.take_back()
        assert torch.equal(bits(module.weight), before)
        del lent


def replaced_file(module: Holder, folder: Path) -> None:
    (folder / "w.safetensors").write_bytes(bytes((folder / "w.safetensors").stat().st_size))


def swapped_memory(module: Holder, folder: Path) -> None:
    (folder / "other").mkdir()
    module.weight.data = loaded(folder / "other", SHAPE).weight.data.neg_()


CHANGES: dict[str, Callable[[Holder, Path], Any]] = {
    "by hand": lambda m, _: m.weight.data[700, 3].add_(1),
    "array": lambda m, _: m.weight.numpy().__setitem__((3, 4), 1),
    "turned": lambda m, _: setattr(m.weight, "data", m.weight.data.T),
    "turned and laid out": lambda m, _: setattr(m.weight, "data", m.weight.data.T.contiguous()),
    "other memory": swapped_memory,
    "file written over": replaced_file,
    "file's tensor": lambda m, _: source_of(m.weight).tensor[9, 9].fill_(4),  # type: ignore[union-attr]
    "file's tensor beside": lambda m, _: source_of(m.weight).tensor.zero_(),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_weight_that_differs_is_left_alone(kind: str, tmp_path: Path) -> None:
    module = loaded(tmp_path, SHAPE)
    CHANGES[kind](module, tmp_path)
    before = bits(module.weight)
    lent = lent_of(module)
    assert not lent.patch([lora(SHAPE)])
    assert torch.equal(bits(module.weight), before)


def test_weights_that_exchange_their_memory_are_left_alone(tmp_path: Path) -> None:
    modules = []
    for number in range(2):
        path = tmp_path / f"{number}.safetensors"
        save_file({"weight": torch.full(SHAPE, number).half()}, path)
        modules.append(Holder(SHAPE, torch.float32, False))
        assign_weights(modules[-1], load_torch_file(path))
    one, two = modules[0].weight.data, modules[1].weight.data
    modules[0].weight.data, modules[1].weight.data = two, one
    del one, two
    before = [bits(module.weight) for module in modules]
    assert not torch.equal(*before)
    for module in modules:
        assert not lent_of(module).patch([lora(SHAPE)])
    assert all(torch.equal(bits(m.weight), b) for m, b in zip(modules, before))


class Doubling(Holder):
    """A layer that changes what it was given as it takes it."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        with torch.no_grad():
            self.weight.mul_(2)


def test_a_layer_that_changes_its_weight_as_it_is_loaded(tmp_path: Path) -> None:
    save_file({"weight": torch.randn(SHAPE).half()}, tmp_path / "w.safetensors")
    module: nn.Module = Doubling(SHAPE, torch.float32, False)
    assign_weights(module, load_torch_file(tmp_path / "w.safetensors"))
    assert not lent_of(module).patch([lora(SHAPE)])  # type: ignore[arg-type]


@pytest.mark.usefixtures("watching")
def test_a_write_that_changed_nothing_is_compared_and_lends(tmp_path: Path) -> None:
    module = loaded(tmp_path, SHAPE)
    before = bits(module.weight)
    module.weight.data.mul_(1)
    lent = lent_of(module)
    assert lent.patch([lora(SHAPE)])
    lent.take_back()
    assert torch.equal(bits(module.weight), before)


def test_what_was_subtracted_is_not_vouched_for(tmp_path: Path) -> None:
    module = loaded(tmp_path, SHAPE)
    lent = lent_of(module)
    assert lent.patch([lora(SHAPE)])
    replaced_file(module, tmp_path)
    lent.take_back()
    del lent
    before = bits(module.weight)
    assert not lent_of(module).patch([lora(SHAPE)])
    assert torch.equal(bits(module.weight), before)


# -- the page table -------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists(page_table.TABLE), reason="no table to read")
@pytest.mark.parametrize("asked", [True, False], ids=["asked", "read"])
def test_a_written_page_of_a_file_is_told(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not asked:
        monkeypatch.setattr(page_table, "PAGEMAP_SCAN", 0)
    (tmp_path / "file").write_bytes(bytes(16 * mmap.PAGESIZE))
    with open(tmp_path / "file", "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    assert page_table.is_clean(tensor.data_ptr(), len(tensor))
    assert tensor.sum() == 0
    assert page_table.is_clean(tensor.data_ptr(), len(tensor))
    tensor[15 * mmap.PAGESIZE] = 1
    assert not page_table.is_clean(tensor.data_ptr(), len(tensor))
    assert page_table.is_clean(tensor.data_ptr(), 15 * mmap.PAGESIZE)
