"""Workers on the machines of a Ray cluster: what runs in its client, and in its actors.

The client is a process of its own (``main``), for Ray ends the process that it is in when the
cluster is gone for a minute, and the server must live. It passes messages on between the server and
the actors, each with the number of its worker.

In an actor runs no model: it starts the worker as a child on its machine, exactly as the server
does on its own, and passes messages on. So native code that dies takes the child and not the actor,
and a worker is the same program everywhere. Ray gives the actor its device; the child inherits it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comfy_execution import supervisor
from comfy_execution.workers.channel import ChannelClosed, PipeChannel
from comfy_execution.workers.local import (
    LocalLauncher,
    leave_signals_to_the_server,
    standard_streams,
)
from comfy_execution.workers.messages import Message

LONGEST_POLL_S = 1.0
MOST_AT_ONCE = 256
LAST_WORD_S = 10.0

PROGRAM_FOLDER = Path(__file__).resolve().parent.parent.parent


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
        """Passes a message to the worker; that it is gone is noticed by ``receive``."""
        self._worker.send(message)

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


class Client:
    """The cluster's client: launches actors and passes messages on, until the server is gone.

    Args:
        ray: The module, joined to a cluster.
        server: The channel to the server.
        count: How many workers there will be.
        command: Command line of the program, without the interpreter.
        environment: Variables the workers get beside those of their machine.
        uses_cpu: Whether they compute without GPUs.
    """

    def __init__(
        self,
        ray: Any,
        server: PipeChannel,
        count: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        uses_cpu: bool,
    ) -> None:
        self._ray, self._server = ray, server
        self._command, self._environment = list(command), dict(environment)
        resources = ray.cluster_resources()
        gpus = 0 if uses_cpu else int(resources.get("GPU", 0))
        self._count = count or max(1, gpus)
        share = max(1, int(resources.get("CPU", 1)) // self._count)
        self._actor_class = ray.remote(
            num_cpus=1 if gpus else share,
            num_gpus=1 if gpus else 0,
            concurrency_groups={"in": 1, "out": 1},
        )(RemoteEnd)
        self._actors: dict[int, Any] = {}

    def serve(self) -> None:
        """Does what the server says."""
        self._server.send({"say": "joined", "count": self._count})
        with contextlib.suppress(ChannelClosed):
            while True:
                self._obey(self._server.receive())

    def _obey(self, message: Message) -> None:
        number = message["worker"]
        if message["do"] == "launch":
            given = (self._command, self._environment, os.getcwd(), message["name"])
            actor = self._actors[number] = self._actor_class.remote(*given)
            threading.Thread(target=self._listen, args=(number, actor), daemon=True).start()
        elif number not in self._actors:
            return  # it has ended meanwhile
        elif message["do"] == "pass":
            actor = self._actors[number]
            with contextlib.suppress(self._ray.exceptions.RayError):  # the listener notices
                actor.send.options(concurrency_group="in").remote(message["message"])
        elif message["do"] == "kill":
            self._ray.kill(self._actors[number])

    def _listen(self, number: int, actor: Any) -> None:
        """Passes on what a worker says, and says how it has ended."""
        code: int | None = None
        errors = (self._ray.exceptions.RayError, ChannelClosed)
        with contextlib.suppress(*errors):  # the actor, its machine, or the server is gone
            receive = actor.receive.options(concurrency_group="out")
            while None not in (news := self._ray.get(receive.remote())):
                self._pass_on(number, news)
            self._pass_on(number, news[:-1])
            last = actor.exit_code.options(concurrency_group="out").remote()
            code = self._ray.get(last, timeout=LAST_WORD_S)
        self._actors.pop(number, None)
        self._ray.kill(actor)
        with contextlib.suppress(ChannelClosed):
            self._server.send({"say": "ended", "worker": number, "code": code})

    def _pass_on(self, number: int, news: Sequence[Message | None]) -> None:
        for message in news:
            self._server.send({"say": "passed", "worker": number, "message": message})


def join(address: str) -> Any:
    """Joins a cluster; returns the module ``ray``.

    Args:
        address: As Ray takes it: ``auto``, ``local``, ``host:port``, ``ray://host:port``.
    Raises:
        OSError: the cluster cannot be reached.
    """
    import ray

    paths = {"env_vars": {"PYTHONPATH": str(PROGRAM_FOLDER)}}
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, runtime_env=paths, configure_logging=False, **options)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise OSError(f"the Ray cluster {address!r} cannot be joined: {error}") from error
    return ray


def main() -> None:
    """The client's process: its arguments are JSON, its input and output the channel."""
    given = json.loads(sys.argv[1])
    server = standard_streams()
    os.environ.pop(supervisor.WORKER_VARIABLE, None)
    leave_signals_to_the_server()
    try:
        ray = join(given.pop("address"))
    except OSError as error:
        server.send({"say": "refused", "why": str(error)})
        return
    Client(ray, server, **given).serve()
    ray.shutdown()
