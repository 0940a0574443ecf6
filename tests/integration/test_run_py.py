"""What `run.py` does on machines that are not quite ready: the parts that need no installation."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import run
from tests.support.server_process import REPOSITORY

GIB = 2**30


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The packages' folder of an environment of our own."""
    monkeypatch.setattr(run, "VENV", tmp_path / "Umgebung ü")
    folder = run.VENV / "lib/python3.11/site-packages"
    folder.mkdir(parents=True)
    return folder


def test_packages_whose_installation_was_killed_are_forgotten(site: Path) -> None:
    for name in ("whole-1.0", "half-1.0"):
        (site / f"{name}.dist-info").mkdir()
        (site / f"{name}.dist-info/METADATA").touch()
    (site / "whole-1.0.dist-info/RECORD").touch()
    (site / "~umpy").mkdir()
    (site / "half").mkdir()
    run.drop_half_installed()
    assert sorted(path.name for path in site.iterdir()) == ["half", "whole-1.0.dist-info"]


def test_a_disk_that_is_too_small_is_named_before_anything_is_installed(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(run.shutil, "disk_usage", lambda _: usage(9 * GIB, 8 * GIB, GIB))
    with pytest.raises(SystemExit, match=r"needs 8 GB and the disk of .* has 1\.1 GB left"):
        run.require_room()
    (site / "torch-2.0.dist-info").mkdir()
    run.require_room()  # most of it is there already


def test_every_pin_for_the_oldest_python_can_be_installed_there() -> None:
    """A pin that its author has left behind would make `pip` refuse all of them on that Python."""
    oldest = ".".join(map(str, run.OLDEST))
    refusing, looked_at = [], 0
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        if pin.marker is not None and not pin.marker.evaluate({"python_version": oldest}):
            continue
        with contextlib.suppress(metadata.PackageNotFoundError):  # an extra that is not wanted here
            wanted = metadata.distribution(pin.name).metadata["Requires-Python"]
            looked_at += 1
            if wanted and f"{oldest}.99" not in SpecifierSet(wanted):
                refusing.append(f"{line}: needs Python {wanted}")
    assert not refusing
    assert looked_at > 50


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("WARNING: Retrying (Retry(total=4, ...\nERROR: No matching distribution", "network"),
        ("NameResolutionError: Failed to resolve host", "PIP_INDEX_URL"),
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "disk is full"),
        ("ERROR: Cannot install a and b: conflicting dependencies", "lines above"),
    ],
)
def test_what_pip_says_is_put_into_a_reason(said: str, words: str) -> None:
    assert words in run.reason(said)


def test_a_checkout_that_cannot_be_written_to_has_its_dependencies_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with run.package() as given:
        assert given == (REPOSITORY, True)
    monkeypatch.setattr(run.os, "access", lambda *_: False)
    whole = (REPOSITORY / "pyproject.toml").read_text()
    with run.package() as (folder, is_editable):
        assert not is_editable
        text = (folder / "pyproject.toml").read_text()
        assert text.count(">=") > 15
        assert re.findall(r"^dev = \[.*?^\]", text, re.M | re.S) == re.findall(
            r"^dev = \[.*?^\]", whole, re.M | re.S
        )
        assert "py-modules = []" in text
        assert "[project.scripts]" not in text
        assert {"README.md", "LICENSE"} <= {path.name for path in folder.iterdir()}
    assert not folder.exists()


def test_of_two_commands_at_once_the_second_waits_for_the_first(site: Path, tmp_path: Path) -> None:
    with run.only_one():
        second = subprocess.Popen(
            [sys.executable, "-c", "import run\nwith run.only_one(): print('its turn')"],
            cwd=REPOSITORY,
            env={**os.environ, "LATENTLOOM_VENV": str(run.VENV)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert second.stdout is not None
        assert "waiting" in second.stdout.readline()
        assert second.poll() is None
    assert second.communicate(timeout=60)[0] == "its turn\n"
    with run.only_one():  # it is free again
        pass
