"""Files that cached results show."""

from __future__ import annotations

from pathlib import Path

import pytest

import folder_paths
from comfy_server.results import files_exist


@pytest.fixture(autouse=True)
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "there.png").touch()
    return tmp_path


def shown(name: str, subfolder: str = "sub", kind: str = "output") -> dict[str, list[object]]:
    return {"images": [{"filename": name, "subfolder": subfolder, "type": kind}]}


def test_a_file_that_is_there_is_found() -> None:
    assert files_exist(shown("there.png"))


def test_a_file_that_was_deleted_is_missed() -> None:
    assert not files_exist(shown("gone.png"))
    assert not files_exist({**shown("there.png"), "audio": shown("gone.flac")["images"]})


def test_what_names_no_file_does_not_count() -> None:
    assert files_exist({"text": ["words"], "animated": [True], "odd": "text"})
    assert files_exist(shown("gone.png", kind="elsewhere"))
