"""The server's side of a Ray cluster: one child process, which is the cluster's client.

Ray is imported in that child only. When it dies, because the cluster is gone, so do the workers,
and the next attempt to start one starts it anew.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from comfy_execution.workers.channel import ChannelClosed, WorkerChannel
from comfy_execution.workers.local import LocalWorker
from comfy_execution.workers.messages import Message
from comfy_execution.workers.ray_actors import PROGRAM_FOLDER

_CLIENT = "from comfy_execution.workers.ray_actors import main; main()"
_ENDED: Message = {"say": "ended", "code": None}

_numbers = itertools.count(1)


class RayWorker(WorkerChannel):
    """A worker in an actor; its messages go through the client."""

    def __init__(self, client: LocalWorker, name: str) -> None:
        self.number = next(_numbers)
        self._client = client
        self._news: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._code: int | None = None
        client.send({"do": "launch", "worker": self.number, "name": name})

    def take(self, message: Message) -> None:
        """What the client says of this worker."""
        self._news.put(message)

    def send(self, message: Mapping[str, Any]) -> None:
        self._client.send({"do": "pass", "worker": self.number, "message": message})

    def receive(self) -> Message:
        came = self._news.get()
        if came["say"] == "ended":
            self._code = came["code"]
            raise ChannelClosed
        message: Message = came["message"]
        return message

    def kill(self) -> None:
        self._client.send({"do": "kill", "worker": self.number})

    def exit_code(self) -> int | None:
        return self._code


class RayLauncher:
    """Starts workers in actors, each with a GPU of the cluster or with its share of the CPUs.

    Args:
        address: Of the cluster; see ``ray_actors.join``.
        count: How many workers there will be; 0: as many as the cluster has GPUs, or 1.
        command: Command line of the program, without the interpreter.
        environment: Variables the workers get beside those of their machine.
        uses_cpu: Whether they compute without GPUs.
    Raises:
        OSError: Ray is not installed.
    """

    def __init__(
        self,
        address: str,
        count: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        uses_cpu: bool = False,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise OSError(
                "--ray needs the package ray, which is not installed: "
                f"'{sys.executable} -m pip install ray', or install latentloom[ray]"
            )
        self._given = {
            "address": address,
            "count": count,
            "command": list(command),
            "environment": dict(environment),
            "uses_cpu": uses_cpu,
        }
        self._lock = threading.Lock()
        self._client: LocalWorker | None = None
        self._workers: dict[int, RayWorker] = {}

    def connect(self) -> int:
        """Joins the cluster; returns how many workers there will be.

        Raises:
            OSError: it cannot be reached.
        """
        with self._lock:
            return self._connect()

    def launch(self, name: str) -> RayWorker:
        """Starts a worker where there is room; see ``Launcher``."""
        with self._lock:
            if self._client is None:
                self._connect()
            assert self._client is not None
            worker = RayWorker(self._client, name)
            self._workers[worker.number] = worker
        return worker

    def _connect(self) -> int:
        paths = [str(PROGRAM_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
        quiet = {"RAY_USAGE_STATS_ENABLED": "0"}  # nothing is told to strangers
        environment = {**quiet, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        client = LocalWorker([sys.executable, "-c", _CLIENT, json.dumps(self._given)], environment)
        try:
            first = client.receive()
        except ChannelClosed:
            first = {"say": "refused", "why": "Ray's client has died; the lines above say why"}
        if first["say"] == "refused":
            client.exit_code()
            raise OSError(first["why"])
        self._client = client
        threading.Thread(target=self._listen, args=(client,), name="ray", daemon=True).start()
        return int(first["count"])

    def _listen(self, client: LocalWorker) -> None:
        """Gives each worker what is said of it; with the client all of them end."""
        while True:
            try:
                message = client.receive()
            except ChannelClosed:
                break
            worker = self._workers.get(message["worker"])
            if message["say"] == "ended":
                self._workers.pop(message["worker"], None)
            if worker is not None:
                worker.take(message)
        client.exit_code()
        with self._lock:
            self._client = None
            left, self._workers = self._workers, {}
        for worker in left.values():
            worker.take(_ENDED)
