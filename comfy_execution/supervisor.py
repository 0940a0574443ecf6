"""A parent process that starts the server again when native code has killed it.

The child ends when its supervisor does, however that ends: it holds the reading end of a pipe whose
writing end only the supervisor has, and on Linux the kernel is asked as well. Through a second pipe
it tells that it serves: one that never came to that is not started for ever. Standard library only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

logger = logging.getLogger(__name__)

RESTART_EXIT_CODE = 75
"""A child that exits with this asks to be started again."""
LIFELINE_VARIABLE = "LATENTLOOM_LIFELINE"
"""File descriptor of the pipe, for ``tie_to_parent``."""
SERVING_VARIABLE = "LATENTLOOM_SERVING"
"""File descriptor of the second pipe, for ``tell_serving``; absent on Windows."""
WORKER_VARIABLE = "LATENTLOOM_WORKER"
"""Name of the worker that a process is to be; absent in the server."""
CRASH_VARIABLE = "LATENTLOOM_CRASHED"
"""Number of the signal that ended the previous child, if one did."""

NATIVE_CRASH_SIGNALS = frozenset(
    getattr(signal, name)
    for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
    if hasattr(signal, name)
)
"""Signals that say the process's own code is at fault: the same prompt would crash again."""

_WINDOWS_CRASH = 0xC0000000  # exit codes from here on are exceptions nobody handled


@dataclass(frozen=True)
class RestartPolicy:
    """How often a child may be restarted before the supervisor gives up.

    A child that has served and then died has lost one job at most, and the next one has one job
    less: it is always restarted.

    Attributes:
        most: Restarts within ``within_s`` of children that never served.
        within_s: Length of that window.
        pause_s: Wait before a restart, times the deaths within the window.
    """

    most: int = 5
    within_s: float = 60.0
    pause_s: float = 0.2


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    policy: RestartPolicy | None = None,
) -> int:
    """Runs a command, again and again as long as it dies of crashes; returns its exit code.

    Interrupt and termination signals are passed on to the child, whose exit then ends this too.

    Args:
        command: The child's command line.
        environment: Its environment; the lifeline is added.
        policy: When to give up.
    """
    policy = policy or RestartPolicy()
    deaths: list[_Death] = []
    crashed_by: int | None = None
    while True:
        code, stopped, served = _run_child(command, environment, crashed_by)
        if stopped or not _is_crash(code):
            return code if code >= 0 else 128 - code
        crashed_by = -code if code < 0 else None
        now = time.monotonic()
        deaths = [death for death in deaths if now - death.moment < policy.within_s]
        deaths.append(_Death(now, served))
        if sum(not death.served for death in deaths) > policy.most:
            logger.critical(
                "the server died %d times within %.0f s before it served; giving up",
                policy.most + 1, policy.within_s,
            )  # fmt: skip
            return 1
        if code != RESTART_EXIT_CODE:
            logger.error("the server was killed by %s; starting it again", cause_of(code))
        time.sleep(policy.pause_s * len(deaths))


class _Death(NamedTuple):
    moment: float
    served: bool


class _ChildEnd(NamedTuple):
    code: int
    stopped: bool  # we were told to stop it
    served: bool


def _run_child(
    command: Sequence[str], environment: Mapping[str, str], crashed_by: int | None
) -> _ChildEnd:
    """Runs the child to its end."""
    reading, writing = os.pipe()
    news, telling = os.pipe()
    env = {**environment, LIFELINE_VARIABLE: str(reading), SERVING_VARIABLE: str(telling)}
    env.pop(CRASH_VARIABLE, None)
    if crashed_by is not None:
        env[CRASH_VARIABLE] = str(crashed_by)
    stopped = threading.Event()
    try:
        child = _start(command, env, reading, telling)
        os.close(reading)
        with _signals_passed_to(child, stopped):
            code = child.wait()
        os.write(telling, b"\0")  # what is read first says who wrote first
        served = os.read(news, 1) != b"\0"
    finally:
        for descriptor in (writing, news, telling):
            os.close(descriptor)
    return _ChildEnd(code, stopped.is_set(), served)


def _start(
    command: Sequence[str], env: dict[str, str], reading: int, telling: int
) -> subprocess.Popen[bytes]:
    if os.name == "nt":
        import msvcrt

        handle = msvcrt.get_osfhandle(reading)  # type: ignore[attr-defined, unused-ignore]
        os.set_handle_inheritable(handle, True)  # type: ignore[attr-defined, unused-ignore]
        env[LIFELINE_VARIABLE] = str(handle)
        env.pop(SERVING_VARIABLE)
        return subprocess.Popen(command, env=env, close_fds=False)
    return subprocess.Popen(command, env=env, pass_fds=(reading, telling))


@contextlib.contextmanager
def _signals_passed_to(child: subprocess.Popen[bytes], stopped: threading.Event) -> Iterator[None]:
    """While the block runs, signals that mean "stop" go to the child."""

    def pass_on(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        stopped.set()
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)

    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tie_to_parent(environment: Mapping[str, str]) -> bool:
    """Makes this process end when its supervisor does; called early in the child.

    Args:
        environment: Where the supervisor left the lifeline.
    Returns:
        Whether there is a supervisor.
    """
    value = environment.get(LIFELINE_VARIABLE)
    if value is None:
        return False
    descriptor = int(value)
    if os.name == "nt":
        import msvcrt

        descriptor = msvcrt.open_osfhandle(descriptor, os.O_RDONLY)  # type: ignore[attr-defined, unused-ignore]
    else:
        end_with_parent()
    os.set_inheritable(descriptor, False)
    if SERVING_VARIABLE in environment:
        os.set_inheritable(int(environment[SERVING_VARIABLE]), False)
    threading.Thread(
        target=_end_with_pipe, args=(descriptor,), name="lifeline", daemon=True
    ).start()
    return True


def tell_serving(environment: Mapping[str, str]) -> None:
    """Tells the supervisor, if there is one, that this process serves."""
    value = environment.get(SERVING_VARIABLE)
    if value is not None:
        with contextlib.suppress(OSError):  # the supervisor is gone, and soon so are we
            os.write(int(value), b"1")


def crashed_by(environment: Mapping[str, str]) -> int | None:
    """The signal that killed the previous child; None if this is the first or it was no crash."""
    value = environment.get(CRASH_VARIABLE)
    return int(value) if value else None


def was_native_crash(environment: Mapping[str, str]) -> bool:
    """Whether the previous child died of its own native code, so that a retry is pointless."""
    return crashed_by(environment) in NATIVE_CRASH_SIGNALS


def _end_with_pipe(descriptor: int) -> None:
    """Blocks until the supervisor has closed its end, then ends the process at once."""
    while os.read(descriptor, 1):
        pass
    os._exit(1)


def end_with_parent() -> None:
    """Has Linux kill this process with its parent, even while native code holds the interpreter."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _is_crash(code: int) -> bool:
    return code < 0 or code == RESTART_EXIT_CODE or code >= _WINDOWS_CRASH


def cause_of(code: int) -> str:
    """What ended a process, in words, by its exit code."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code:#x}"
