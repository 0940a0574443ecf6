"""Speed of the HTTP side. The server runs in a second process; this one makes the load.

    python benchmarks/server.py            all measurements
    python benchmarks/server.py get ws     some of them: get, info, history, post, ws

Targets (two cores): 2,000 small GETs a second; /object_info of 450 nodes with its first byte after
10 ms; a history page in time that does not grow with the history; 64 clients that post at once
with none lost, none out of order and a p99 of 50 ms; 200 sockets that follow a run of 1,000 steps
with no frame lost and a p99 delivery of 50 ms.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

NODES = 450
CONNECTIONS = 32
REQUESTS = 8000
HISTORY = 5000
POSTERS, POSTS = 64, 20
SOCKETS, STEPS, STEP_S = 200, 1000, 0.02


# -- the served process -----------------------------------------------------------------------


def _make_class(number: int) -> type:
    inputs = {
        f"input_{index}": ("INT", {"default": index, "min": 0, "max": 100, "tooltip": "A number."})
        for index in range(10)
    }
    members = {
        "INPUT_TYPES": classmethod(lambda _: {"required": inputs}),
        "RETURN_TYPES": ("INT",),
        "FUNCTION": "run",
        "CATEGORY": "bench",
        "OUTPUT_NODE": number == 0,
        "DESCRIPTION": "A node that is only listed. " * 8,
        "run": lambda _, **__: (0,),
    }
    return type(f"Node{number}", (), members)


async def _serve(folder: str) -> None:
    import folder_paths
    from comfy_execution.items import ExecutionStatus
    from comfy_execution.journal import Journal
    from comfy_execution.node_info import node_info
    from comfy_execution.queue import PromptQueue
    from comfy_execution.registry import NodeRegistry
    from comfy_execution.validation import validate_prompt
    from comfy_server import PromptServer, ServerOptions, Services, running
    from utils.start_up import keep_for_good, prepare_interpreter

    prepare_interpreter(keep_pages=False)
    folder_paths.set_base_directory(folder)
    classes = {f"Node{number}": _make_class(number) for number in range(NODES)}
    registry = NodeRegistry(classes)
    queue = PromptQueue(journal=Journal(Path(folder) / "queue.sqlite"))

    def validate(prompt_id: str, prompt: Any, targets: Any) -> Any:
        return validate_prompt(prompt_id, prompt, targets, registry)

    services = Services(
        queue, lambda: list(classes), lambda name: node_info(registry.get(name)), validate
    )
    server = PromptServer(asyncio.get_running_loop(), ServerOptions(port=0), services)

    @server.routes.post("/bench/fill")
    async def fill(request: Any) -> Any:
        from aiohttp import web

        prompt, count = {"1": {"class_type": "Node0", "inputs": {}}}, request.query["count"]
        for number in range(queue.get_tasks_remaining() + len(queue.history), int(count)):
            queue.put((number, f"h{number}", prompt, {"create_time": number}, ["1"]))
            item = queue.get(timeout=1)
            queue.task_done(item[1], {"outputs": {}}, ExecutionStatus("success", True, []))
        return web.Response()

    @server.routes.post("/bench/run")
    async def run(_: Any) -> Any:
        from aiohttp import web

        threading.Thread(target=_run_steps, args=(server,), daemon=True).start()
        return web.Response()

    server.add_routes()
    keep_for_good()
    async with running(server) as listeners:
        sys.stdout.write(f"{listeners[0].port}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def _run_steps(server: Any) -> None:
    """A run of 1,000 steps that nobody owns, as a worker thread would report it."""
    from comfy_execution.events import NodeProgress, Progress, ProgressState

    for step in range(STEPS):
        state = NodeProgress("1", "p", "1", None, "1", "running", step, STEPS)
        server.publish(ProgressState("p", (state,)))
        server.publish(Progress(time.time(), step, "p", "1"))  # value: when it was sent
        time.sleep(STEP_S)


# -- the load ---------------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """One kept-alive connection; answers end by Content-Length or with their last chunk."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._waiter: asyncio.Future[tuple[float, bytes]] | None = None
        self._first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        if not self._buffer:
            self._first = time.perf_counter()
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        if b"transfer-encoding: chunked" in head:
            if self._buffer.endswith(b"\r\n0\r\n\r\n"):
                self._answered(head, bytes(self._buffer[end + 4 :]))
            return
        length = int(head.partition(b"content-length:")[2].split(b"\r", 1)[0] or 0)
        if len(self._buffer) >= end + 4 + length:
            self._answered(head, bytes(self._buffer[end + 4 : end + 4 + length]))

    def _answered(self, head: bytes, body: bytes) -> None:
        self._buffer.clear()
        if not head.startswith(b"http/1.1 200"):
            raise SystemExit(f"unexpected answer: {head[:60]!r}")
        if self._waiter is not None:
            self._waiter.set_result((self._first, body))

    async def ask(self, request: bytes) -> tuple[float, bytes]:
        """Sends and returns (time of the first byte, body)."""
        self._waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._waiter


async def connect(port: int) -> Connection:
    """Opens a connection."""
    loop = asyncio.get_running_loop()
    return (await loop.create_connection(Connection, "127.0.0.1", port))[1]


def get(path: str, port: int, headers: str = "") -> bytes:
    """The bytes of a GET request."""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{headers}\r\n".encode()


def post(path: str, port: int, body: Any) -> bytes:
    """The bytes of a POST request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie, in the unit given."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def measure_get(port: int) -> None:
    """Requests a second on small routes."""
    for path in ("/prompt", "/api/queue", "/features", "/api/jobs?limit=64"):
        connections = [await connect(port) for _ in range(CONNECTIONS)]
        request = get(path, port)

        async def ask_many(connection: Connection, request: bytes = request) -> None:
            for _ in range(REQUESTS // CONNECTIONS):
                await connection.ask(request)

        started = time.perf_counter()
        await asyncio.gather(*map(ask_many, connections))
        rate = REQUESTS / (time.perf_counter() - started)
        print(f"GET {path:22} {rate:8.0f} requests/s   (target 2000)")
        for connection in connections:
            connection.transport.close()


async def measure_info(port: int) -> None:
    """First byte and size of /object_info; "fresh" is what the editor asks for."""
    connection = await connect(port)
    packed = "Accept-Encoding: gzip\r\n"
    for name, headers in (
        ("plain", ""),
        ("gzip", packed),
        ("fresh", f"Cache-Control: no-cache\r\n{packed}"),
    ):
        times, size = [], 0
        for _ in range(15):
            started = time.perf_counter()
            first, body = await connection.ask(get("/object_info", port, headers))
            times.append((first - started) * 1000)
            size = len(body)
        print(
            f"/object_info {name:5} {size / 1024:6.0f} KiB, first byte after "
            f"{statistics.median(times):5.1f} ms, worst {max(times):5.1f} ms   (target 10)"
        )


async def measure_history(port: int) -> None:
    """A page of a short and of a long history."""
    connection = await connect(port)
    for count in (100, HISTORY):
        await connection.ask(post(f"/bench/fill?count={count}", port, {}))
        for path in ("/history?max_items=64", "/api/jobs?status=completed&limit=64"):
            times = []
            for _ in range(20):
                started = time.perf_counter()
                await connection.ask(get(path, port))
                times.append((time.perf_counter() - started) * 1000)
            print(f"{path:40} of {count:5} entries: {statistics.median(times):6.2f} ms")


async def measure_post(port: int) -> None:
    """64 clients that post at once: with pauses as people and scripts make, then without."""
    await _post_prompts(port, "paced", 0.25)
    await _post_prompts(port, "flood", 0.0)


async def _post_prompts(port: int, name: str, pause_s: float) -> None:
    times: list[float] = []

    async def client(number: int) -> list[str]:
        connection, ids = await connect(port), []
        for index in range(POSTS):
            prompt = {
                str(node): {"class_type": "Node0", "inputs": {f"input_{i}": i for i in range(10)}}
                for node in range(8)
            }
            prompt_id = f"{name}-{number}-{index}"
            body = {"prompt": prompt, "client_id": f"c{number}", "prompt_id": prompt_id}
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            started = time.perf_counter()
            _, answer = await connection.ask(post("/prompt", port, body))
            times.append((time.perf_counter() - started) * 1000)
            ids.append(json.loads(answer)["prompt_id"])
        return ids

    started = time.perf_counter()
    sent = await asyncio.gather(*map(client, range(POSTERS)))
    total_s = time.perf_counter() - started
    _, body = await (await connect(port)).ask(get("/queue", port))
    queued = [item[1] for item in json.loads(body)["queue_pending"]]
    place = {prompt_id: index for index, prompt_id in enumerate(queued)}
    lost = sum(prompt_id not in place for ids in sent for prompt_id in ids)
    swapped = sum(
        place[one] > place[other] for ids in sent for one, other in itertools.pairwise(ids)
    )
    print(
        f"POST /prompt, {POSTERS} clients, {name}: {len(times) / total_s:.0f}/s, p50 "
        f"{percentile(times, 0.5):.1f} ms, p99 {percentile(times, 0.99):.1f} ms (target 50), "
        f"lost {lost}, out of order {swapped}"
    )


class Follower(asyncio.Protocol):
    """A socket that reads the send times out of progress frames, and nothing else."""

    START = b'{"type":"progress","data":{"value":'

    def __init__(self, port: int, delays: list[float]) -> None:
        self._request = get(
            "/ws",
            port,
            "Upgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
        )
        self._rest, self._delays = b"", delays
        self.seen = 0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.time()
        *parts, self._rest = (self._rest + data).split(b',"prompt_id"')
        for part in parts:
            _, found, number = part.partition(self.START)
            if found:
                self._delays.append((now - float(number.partition(b",")[0])) * 1000)
                self.seen += 1
        if self.seen == STEPS and not self.done.done():
            self.done.set_result(None)


async def measure_ws(port: int) -> None:
    """200 sockets that follow a run of 1,000 steps."""
    delays: list[float] = []
    loop = asyncio.get_running_loop()
    followers = []
    for _ in range(SOCKETS):
        made = await loop.create_connection(lambda: Follower(port, delays), "127.0.0.1", port)
        followers.append(made[1])
    await asyncio.sleep(0.5)
    gc.disable()
    await (await connect(port)).ask(post("/bench/run", port, {}))
    await asyncio.wait([follower.done for follower in followers], timeout=120)
    lost = sum(STEPS - follower.seen for follower in followers)
    print(
        f"{SOCKETS} sockets x {STEPS} steps of {STEP_S * 1000:.0f} ms: lost {lost}, delivery p50 "
        f"{percentile(delays, 0.5):.1f} ms, p99 {percentile(delays, 0.99):.1f} ms   (target 50)"
    )


MEASUREMENTS = {
    "get": measure_get,
    "info": measure_info,
    "history": measure_history,
    "post": measure_post,
    "ws": measure_ws,
}


def main(arguments: list[str]) -> None:
    """Runs the named measurements, each against a fresh server."""
    if arguments[:1] == ["--serve"]:
        asyncio.run(_serve(arguments[1]))
        return
    unknown = [name for name in arguments if name not in MEASUREMENTS]
    if unknown:
        sys.exit(f"usage: server.py [{'] ['.join(MEASUREMENTS)}]   (none named: all of them)")
    for name in arguments or list(MEASUREMENTS):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--serve", folder]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            try:
                asyncio.run(MEASUREMENTS[name](int(process.stdout.readline())))
            finally:
                process.terminate()
                process.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
