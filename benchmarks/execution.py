"""Figures of the execution engine: cost of a node, of a cached prompt, of the queue.

    python benchmarks/execution.py                     the executor alone
    python benchmarks/execution.py --url http://127.0.0.1:8188   a running server, through HTTP

The goals are those of the issue: at most 60 microseconds a trivial node, a cached prompt of 1,000
nodes in under 30 ms, enqueue to start under 3 ms, and cost that grows linearly.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from comfy_execution.caching import make_cache
from comfy_execution.executor import ExecutorOptions, PromptExecutor
from comfy_execution.journal import Journal
from comfy_execution.queue import PromptQueue
from comfy_execution.registry import NodeRegistry
from comfy_execution.validation import validate_prompt
from comfy_execution.worker import Worker

Prompt = dict[str, Any]
MICRO, MILLI = 1e6, 1e3


class Number:
    """A constant."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "run"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("INT", {"default": 0})}}

    def run(self, value: int) -> tuple[int]:
        return (value,)


class Add(Number):
    """The trivial node whose overhead is measured."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"a": ("INT",), "b": ("INT",)}}

    def run(self, a: int, b: int) -> tuple[int]:  # type: ignore[override]
        return (a + b,)


class Show:
    """Output node."""

    RETURN_TYPES = ()
    FUNCTION = "run"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("*",)}}

    def run(self, value: Any) -> dict[str, Any]:
        return {"ui": {"value": [value]}}


REGISTRY = NodeRegistry({"Number": Number, "Add": Add, "Show": Show})


def chain(count: int, salt: int = 0) -> Prompt:
    """count nodes, each linked to the one before, and an output."""
    prompt: Prompt = {"n0": {"class_type": "Number", "inputs": {"value": salt}}}
    for i in range(1, count - 1):
        prompt[f"n{i}"] = {"class_type": "Add", "inputs": {"a": [f"n{i - 1}", 0], "b": i}}
    prompt["show"] = {"class_type": "Show", "inputs": {"value": [f"n{count - 2}", 0]}}
    return prompt


def fan(count: int) -> Prompt:
    """A source, count - 2 nodes on it, one of which is shown; and outputs on all of them."""
    prompt: Prompt = {"n0": {"class_type": "Number", "inputs": {"value": 1}}}
    for i in range(count // 2):
        prompt[f"a{i}"] = {"class_type": "Add", "inputs": {"a": ["n0", 0], "b": i}}
        prompt[f"s{i}"] = {"class_type": "Show", "inputs": {"value": [f"a{i}", 0]}}
    return prompt


def best_of(action: Callable[[], Any], times: int = 5) -> float:
    """Shortest of several runs, in seconds of processor time: other programs do not count."""
    found = []
    for _ in range(times):
        gc.collect()
        started = time.process_time()
        action()
        found.append(time.process_time() - started)
    return min(found)


def report(name: str, value: float, unit: str, goal: float | None = None) -> None:
    """Prints one figure beside its goal."""
    verdict = "" if goal is None else f"   goal {goal:g}: {'met' if value <= goal else 'MISSED'}"
    print(f"{name:<58}{value:>10.2f} {unit}{verdict}")


def outputs_of(prompt: Prompt) -> list[str]:
    return [name for name, node in prompt.items() if node["class_type"] == "Show"]


def measure_nodes() -> None:
    """Cost of a node, by number of nodes, shape of the graph and cache policy."""
    for policy in ("classic", "lru", "none"):
        for count in (100, 1000, 10_000):
            prompt = chain(count)

            def run(prompt: Prompt = prompt, policy: str = policy) -> None:
                cache = make_cache(policy, lru_size=100)
                executor = PromptExecutor(REGISTRY, options=ExecutorOptions(cache=cache))
                executor.execute(prompt, "p", {"client_id": "c"}, outputs_of(prompt))
                assert executor.success

            goal = 60.0 if (policy, count) == ("classic", 1000) else None
            report(
                f"node in a chain of {count}, cache {policy}",
                best_of(run, 5 if count < 10_000 else 2) / count * MICRO, "us", goal,
            )  # fmt: skip
    prompt = fan(2000)

    def run_fan() -> None:
        PromptExecutor(REGISTRY).execute(prompt, "p", {}, outputs_of(prompt))

    report("node in a fan of 2000", best_of(run_fan) / 2000 * MICRO, "us")


def measure_cached() -> None:
    """A prompt whose results are all known: validation, execution, and both."""
    for count in (100, 1000, 10_000):
        prompt = chain(count)
        executor = PromptExecutor(REGISTRY)
        executor.execute(prompt, "p", {}, ["show"])

        def validate(prompt: Prompt = prompt) -> None:
            assert asyncio.run(validate_prompt("p", prompt, None, REGISTRY)).valid

        def run(prompt: Prompt = prompt, executor: PromptExecutor = executor) -> None:
            executor.execute(prompt, "p", {}, ["show"])

        checked, ran = best_of(validate), best_of(run)
        report(f"validation of {count} nodes", checked * MILLI, "ms")
        goal = 30.0 if count == 1000 else None
        report(f"validation and cached run of {count} nodes", (checked + ran) * MILLI, "ms", goal)


def measure_queue() -> None:
    """Enqueue to start, and a thousand prompts through queue, worker and journal."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "queue.sqlite")
        queue = PromptQueue(journal=journal)
        worker = Worker(queue, PromptExecutor(REGISTRY))
        finished = threading.Semaphore(0)
        queue.add_finished_listener(lambda _: finished.release())
        worker.start()
        waits = []
        for i in range(50):
            started = time.time()
            queue.put((i, f"w{i}", chain(5, i), {}, ["show"]))
            finished.acquire()
            messages = queue.get_history(f"w{i}")[f"w{i}"]["status"]["messages"]
            waits.append(max(0.0, messages[0][1]["timestamp"] / 1e3 - started))
        median = statistics.median(waits) * MILLI
        report("enqueue (synced to disk) to start, median", median, "ms", 3)
        before = resident_mib()
        started = time.perf_counter()
        for i in range(1000):
            queue.put((i, f"q{i}", chain(20, i), {}, ["show"]))
        for _ in range(1000):
            finished.acquire()
        report("prompt of 20 nodes through the queue", time.perf_counter() - started, "ms")
        report("growth of memory over 1000 queued prompts", resident_mib() - before, "MiB")
        worker.stop()
        journal.close()


def resident_mib() -> float:
    """Resident memory of this process."""
    gc.collect()
    text = Path("/proc/self/statm").read_text(encoding="ascii")
    return int(text.split()[1]) * 4096 / 2**20


def post(url: str, body: Any) -> Any:
    """Posts JSON; returns the JSON answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "text/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def measure_server(url: str) -> None:
    """The same through HTTP, with nodes every server has: pictures of one pixel, inverted."""
    for count in (100, 900):
        prompt = server_chain(count)
        first, second = timed_post(url, prompt), timed_post(url, prompt)
        report(f"POST to history, {count} nodes, first run", first * MILLI, "ms")
        report(f"POST to history, {count} nodes, cached", second * MILLI, "ms")
    prompt = server_chain(3)
    alone = min(timed_post(url, prompt) for _ in range(10))
    report("POST to history, 3 cached nodes", alone * MILLI, "ms")


def server_chain(count: int) -> Prompt:
    """A chain of real nodes that cost next to nothing."""
    inputs = {"width": 1, "height": 1, "batch_size": 1, "color": uuid.uuid4().int % 2**24}
    prompt: Prompt = {"n0": {"class_type": "EmptyImage", "inputs": inputs}}
    for i in range(1, count - 1):
        prompt[f"n{i}"] = {"class_type": "ImageInvert", "inputs": {"image": [f"n{i - 1}", 0]}}
    prompt["show"] = {"class_type": "PreviewImage", "inputs": {"images": [f"n{count - 2}", 0]}}
    return prompt


def timed_post(url: str, prompt: Prompt) -> float:
    """Seconds from posting a prompt until it is in the history."""
    started = time.perf_counter()
    prompt_id = post(f"{url}/prompt", {"prompt": prompt})["prompt_id"]
    while prompt_id not in (found := get(f"{url}/history/{prompt_id}")):
        time.sleep(0.001)
    took = time.perf_counter() - started
    assert found[prompt_id]["status"]["completed"], found[prompt_id]["status"]
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:8188")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    if arguments.url:
        measure_server(arguments.url.rstrip("/"))
        return
    measure_nodes()
    measure_cached()
    measure_queue()


if __name__ == "__main__":
    main()
