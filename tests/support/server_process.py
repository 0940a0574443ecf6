"""Starts the real server (`main.py`) in its own process, on a free port, in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.waiting import PATIENCE_S, read_until

REPOSITORY = Path(__file__).resolve().parent.parent.parent
START_TIMEOUT_S = 120.0
NOTHING: dict[str, list[Any]] = {"queue_running": [], "queue_pending": []}  # of an idle queue


def free_port() -> int:
    """A TCP port that was free a moment ago, and that no client's connection is given meanwhile.

    So it is free still when the server has started, or starts again. Not by the global generator:
    tests that run beside this one may have seeded theirs alike.
    """
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(20_000, 32_000)  # systems number connections from 32768 on
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class ServerProcess:
    """A running server and the few calls tests make most."""

    process: subprocess.Popen[bytes]
    port: int
    base: Path
    log_path: Path

    @property
    def url(self) -> str:
        """Root of every route, without a trailing slash."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """Everything the server has written so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str, timeout_s: float = 30.0) -> Any:
        """GETs JSON."""
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
            return json.load(answer)

    def get_bytes(self, path: str) -> bytes:
        """GETs a body as it is."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return bytes(answer.read())

    def post(self, path: str, body: Any, headers: Mapping[str, str] = {}) -> tuple[int, Any]:
        """POSTs `body` (bytes as they are, all else as JSON).

        Returns:
            Status and parsed answer (None when empty, text when not JSON).
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=dict(headers))
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, _parsed(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read())

    def run(self, prompt: Mapping[str, Any], timeout_s: float = 120.0, **fields: Any) -> Any:
        """Queues `prompt`, waits for its end and returns its history entry.

        Raises:
            AssertionError: The prompt was refused.
            TimeoutError: It did not end in time.
        """
        status, answer = self.post("/prompt", {"prompt": prompt, **fields})
        assert status == 200, answer
        return self.wait(answer["prompt_id"], timeout_s)

    def wait(self, prompt_id: str, timeout_s: float = 120.0) -> Any:
        """Polls history until `prompt_id` has ended; returns its entry."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            history = self.get(f"/history/{prompt_id}")
            if prompt_id in history:
                return history[prompt_id]
            time.sleep(0.02)
        raise TimeoutError(
            f"prompt {prompt_id} did not end in {timeout_s} s; log:\n{self.log[-3000:]}"
        )

    def wait_idle(self) -> None:
        """Waits until nothing runs and nothing waits; all that has run is in the history then.

        Raises:
            AssertionError: Something goes on for longer than anybody waits.
        """
        assert read_until(lambda: self.get("/queue"), NOTHING) == NOTHING

    def picture(self, entry: Any, node_id: str) -> bytes:
        """Bytes of the first picture that node `node_id` saved."""
        found = entry["outputs"][node_id]["images"][0]
        query = "&".join(f"{key}={found[key]}" for key in ("filename", "subfolder", "type"))
        return self.get_bytes(f"/view?{query}")

    def kill(self) -> None:
        """Ends the process group at once, as a power cut would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """Ends the server as Ctrl-C does; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.kill()
        return int(self.process.returncode)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body) if body else None
    except ValueError:
        return body.decode(errors="replace")


def start_server(base: Path, *arguments: str, port: int | None = None) -> ServerProcess:
    """Starts a server whose folders all lie below `base`, with this repository's models.

    Raises:
        RuntimeError: It ended or did not answer in time; the text holds its log.
    """
    port = port or free_port()
    base.mkdir(parents=True, exist_ok=True)
    log_path = base / "server.log"
    command = [
        *(sys.executable, str(REPOSITORY / "main.py"), "--port", str(port)),
        *("--base-directory", str(base), "--models-directory", str(REPOSITORY / "models")),
        *arguments,
    ]
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            command, cwd=base, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = ServerProcess(process, port, base, log_path)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"server ended with {process.returncode}:\n{server.log}")
        try:
            server.get("/healthz", timeout_s=5)
        except (OSError, ValueError):
            time.sleep(0.05)
        else:
            return server
    server.kill()
    raise RuntimeError(f"server did not answer in {START_TIMEOUT_S} s:\n{server.log}")


@contextlib.contextmanager
def running_server(base: Path, *arguments: str) -> Iterator[ServerProcess]:
    """A server for the length of a with block."""
    server = start_server(base, *arguments)
    try:
        yield server
    finally:
        server.stop()
