"""The last lines of the terminal, kept for `/internal/logs` and sent to those who watch.

main wraps the standard streams with `LogCapture.wrap`; nothing is captured before. What a listener
itself writes waits for the next flush, so it cannot run in circles.
"""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import Any, TextIO

KEPT_ENTRIES = 300
BAR_STARTS = "\r\n\x1b"  # how a bar goes on: over itself, to its end, or elsewhere
Entry = dict[str, str]
Listener = Callable[[list[Entry], dict[str, int] | None], None]


class LogCapture:
    """Ring of recent writes; every method may be called from any thread."""

    def __init__(self, kept: int = KEPT_ENTRIES) -> None:
        self._entries: deque[Entry] = deque(maxlen=kept)
        self._fresh: list[Entry] = []
        self._listeners: list[Listener] = []
        self._lock = threading.RLock()
        self._last_size: dict[str, int] | None = None
        self._flushing = False

    def listen(self, listener: Listener) -> None:
        """Calls listener(new entries, terminal size if it changed) on each flush."""
        self._listeners.append(listener)

    def entries(self) -> list[Entry]:
        """The kept writes, oldest first: `{"t": ISO local time, "m": text}`."""
        with self._lock:
            return list(self._entries)

    @staticmethod
    def terminal_size() -> dict[str, int]:
        """Columns and rows of the terminal."""
        size = shutil.get_terminal_size()
        return {"cols": size.columns, "rows": size.lines}

    def write(self, text: str) -> None:
        """Takes one write of a stream; one that starts with CR replaces an unfinished line."""
        if not text:
            return
        entry = {"t": datetime.now().isoformat(), "m": text}
        with self._lock:
            if text.startswith("\r") and self._entries:
                previous = self._entries[-1]["m"]
                if previous.startswith("\r") and not previous.endswith("\n"):
                    self._entries.pop()
            self._entries.append(entry)
            self._fresh.append(entry)
            if len(self._fresh) > KEPT_ENTRIES:
                del self._fresh[0]

    def flush(self) -> None:
        """Hands the writes since the last flush to the listeners."""
        with self._lock:
            if self._flushing or not self._fresh:
                return
            fresh, self._fresh = self._fresh, []
            size: dict[str, int] | None = self.terminal_size()
            if size == self._last_size:
                size = None
            else:
                self._last_size = size
            self._flushing = True
        try:
            for listener in self._listeners:
                listener(fresh, size)
        finally:
            self._flushing = False

    def wrap(self, stream: TextIO) -> TextIO:
        """A stream that writes to `stream` and is captured."""
        return _Tee(stream, self)  # type: ignore[return-value]  # everything else is delegated


class _Tee:
    """Passes everything on to a stream and shows writes to the capture.

    A progress bar stands in a line that has not ended; what is no bar begins on the next one.
    """

    def __init__(self, stream: TextIO, capture: LogCapture) -> None:
        self._stream = stream
        self._capture = capture
        self._is_behind_bar = False

    def write(self, text: str) -> int:
        if text and self._is_behind_bar and text[0] not in BAR_STARTS and text.endswith("\n"):
            text = f"\n{text}"
        if text:
            last = text.rpartition("\n")[2]
            self._is_behind_bar = last.startswith("\r") and last != "\r"
        self._capture.write(text)
        if text.endswith("\n"):
            self._capture.flush()
        return self._stream.write(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._stream.flush()
        self._capture.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
