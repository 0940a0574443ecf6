"""How messages go between two processes: each as its length (4 bytes, big-endian) and its JSON."""

from __future__ import annotations

import contextlib
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import IO, Any, Protocol

from comfy_execution.workers.messages import Message, dump, load

_LENGTH = struct.Struct(">I")


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel(ABC):
    """Messages to and from one other process."""

    @abstractmethod
    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message; callable from any thread.

        Raises:
            ChannelClosed: there is nobody to take it.
        """

    @abstractmethod
    def receive(self) -> Message:
        """Waits for the next message; for one thread.

        Raises:
            ChannelClosed: there will be none.
        """


class WorkerChannel(Channel):
    """The server's end: with it a worker is ended, too. Here ``send`` never waits."""

    @abstractmethod
    def kill(self) -> None:
        """Ends the worker at once; callable from any thread, more than once."""

    @abstractmethod
    def exit_code(self) -> int | None:
        """How the worker has ended, as ``subprocess`` tells it; None if that is not known."""


class Launcher(Protocol):
    """Starts workers of one kind."""

    def launch(self, name: str) -> WorkerChannel:
        """Starts a worker and returns at once; its first message says that it is ready.

        Raises:
            OSError: it cannot be started; the text says why.
        """


class PipeChannel(Channel):
    """Messages through two streams of bytes."""

    def __init__(self, reading: IO[bytes], writing: IO[bytes]) -> None:
        self._reading, self._writing = reading, writing
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        data = dump(message)
        try:
            with self._lock:
                self._writing.write(_LENGTH.pack(len(data)) + data)
                self._writing.flush()
        except (OSError, ValueError) as error:  # ValueError: closed on this side
            raise ChannelClosed from error

    def receive(self) -> Message:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return load(self._read(length))

    def skip_past(self, mark: bytes) -> bytes:
        """Reads up to and with a mark; returns what came before it.

        Raises:
            ChannelClosed: it never came.
        """
        read = bytearray()
        while not read.endswith(mark):
            read += self._read(1)
        return bytes(read[: -len(mark)])

    def _read(self, count: int) -> bytes:
        try:
            data = self._reading.read(count)
        except (OSError, ValueError) as error:
            raise ChannelClosed from error
        if len(data) < count:
            raise ChannelClosed
        return data

    def close(self) -> None:
        """Closes both streams."""
        for stream in (self._reading, self._writing):
            with contextlib.suppress(OSError):
                stream.close()
