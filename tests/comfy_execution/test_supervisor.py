"""The supervisor: restarts what crashed, ends what it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from comfy_execution import supervisor
from comfy_execution.supervisor import RestartPolicy, supervise
from tests.support.waiting import PATIENCE_S, read_until

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals are a POSIX matter")

REPOSITORY = Path(__file__).resolve().parents[2]
QUICK = RestartPolicy(most=3, within_s=60, pause_s=0)


def run(tmp_path: Path, code: str) -> tuple[int, list[str]]:
    """Supervises a child that may write lines to a log; returns exit code and the log."""
    log = tmp_path / "log"
    log.touch()
    prelude = textwrap.dedent(
        """
        import os, signal, sys
        from comfy_execution.supervisor import (
            crashed_by, tell_serving, tie_to_parent, was_native_crash
        )
        assert tie_to_parent(os.environ)
        def say(text):
            with open(sys.argv[1], "a") as log:
                log.write(f"{text}\\n")
        starts = len(open(sys.argv[1]).readlines())
        """
    )
    command = [sys.executable, "-c", prelude + textwrap.dedent(code), str(log)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return supervise(command, environment, QUICK), log.read_text().split()


def test_an_ordinary_end_is_passed_on(tmp_path: Path) -> None:
    assert run(tmp_path, "say('up'); sys.exit(3)") == (3, ["up"])
    (tmp_path / "log").unlink()
    assert run(tmp_path, "say('up')") == (0, ["up"])


def test_a_native_crash_is_followed_by_a_new_start_that_knows_of_it(tmp_path: Path) -> None:
    code = """
    say(f"{crashed_by(os.environ)},{was_native_crash(os.environ)}")
    if starts == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    """
    number = int(signal.SIGSEGV)
    assert run(tmp_path, code) == (0, ["None,False", f"{number},True"])


def test_a_killed_child_is_started_again_but_its_prompt_may_be_retried(tmp_path: Path) -> None:
    code = """
    say(was_native_crash(os.environ))
    if starts == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run(tmp_path, code) == (0, ["False", "False"])


def test_a_child_may_ask_for_a_restart(tmp_path: Path) -> None:
    code = f"say('up'); sys.exit({supervisor.RESTART_EXIT_CODE} if starts == 0 else 0)"
    assert run(tmp_path, code) == (0, ["up", "up"])


def test_a_child_that_always_crashes_is_given_up(tmp_path: Path) -> None:
    exit_code, starts = run(tmp_path, "say('up'); os.kill(os.getpid(), signal.SIGABRT)")
    assert exit_code == 1
    assert len(starts) == QUICK.most + 1


def test_a_child_that_served_before_it_crashed_is_always_started_again(tmp_path: Path) -> None:
    code = f"""
    say('up')
    if starts < {3 * QUICK.most}:
        tell_serving(os.environ)
        os.kill(os.getpid(), signal.SIGABRT)
    """
    exit_code, starts = run(tmp_path, code)
    assert (exit_code, len(starts)) == (0, 3 * QUICK.most + 1)


SUPERVISED = textwrap.dedent(
    """
    import os, sys
    from comfy_execution.supervisor import supervise
    child = (
        "import os, sys, time\\n"
        "from comfy_execution.supervisor import tie_to_parent\\n"
        "tie_to_parent(os.environ)\\n"
        "print(os.getpid(), flush=True)\\n"
        "time.sleep(600)\\n"
    )
    sys.exit(supervise([sys.executable, "-c", child], os.environ))
    """
)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_child_ends_with_its_supervisor(number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", SUPERVISED], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(number)
    parent.wait(PATIENCE_S)
    assert not read_until(lambda: is_alive(child), False), "the child outlived its supervisor"
    parent.stdout.close()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie waits for whoever adopted it
