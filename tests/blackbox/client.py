"""A client as published ones are: urllib, websocket-client, frames collected until the prompt ends.

Nothing here comes from the product but `GraphBuilder`, which clients use as well.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import websocket

from comfy_execution.graph_utils import GraphBuilder
from tests.support.server_process import ServerProcess

Frame = dict[str, Any]
Graph = GraphBuilder | Mapping[str, Any]

END_TIMEOUT_S = 120.0
"""Longest wait for a prompt; generous, for machines that others use too."""


_numbers = itertools.count(1000)


def fresh() -> int:
    """A number that no other prompt has had, so that no earlier result fits."""
    return next(_numbers)


def graph() -> GraphBuilder:
    """A graph to be built, with ids 1, 2, ..."""
    return GraphBuilder(prefix="")


def posted(prompt: Graph) -> dict[str, Any]:
    """A graph as it is posted."""
    return prompt.finalize() if isinstance(prompt, GraphBuilder) else dict(prompt)


@dataclass
class Outcome:
    """What a client learns of one prompt.

    Attributes:
        frames: Text frames of this prompt in order, and those that name none.
        binary: Binary frames in order.
        entry: Its history.
    """

    prompt_id: str
    node_errors: dict[str, Any] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)
    binary: list[bytes] = field(default_factory=list)
    entry: dict[str, Any] = field(default_factory=dict)

    def data(self, kind: str) -> list[Any]:
        """The data of all frames of a type."""
        return [frame["data"] for frame in self.frames if frame["type"] == kind]

    @property
    def ran(self) -> list[str]:
        """Ids of nodes in the order in which they were called."""
        return [data["node"] for data in self.data("executing") if data["node"] is not None]

    @property
    def cached(self) -> set[str]:
        """Ids of nodes that were announced as known."""
        return {name for data in self.data("execution_cached") for name in data["nodes"]}

    @property
    def error(self) -> Any:
        """Data of the last error; None if there was none."""
        errors = self.data("execution_error")
        return errors[-1] if errors else None

    @property
    def succeeded(self) -> bool:
        """Whether frames and history both say so."""
        status = self.entry["status"]
        says = [bool(self.data("execution_success")), status["completed"]]
        assert says[0] == says[1] == (status["status_str"] == "success"), status
        return says[0]

    def shown(self, node: Any, kind: str = "value") -> Any:
        """What a node showed, by its history; the prompt must have succeeded."""
        assert self.succeeded, self.error
        return self.entry["outputs"][getattr(node, "id", node)][kind]


class Client:
    """One socket and the calls that go with it.

    Attributes:
        client_id: Who the server believes this is.
    """

    def __init__(self, server: ServerProcess, client_id: str | None = None) -> None:
        self.server = server
        self.client_id = client_id or uuid.uuid4().hex
        self.socket = websocket.WebSocket()
        self.socket.connect(f"ws://127.0.0.1:{server.port}/ws?clientId={self.client_id}")
        self.socket.settimeout(END_TIMEOUT_S)

    def close(self) -> None:
        """Hangs up."""
        self.socket.close()

    def send_flags(self, **flags: Any) -> None:
        """Says what this client understands; only possible before anything else."""
        self.socket.send(json.dumps({"type": "feature_flags", "data": flags}))

    def submit(self, prompt: Graph, **fields: Any) -> tuple[int, Any]:
        """Posts a prompt; returns status and answer."""
        body = {"prompt": posted(prompt), "client_id": self.client_id, **fields}
        return self.server.post("/prompt", body)

    def queue(self, prompt: Graph, **fields: Any) -> str:
        """Posts a prompt that must be accepted; returns its id."""
        status, answer = self.submit(prompt, **fields)
        assert status == 200, answer
        return str(answer["prompt_id"])

    def refused(self, prompt: Graph, **fields: Any) -> Any:
        """Posts a prompt that must not be accepted; returns the answer."""
        status, answer = self.submit(prompt, **fields)
        assert status == 400, answer
        return answer

    def run(self, prompt: Graph, **fields: Any) -> Outcome:
        """Runs a prompt to its end."""
        status, answer = self.submit(prompt, **fields)
        assert status == 200, answer
        outcome = self.follow(answer["prompt_id"])
        outcome.node_errors = answer["node_errors"]
        return outcome

    def follow(self, prompt_id: str) -> Outcome:
        """Collects frames until `executing` with node null says that the prompt has ended."""
        outcome = Outcome(prompt_id)
        for frame in self.frames():
            if isinstance(frame, bytes):
                outcome.binary.append(frame)
                continue
            data = frame["data"] if isinstance(frame["data"], dict) else {}
            if data.get("prompt_id", prompt_id) == prompt_id:
                outcome.frames.append(frame)
            if is_end(frame, prompt_id):
                break
        outcome.entry = self.server.get(f"/history/{prompt_id}")[prompt_id]
        return outcome

    def wait_for(self, kind: str, **expected: Any) -> Any:
        """Reads frames until one of this type has these data; returns all its data."""
        for frame in self.frames():
            if isinstance(frame, bytes) or frame["type"] != kind:
                continue
            data = frame["data"]
            if all(data.get(name) == value for name, value in expected.items()):
                return data
        raise AssertionError("the socket was closed")

    def frames(self) -> Iterator[Frame | bytes]:
        """Frames as they come."""
        while True:
            message = self.socket.recv()
            if isinstance(message, bytes):
                yield message
            elif message:
                yield json.loads(message)
            else:
                return

    def waiting(self, quiet_s: float = 0.2) -> list[Frame | bytes]:
        """Frames that come until there is silence for a while."""
        found: list[Frame | bytes] = []
        self.socket.settimeout(quiet_s)
        try:
            found.extend(self.frames())
        except websocket.WebSocketTimeoutException:
            pass
        finally:
            self.socket.settimeout(END_TIMEOUT_S)
        return found

    def image(self, place: Mapping[str, str]) -> bytes:
        """The file behind one item of an output."""
        query = "&".join(f"{key}={place[key]}" for key in ("filename", "subfolder", "type"))
        return self.server.get_bytes(f"/view?{query}")


def is_end(frame: Frame, prompt_id: str) -> bool:
    """Whether this frame says that the prompt has ended."""
    data = frame["data"]
    return frame["type"] == "executing" and data["node"] is None and data["prompt_id"] == prompt_id


@contextmanager
def connected(server: ServerProcess, client_id: str | None = None) -> Iterator[Client]:
    """A client for the length of a with block."""
    client = Client(server, client_id)
    try:
        yield client
    finally:
        client.close()
