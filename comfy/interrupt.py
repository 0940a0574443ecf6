"""Cancellation of the running prompt: one flag, asked by every long loop.

The flag is set from any thread and read by the worker thread; reading costs well under a
microsecond, so layers and sampling steps ask it freely. Standard library only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class InterruptProcessingException(BaseException):
    """Raised where a long loop notices that its prompt was cancelled.

    It derives from BaseException so that `except Exception` in a node cannot swallow it.
    """


class Interrupt:
    """The cancellation flag, in the form the executor is given.

    Attributes:
        exception: The exception type that means "interrupted".
        elsewhere: Stops what runs, where that is not in this process; it replaces the flag.
    """

    exception = InterruptProcessingException

    def __init__(self) -> None:
        self._flag = threading.Event()
        self.elsewhere: Callable[[], object] | None = None

    def set(self) -> None:
        """Ask the running prompt to stop."""
        if self.elsewhere is not None:
            self.elsewhere()
        else:
            self._flag.set()

    def clear(self) -> None:
        """Forget an earlier request; called before each prompt."""
        self._flag.clear()

    def is_set(self) -> bool:
        """Whether the running prompt was asked to stop."""
        return self._flag.is_set()

    def throw_if_set(self) -> None:
        """Clear the flag and raise InterruptProcessingException when it was set."""
        if self._flag.is_set():
            self._flag.clear()
            raise InterruptProcessingException


INTERRUPT = Interrupt()
"""The flag of this process: there is one worker thread."""


def interrupt_current_processing(value: bool = True) -> None:
    """Set (or with False clear) the cancellation flag."""
    if value:
        INTERRUPT.set()
    else:
        INTERRUPT.clear()


def processing_interrupted() -> bool:
    """Whether the running prompt was asked to stop."""
    return INTERRUPT.is_set()


def throw_exception_if_processing_interrupted() -> None:
    """Raise InterruptProcessingException when the running prompt was asked to stop."""
    INTERRUPT.throw_if_set()
