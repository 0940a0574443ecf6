"""Fixtures that every test package shares."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """Folder of recorded reference numbers; tests that need it are skipped where it is absent."""
    folder = SHARED / "golden"
    if not folder.is_dir():
        pytest.skip(f"golden data not found at {folder}")
    return folder


@pytest.fixture(scope="session")
def golden_json(golden_folder: Path) -> Callable[[str], Any]:
    """Reads one golden JSON file by its name relative to the golden folder."""
    return lambda name: json.loads((golden_folder / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def golden_tensors(golden_folder: Path) -> Callable[[str], dict[str, Any]]:
    """Loads one golden safetensors file by its name relative to the golden folder."""
    from safetensors.torch import load_file

    return lambda name: load_file(str(golden_folder / name))


@pytest.fixture(scope="session")
def spec_folder() -> Path:
    """Folder of the recorded public interfaces (object_info.json, traces)."""
    folder = SHARED / "spec"
    if not folder.is_dir():
        pytest.skip(f"interface records not found at {folder}")
    return folder


def pin_cpu() -> None:
    """Keeps tests on the CPU once the simulated accelerator, which stays visible, is loaded."""
    if "tests.support.fakegpu" in sys.modules:
        from comfy.devices.policies import MemoryPolicy
        from comfy.devices.runtime import build_runtime, install_runtime

        install_runtime(build_runtime(MemoryPolicy(cpu=True)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` the groups are handed out as `tests.support.schedule` says."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.support.schedule import LongestFirst

    config.option.loadscopereorder = False
    return LongestFirst(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts what takes long first, in each of several processes alike."""
    if hasattr(config, "workerinput"):
        from tests.support.schedule import place

        items.sort(key=lambda item: place(item.nodeid))


def pytest_collection() -> None:
    """What the tests' modules make stays to the end, so nothing need be collected meanwhile."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Comes before fixtures of every scope, which may load models."""
    pin_cpu()
    keep_what_is_left()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, bool, bool]:
    """After a file, what it left behind will stay."""
    done = yield
    if nextitem is not None and nextitem.path != item.path:
        keep_what_is_left()
    return done


def keep_what_is_left() -> None:
    """Takes everything that is there out of the collector's sight.

    A collection then takes milliseconds, not a tenth of a second; many tests ask for dozens.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def paper_formulas() -> Iterator[None]:
    """The papers' formulas, as `--paper-formulas` asks for them."""
    from comfy.devices.runtime import get_runtime, install_runtime

    before = get_runtime()
    policy = dataclasses.replace(before.precision, paper_formulas=True)
    install_runtime(dataclasses.replace(before, precision=policy))
    yield
    install_runtime(before)


@pytest.fixture(autouse=True)
def cpu_runtime() -> Iterator[None]:
    """Brings the CPU back after tests that installed another runtime."""
    pin_cpu()
    yield
    pin_cpu()
