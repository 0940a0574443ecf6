"""The figures a newcomer feels: how soon the server answers, how soon the demo picture is there.

    python benchmarks/main_job.py [--runs 5]

Prints, as medians with minimum and maximum:

* start: from starting the process to its first answered request (warm disk cache);
* picture: 20 steps, cfg 7, 128 x 128, from POST /prompt to `execution_success`;
* own share: that time without the network's forward passes and the decoder, which are timed alone
  on the same weights.

Goals on two CPU cores: start 3 s, picture 2 s, own share 30 ms.
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

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.support.prompts import DEMO_CHECKPOINT, demo_prompt
from tests.support.server_process import ServerProcess, start_server

STEPS = 20


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


def time_networks(runs: int) -> list[float]:
    """Seconds of the picture's network work alone: 20 guided steps and the decoder."""
    import torch

    from comfy import loading
    from comfy.devices.residency import load_models_gpu

    checkpoint = REPOSITORY / "models" / "checkpoints" / DEMO_CHECKPOINT
    model, clip, vae, _ = loading.load_checkpoint_guess_config(str(checkpoint))
    seconds = []
    with torch.inference_mode():
        context = clip.encode_from_tokens(clip.tokenize("a red circle")).repeat(2, 1, 1)
        latent, timestep = torch.randn(2, 4, 16, 16), torch.tensor([500.0, 500.0])
        load_models_gpu([model, vae.patcher])
        for _ in range(runs + 1):
            started = time.perf_counter()
            for _ in range(STEPS):
                model.model.diffusion_model(latent, timestep, context=context)
            vae.first_stage_model.decode(latent[:1])
            seconds.append(time.perf_counter() - started)
    return seconds[1:]


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
    networks = time_networks(runs)
    describe("networks", networks, 2.0)
    own = statistics.median(pictures[1:]) - statistics.median(networks)
    print(f"own share    {1000 * own:8.1f} ms  (picture minus networks, goal 30)")
    print(f"first picture, with loading: {1000 * pictures[0]:.0f} ms")


if __name__ == "__main__":
    main()
