"""What the program says when it cannot start, and what `run.py` does with half an environment."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.server_process import REPOSITORY, free_port

START_TIMEOUT_S = 240  # an idle machine takes 3


def refusal(*options: str) -> str:
    """Starts the server where it cannot start; returns what it wrote."""
    command = [sys.executable, str(REPOSITORY / "main.py"), "--no-supervisor", "--cpu", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_a_port_in_use_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = refusal("--base-directory", str(tmp_path), "--port", str(port))
    assert f"latentloom cannot start: cannot listen on 127.0.0.1 port {port}" in said


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--output-directory", "the folder {file} cannot be made"),
        ("--temp-directory", "the folder {file}/temp cannot be made"),
        ("--extra-model-paths-config", "{file}: expected sections, found str"),
    ],
)
def test_an_unusable_path_is_named(tmp_path: Path, option: str, words: str) -> None:
    file = tmp_path / "a file"
    file.write_text("text")
    base = tmp_path / "base"
    said = refusal("--base-directory", str(base), option, str(file), "--port", str(free_port()))
    assert words.format(file=file) in said


def test_an_attention_package_that_is_missing_is_named(tmp_path: Path) -> None:
    if importlib.util.find_spec("sageattention") is not None:
        pytest.skip("the package is installed")
    said = refusal("--base-directory", str(tmp_path), "--use-sage-attention", "--port", "0")
    assert "latentloom cannot start: attention back end 'sage' is not available" in said
    assert "sageattention is not installed" in said


@pytest.mark.skipif(sys.platform != "linux", reason="needs a device that is always full")
def test_a_queue_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "user" / "__latentloom"
    folder.mkdir(parents=True)
    (folder / "queue.sqlite.lock").symlink_to("/dev/full")
    said = refusal("--base-directory", str(tmp_path), "--port", str(free_port()))
    assert f"the queue cannot be kept in {folder / 'queue.sqlite'}" in said
    assert "--user-directory" in said


@pytest.mark.skipif(os.name == "nt", reason="sends the signal that Ctrl-C gives elsewhere")
def test_ctrl_c_ends_a_server_whose_pack_never_ends_loading(tmp_path: Path) -> None:
    pack = tmp_path / "custom_nodes" / "hangs"
    pack.mkdir(parents=True)
    begun = tmp_path / "begun"
    (pack / "__init__.py").write_text(f"open({str(begun)!r}, 'w').close()\nwhile True: pass\n")
    options = ["--cpu", "--base-directory", str(tmp_path), "--port", str(free_port())]
    command = [sys.executable, str(REPOSITORY / "main.py"), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not begun.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            server.send_signal(signal.SIGINT)
            said = server.communicate(timeout=START_TIMEOUT_S)[1]
        finally:
            server.kill()
    assert "stopped while packs were loading" in said
    assert "Traceback" not in said
    assert server.returncode == 1


def run_py(venv: Path | str, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code that sees `run.py` as `run`, with an environment folder of its own."""
    return subprocess.run(
        [sys.executable, "-c", f"import run; {code}"],
        cwd=REPOSITORY,
        env={**os.environ, "LATENTLOOM_VENV": str(venv)},
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
    )


def test_an_environment_without_pip_is_made_anew(tmp_path: Path) -> None:
    venv = tmp_path / "Raum für 図"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (venv / "left").touch()
    # pip itself would take most of the test's time.
    bare = "run.venv.create = lambda path, with_pip, clear: make(path, clear=clear)"
    ended = run_py(venv, f"make = run.venv.create; {bare}; run.make_environment()")
    assert ended.returncode == 0, ended.stderr
    assert f"creating {venv}" in ended.stdout
    assert not (venv / "left").exists()


def test_an_environment_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    ended = run_py(file, "run.make_environment()")
    assert ended.returncode == 1
    assert f"latentloom: {file} cannot be created" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_empty_variable_means_the_usual_environment() -> None:
    assert run_py("", "print(run.VENV)").stdout.strip() == str(REPOSITORY / ".venv")
