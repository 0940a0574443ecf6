"""What nodes may do to a worker's input and output: print, start programs, fork, be killed."""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from comfy_execution.workers.channel import ChannelClosed
from comfy_execution.workers.local import LocalWorker

ROOT = Path(__file__).resolve().parents[2]
posix = pytest.mark.skipif(os.name == "nt", reason="forks and signals of POSIX")

Start = Callable[[str], LocalWorker]


@pytest.fixture
def start() -> Start:
    """Starts a worker whose program is given; it has `channel`."""

    def begin(program: str) -> LocalWorker:
        head = "import os, subprocess, sys, time\nprint('before the channel', flush=True)\n"
        channel = "from comfy_execution.workers.local import standard_streams\n"
        whole = f"{head}{channel}channel = standard_streams()\n{textwrap.dedent(program)}"
        return LocalWorker([sys.executable, "-c", whole], {**os.environ, "PYTHONPATH": str(ROOT)})

    return begin


def test_what_is_printed_is_in_the_log_and_no_message(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = start("""
        print("of a node")
        os.write(1, b"of native code\\n")
        subprocess.run([sys.executable, "-Sc", "print('of a program')"])
        assert not sys.stdin.read()
        channel.send({"say": "one"})
        channel.send({"say": "two", "data": "x" * 3_000_000})
        assert channel.receive() == {"do": "end"}
        os._exit(3)  # what was printed is not lost even so
    """)
    assert worker.receive() == {"say": "one"}
    assert len(worker.receive()["data"]) == 3_000_000
    worker.send({"do": "end"})
    with pytest.raises(ChannelClosed):
        worker.receive()
    assert worker.exit_code() == 3
    log = capsys.readouterr().err
    for source in ("before the channel", "of a node", "of native code", "of a program"):
        assert log.count(source) == 1


def test_lines_and_bars_of_a_worker_reach_the_log_whole(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others write there, too; faulthandler writes a line in many pieces."""
    written = list[str]()

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Log())
    worker = start("""
        def say(text):
            os.write(2, text.encode())
            channel.send({"say": text})
            channel.receive()
        for text in ("Fatal ", "error\\n", "\\r 1%", "\\r 2%", "\\n", "the ", "end"):
            say(text)
    """)
    for _ in range(7):
        worker.receive()
        time.sleep(0.02)  # the log is read meanwhile
        worker.send({})
    assert worker.exit_code() == 0
    assert "".join(written).endswith("Fatal error\n\r 1%\r 2%\nthe end")
    for before, after in itertools.pairwise(written):  # who reads late finds several together
        assert before.endswith("\n") or after.startswith("\r"), (before, after)


@posix
def test_a_worker_s_death_is_noticed_though_its_fork_lives(start: Start) -> None:
    worker = start("""
        fork = os.fork()
        if fork == 0:
            os.closerange(1, 3)
            time.sleep(120)
            os._exit(0)
        channel.send({"say": "forked", "pid": fork})
        time.sleep(120)
    """)
    fork = worker.receive()["pid"]
    begun = time.monotonic()
    worker.kill()
    with pytest.raises(ChannelClosed):
        worker.receive()
    assert time.monotonic() - begun < 60, "it was noticed when the fork had ended"
    os.kill(fork, signal.SIGKILL)
    assert worker.exit_code() == -signal.SIGKILL


@posix
def test_signals_end_what_nodes_start_and_not_the_worker(start: Start) -> None:
    worker = start("""
        from comfy_execution.workers.local import leave_signals_to_the_server
        leave_signals_to_the_server()
        for number in (2, 15):
            os.kill(os.getpid(), number)
            program = subprocess.Popen(["sleep", "15"])
            program.send_signal(number)
            channel.send({"say": "ended", "code": program.wait()})
    """)
    assert [worker.receive()["code"] for _ in range(2)] == [-signal.SIGINT, -signal.SIGTERM]
    with pytest.raises(ChannelClosed):
        worker.receive()
    assert worker.exit_code() == 0


def test_a_worker_that_says_no_message_is_ended(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start("""
        channel._writing.write(b"\\0\\0\\0\\5hello")
        channel._writing.flush()
        time.sleep(60)
    """)
    with pytest.raises(ChannelClosed):
        worker.receive()
    assert worker.exit_code() != 0
    assert "what is no message" in caplog.text
