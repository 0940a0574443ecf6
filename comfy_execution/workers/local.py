"""Workers that are processes of this machine, reached through their standard input and output.

What they write to standard error is written to this process's, so it is in the one log.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, cast

from comfy_execution import supervisor
from comfy_execution.workers.channel import ChannelClosed, PipeChannel, WorkerChannel
from comfy_execution.workers.messages import Message

logger = logging.getLogger(__name__)

DEATH_S = 5.0
"""How long a worker whose pipe is closed may take to end."""
_MOST_HELD = 1 << 16
_FIRST = b"\0latentloom\0"
"""Begins the output of a worker; what was printed before, while Python started, is no message."""

_OF_THE_SERVER = (
    supervisor.LIFELINE_VARIABLE,
    supervisor.SERVING_VARIABLE,
    supervisor.CRASH_VARIABLE,
)


class LocalWorker(WorkerChannel):
    """A started process.

    Args:
        command: Its command line.
        environment: All its variables.
        folder: Where it runs; None: here.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str | None = None
    ) -> None:
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        process = self._process
        reading, writing = cast(IO[bytes], process.stdout), cast(IO[bytes], process.stdin)
        self._pipes = PipeChannel(reading, writing)
        self._has_begun = False
        self._log = threading.Thread(
            target=_pass_on, args=(process.stderr,), name="worker-log", daemon=True
        )
        self._log.start()
        self._outgoing: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="worker-pipe", daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Never waits, though native code may keep the worker from reading; see ``Channel``."""
        self._outgoing.put(message)

    def _write(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while (message := self._outgoing.get()) is not None:
                self._pipes.send(message)

    def receive(self) -> Message:
        if not self._has_begun:
            sys.stderr.write(self._pipes.skip_past(_FIRST).decode("utf-8", "replace"))
            self._has_begun = True
        try:
            return self._pipes.receive()
        except ValueError as error:  # so what follows is none either
            logger.error("a worker said what is no message, and is killed: %s", error)
            self.kill()
            raise ChannelClosed from error

    def kill(self) -> None:
        self._process.kill()

    def exit_code(self) -> int | None:
        try:
            code = self._process.wait(DEATH_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._outgoing.put(None)
        self._log.join(1.0)  # the last words come before what the server says of its death
        self._pipes.close()
        return code


class LocalLauncher:
    """Starts workers as children of this process.

    Args:
        command: Command line of the program.
        environment: Worker's name -> variables it has beside this process's own.
        folder: Where they run; None: here.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Callable[[str], Mapping[str, str]],
        folder: str | None = None,
    ) -> None:
        self._command, self._folder = command, folder
        self._environment = environment

    def launch(self, name: str) -> LocalWorker:
        """Starts a worker; see ``Launcher``."""
        inherited = {key: v for key, v in os.environ.items() if key not in _OF_THE_SERVER}
        own = {**inherited, **self._environment(name), supervisor.WORKER_VARIABLE: name}
        return LocalWorker(self._command, own, self._folder)


def standard_streams() -> PipeChannel:
    """In the child: its input and output as the channel; what is printed goes to the log."""
    sys.stdout.flush()
    streams = [os.dup(descriptor) for descriptor in (0, 1)]
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    if sys.platform == "win32":
        import msvcrt

        for stream in streams:
            msvcrt.setmode(stream, os.O_BINARY)
    else:
        os.register_at_fork(after_in_child=lambda: _let_go(streams))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # it began as a pipe, and is a log now
    os.write(streams[1], _FIRST)
    return PipeChannel(os.fdopen(streams[0], "rb"), os.fdopen(streams[1], "wb"))


def leave_signals_to_the_server() -> None:
    """In the child: terminals and service managers send theirs to all, and the server decides.

    They are taken and not ignored, for what is ignored is so in the programs that nodes start, too.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)


def _let_go(descriptors: Sequence[int]) -> None:
    """In a fork of a worker: while it kept the channel, nobody would notice the worker's death."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def _pass_on(stream: IO[bytes]) -> None:
    """Writes what a worker writes, in whole lines and states of a bar: others write there, too."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    held = ""
    while chunk := os.read(stream.fileno(), _MOST_HELD):
        held += decoder.decode(chunk)
        whole = max(held.rfind("\n") + 1, held.rfind("\r"))
        if len(held) > _MOST_HELD:
            whole = len(held)
        _write(held[:whole])
        held = held[whole:]
    _write(held)
    stream.close()


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # without a log, too, the worker must be read
        if text:
            sys.stderr.write(text)
            sys.stderr.flush()
