"""Workers on the machines of a Ray cluster.

In an actor runs no model: it starts the worker as a child on its machine, exactly as the server
does on its own, and passes messages on. So native code that dies takes the child and not the actor,
and a worker is the same program everywhere. Ray gives the actor its device; the child inherits it.

Ray is imported when a cluster is asked for and not before.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfy_execution.workers.channel import ChannelClosed, WorkerChannel
from comfy_execution.workers.local import LocalLauncher
from comfy_execution.workers.messages import Message

LONGEST_POLL_S = 1.0
MOST_AT_ONCE = 256
LAST_WORD_S = 10.0

PROGRAM_FOLDER = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Cluster:
    """A cluster this process has joined.

    Attributes:
        ray: The module.
        accelerators: How many GPUs all its machines have.
        processors: How many CPUs.
    """

    ray: Any
    accelerators: int
    processors: int


def connect(address: str) -> Cluster:
    """Joins a cluster.

    Args:
        address: As Ray takes it: ``auto``, ``local``, ``host:port``, ``ray://host:port``.
    Raises:
        OSError: Ray is not installed, or the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise OSError(
            "--ray needs the package ray, which is not installed: "
            f"'{sys.executable} -m pip install ray', or install latentloom[ray]"
        ) from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to strangers
    paths = {"env_vars": {"PYTHONPATH": str(PROGRAM_FOLDER)}}
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, runtime_env=paths, configure_logging=False, **options)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise OSError(f"the Ray cluster {address!r} cannot be joined: {error}") from error
    resources = ray.cluster_resources()
    return Cluster(ray, int(resources.get("GPU", 0)), int(resources.get("CPU", 1)))


class RemoteEnd:
    """What runs in the actor."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str, name: str
    ) -> None:
        self._news: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        launcher = LocalLauncher([sys.executable, *command], lambda _: environment, folder)
        self._worker = launcher.launch(name)
        threading.Thread(target=self._listen, name="news", daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self._news.put(self._worker.receive())
        except ChannelClosed:
            self._news.put(None)

    def send(self, message: Message) -> None:
        """Passes a message to the worker; one that is gone is noticed by ``receive``."""
        try:
            self._worker.send(message)
        except ChannelClosed:
            return

    def receive(self) -> list[Message | None]:
        """What the worker has said meanwhile; after a while nothing. None: it has ended."""
        news: list[Message | None] = []
        with contextlib.suppress(queue.Empty):
            news.append(self._news.get(timeout=LONGEST_POLL_S))
            while news[-1] is not None and len(news) < MOST_AT_ONCE:
                news.append(self._news.get_nowait())
        return news

    def exit_code(self) -> int | None:
        """How the worker has ended."""
        return self._worker.exit_code()


class RayWorker(WorkerChannel):
    """The server's end of an actor and the worker behind it."""

    def __init__(self, cluster: Cluster, actor: Any) -> None:
        self._ray, self._actor = cluster.ray, actor
        self._waiting: deque[Message | None] = deque()

    def send(self, message: Mapping[str, Any]) -> None:
        try:
            self._actor.send.options(concurrency_group="in").remote(dict(message))
        except self._ray.exceptions.RayError as error:
            raise ChannelClosed from error

    def receive(self) -> Message:
        while not self._waiting:
            try:
                self._waiting.extend(
                    self._ray.get(self._actor.receive.options(concurrency_group="out").remote())
                )
            except self._ray.exceptions.RayError as error:
                raise ChannelClosed from error
        message = self._waiting.popleft()
        if message is None:
            raise ChannelClosed
        return message

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def exit_code(self) -> int | None:
        try:
            last = self._actor.exit_code.options(concurrency_group="out").remote()
            code: int | None = self._ray.get(last, timeout=LAST_WORD_S)
        except self._ray.exceptions.RayError:  # the actor, or its machine, is gone
            return None
        self.kill()
        return code


class RayLauncher:
    """Starts workers in actors, each with a GPU of the cluster or with its share of the CPUs.

    Args:
        count: How many there will be.
        command: Command line of the program, without the interpreter.
        environment: Variables the workers get beside those of their machine.
        uses_cpu: Whether they compute without GPUs.
    """

    def __init__(
        self,
        cluster: Cluster,
        count: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        uses_cpu: bool = False,
    ) -> None:
        self._cluster = cluster
        self._command, self._environment = list(command), dict(environment)
        takes_cpu = uses_cpu or not cluster.accelerators
        share = max(1, cluster.processors // count)
        self._actors = cluster.ray.remote(
            num_cpus=share if takes_cpu else 1,
            num_gpus=0 if takes_cpu else 1,
            concurrency_groups={"in": 1, "out": 1},
        )(RemoteEnd)

    def launch(self, name: str) -> RayWorker:
        """Starts a worker where there is room; see ``Launcher``."""
        actor = self._actors.remote(self._command, self._environment, os.getcwd(), name)
        return RayWorker(self._cluster, actor)
