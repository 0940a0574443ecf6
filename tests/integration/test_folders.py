"""Where files are looked for and put, by command line."""

from __future__ import annotations

from pathlib import Path

from tests.support.prompts import DEMO_CHECKPOINT, plain_prompt
from tests.support.server_process import running_server


def test_another_base_directory_keeps_the_demo_model_and_takes_the_results(tmp_path: Path) -> None:
    base, results = tmp_path / "base", tmp_path / "results"
    with running_server(
        base,
        "--cpu",
        "--models-directory",
        str(base / "models"),
        "--output-directory",
        str(results),
    ) as server:
        assert DEMO_CHECKPOINT in server.get("/models/checkpoints")
        server.run(plain_prompt(prefix="deep/name"))
    assert [path.name for path in (results / "deep").iterdir()] == ["name_00001_.png"]
