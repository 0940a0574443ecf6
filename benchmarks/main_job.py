"""The figures a newcomer feels: how soon the server answers, how soon the demo picture is there.

    python benchmarks/main_job.py [--runs 5]

Prints, as medians with minimum and maximum:

* start: from starting the process to its first answered request (warm disk cache);
* picture: 20 steps, cfg 7, 128 x 128, from POST /prompt to `execution_success`;
* own share: that time without the network's forward passes and the decoder, which a second process
  times alone on the same weights; goal 30 ms.

Goals on two CPU cores: start 3 s, picture 2 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.prompts import demo_prompt
from tests.support.server_process import ServerProcess, start_server


def describe(name: str, seconds: Sequence[float], goal_s: float) -> None:
    """Prints one line of milliseconds."""
    low, middle, high = (1000 * f(seconds) for f in (min, statistics.median, max))
    print(f"{name:<12} {middle:8.1f} ms  ({low:.1f} to {high:.1f}, goal {1000 * goal_s:.0f})")


def time_starts(folder: Path, runs: int) -> list[float]:
    """Seconds from starting the process to its first answer; the first start warms the cache."""
    seconds = []
    for index in range(runs + 1):
        started = time.perf_counter()
        server = start_server(folder / f"start{index}", "--cpu")
        seconds.append(time.perf_counter() - started)
        server.stop()
    return seconds[1:]


async def time_picture(server: ServerProcess, prompt: dict[str, Any]) -> float:
    """Seconds from POST to the `execution_success` frame."""
    async with (
        aiohttp.ClientSession(server.url) as session,
        session.ws_connect("/ws?clientId=benchmark") as socket,
    ):
        started = time.perf_counter()
        async with session.post(
            "/prompt", json={"prompt": prompt, "client_id": "benchmark"}
        ) as answer:
            answer.raise_for_status()
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                continue
            kind = json.loads(message.data)["type"]
            if kind == "execution_success":
                return time.perf_counter() - started
            if kind in {"execution_error", "execution_interrupted"}:
                raise RuntimeError(message.data)
    raise RuntimeError("the socket closed before the picture was there")


def main() -> None:
    """Runs the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        describe("start", time_starts(folder, runs), 3.0)
        server = start_server(folder / "pictures", "--cpu")
        try:
            pictures = [
                asyncio.run(time_picture(server, demo_prompt(seed=seed)))
                for seed in range(runs + 1)
            ]
        finally:
            server.stop()
    describe("picture", pictures[1:], 2.0)
    print(f"first picture, with loading: {1000 * pictures[0]:.0f} ms")


if __name__ == "__main__":
    main()
