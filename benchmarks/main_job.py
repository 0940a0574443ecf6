"""The figures a newcomer feels: how soon the server answers, how soon the demo picture is there.

    python benchmarks/main_job.py [--runs 5] [--previews]

Prints, as medians with minimum and maximum:

* start: from starting the process to its first answered request (warm disk cache);
* picture: 20 steps, cfg 7, 128 x 128, from POST /prompt to `execution_success`;
* networks: time inside the text encoder, the denoiser and the decoder during that picture, taken
  by a custom node that wraps their forward functions in the server's own process;
* own share: picture minus networks, run by run.

Goals on two CPU cores: start 3 s, picture 2 s, own share 30 ms. `--previews` asks for a preview
picture with every step, as the editor does.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.support.prompts import demo_prompt
from tests.support.server_process import ServerProcess, start_server

# Lies in custom_nodes of the server that is measured. Only the outermost call counts, so a network
# inside another one is not counted twice.
FORWARD_CLOCK = """
import time
from aiohttp import web
from server import PromptServer
from comfy.ldm.models.autoencoder import AutoencoderKL
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from comfy.sd1_clip import SDClipModel

NODE_CLASS_MAPPINGS = {}
clock = {"seconds": 0.0, "depth": 0}

def timed(owner, name):
    inner = getattr(owner, name)
    def outer(*arguments, **options):
        clock["depth"] += 1
        started = time.perf_counter()
        try:
            return inner(*arguments, **options)
        finally:
            clock["depth"] -= 1
            if not clock["depth"]:
                clock["seconds"] += time.perf_counter() - started
    setattr(owner, name, outer)

timed(UNetModel, "forward")
timed(AutoencoderKL, "decode")
timed(SDClipModel, "forward")

@PromptServer.instance.routes.get("/forward_clock")
async def read(request):
    return web.json_response(clock["seconds"])
"""


@dataclass(frozen=True)
class Times:
    """Seconds of one prompt, and of the networks within it."""

    picture: float
    networks: float


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


async def time_picture(server: ServerProcess, prompt: dict[str, Any], previews: bool) -> Times:
    """Times one prompt from POST to the `execution_success` frame."""
    body: dict[str, Any] = {"prompt": prompt, "client_id": "benchmark"}
    body["extra_data"] = {"preview_method": "auto" if previews else "none"}
    async with (
        aiohttp.ClientSession(server.url) as session,
        session.ws_connect("/ws?clientId=benchmark") as socket,
    ):
        before = server.get("/forward_clock")
        started = time.perf_counter()
        async with session.post("/prompt", json=body) as answer:
            answer.raise_for_status()
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                continue
            kind = json.loads(message.data)["type"]
            if kind == "execution_success":
                picture = time.perf_counter() - started
                return Times(picture, server.get("/forward_clock") - before)
            if kind in {"execution_error", "execution_interrupted"}:
                raise RuntimeError(message.data)
    raise RuntimeError("the socket closed before the picture was there")


def main() -> None:
    """Runs the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--previews", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        describe("start", time_starts(folder, options.runs), 3.0)
        nodes = folder / "pictures" / "custom_nodes"
        nodes.mkdir(parents=True)
        (nodes / "forward_clock.py").write_text(FORWARD_CLOCK, encoding="utf-8")
        server = start_server(folder / "pictures", "--cpu")
        try:
            first, *times = [
                asyncio.run(time_picture(server, demo_prompt(seed=seed), options.previews))
                for seed in range(options.runs + 1)
            ]
        finally:
            server.stop()
    describe("picture", [run.picture for run in times], 2.0)
    describe("networks", [run.networks for run in times], 2.0)
    describe("own share", [run.picture - run.networks for run in times], 0.03)
    print(f"first picture, with loading: {1000 * first.picture:.0f} ms")


if __name__ == "__main__":
    main()
