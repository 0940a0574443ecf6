"""One server for each cache policy, started when its first test comes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.blackbox.client import Client, connected
from tests.support.server_process import ServerProcess, running_server

FOLDER = Path(__file__).resolve().parent

POLICIES = {
    "classic": ("--cache-classic",),
    "lru": ("--cache-lru", "100"),
    "none": ("--cache-none",),
    "ram": ("--cache-ram", "0.25"),
}


def arguments(base: Path, policy: str = "classic") -> list[str]:
    """The command line of a server under test, as launchers write it."""
    return [
        *("--cpu", "--listen", "127.0.0.1", "--output-directory", str(base / "results")),
        *("--extra-model-paths-config", str(FOLDER / "extra_model_paths.yaml")),
        *POLICIES[policy],
    ]


@dataclass(frozen=True)
class House:
    """A running server and the policy it runs under."""

    server: ServerProcess
    policy: str

    @property
    def keeps(self) -> bool:
        """Whether results outlive their prompt."""
        return self.policy != "none"


@pytest.fixture(scope="session", params=POLICIES)
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A server under each policy in turn; tests of one policy run together."""
    base = tmp_path_factory.mktemp(f"house-{request.param}")
    with running_server(base, *arguments(base, request.param)) as server:
        yield House(server, request.param)


@pytest.fixture
def client(house: House) -> Iterator[Client]:
    """A client of its own for each test."""
    with connected(house.server) as own:
        yield own


@pytest.fixture
def second_client(house: House) -> Iterator[Client]:
    """Somebody else."""
    with connected(house.server) as other:
        yield other


@pytest.fixture
def within() -> Callable[..., None]:
    """Asserts a latency: within(goal, work), with slack as the machine is loaded.

    The load is that of the last minute, so others may have begun to compute without being seen in
    it: one of several attempts is enough. Work that returns a number has measured itself.
    """

    def check(goal_s: float, work: Callable[[], float | None], slack: float = 2.0) -> None:
        measured_s: list[float] = []
        while len(measured_s) < 5:
            begin = time.monotonic()
            measured = work()
            measured_s.append(time.monotonic() - begin if measured is None else measured)
            busy = os.getloadavg()[0] / (os.cpu_count() or 1)
            if measured_s[-1] < goal_s * max(1.0, slack * busy):
                return
        raise AssertionError(f"{measured_s} s; goal {goal_s} s, load {busy:.1f} a core")

    return check


only_classic = pytest.mark.parametrize("house", ["classic"], indirect=True)
"""For tests in which the policy makes no difference."""
