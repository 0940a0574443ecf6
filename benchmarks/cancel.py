"""How soon does cancelled work stop? A server is cancelled in the middle of each kind of work.

    python benchmarks/cancel.py                        sampling, tiles, saving (small demo model)
    python benchmarks/cancel.py --checkpoint FILE      a large checkpoint's load and sampling too

FILE is what `benchmarks/full_size_checkpoint.py --keep FILE` writes. For every kind of work the
node is cancelled after several delays; the time counts from the request to the entry in the
history. Goal: within 250 ms in our own loops, within 1.5 s in pure Python code of a node.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.blackbox.client import Client, connected, fresh
from tests.support.prompts import demo_prompt
from tests.support.server_process import ServerProcess, running_server

OWN_LOOPS_S, PURE_PYTHON_S = 0.25, 1.5

Work = tuple[str, dict[str, Any], str, tuple[float, ...], float]
"""(name, prompt, id of the node to be cancelled, seconds into it, goal in seconds)."""


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """A node of a prompt."""
    return {"class_type": class_type, "inputs": inputs}


def write_inputs(folder: Path) -> None:
    """Pictures of noise, which take long to encode: one large, one to be repeated."""
    noise = np.random.default_rng(0)
    for name, side in (("large.bmp", 6000), ("small.bmp", 1024)):
        pixels = noise.integers(0, 255, (side, side, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)


def small_work() -> Iterator[Work]:
    """What needs no more than the demo model."""
    sampling = demo_prompt(seed=fresh(), steps=500, size=(512, 512))
    yield "sampler steps", sampling, "5", (0.3, 0.7, 1.1), OWN_LOOPS_S
    tiled = demo_prompt(seed=fresh(), size=(2048, 2048))
    tiles = {"tile_size": 128, "overlap": 32, "temporal_size": 64, "temporal_overlap": 8}
    tiled["6"] = node("VAEDecodeTiled", samples=["4", 0], vae=["1", 2], **tiles)
    yield "decoder tiles", tiled, "6", (0.2, 0.5, 0.8), OWN_LOOPS_S
    large = {"1": node("LoadImage", image="large.bmp")}
    large["2"] = node("SaveImage", images=["1", 0], filename_prefix="large")
    yield "saving one picture of 6000 x 6000", large, "2", (0.4, 0.8, 1.2), OWN_LOOPS_S
    batch = {"1": node("LoadImage", image="small.bmp")}
    batch["3"] = node("RepeatImageBatch", image=["1", 0], amount=32)
    batch["2"] = node("SaveImage", images=["3", 0], filename_prefix="batch")
    yield "saving 32 pictures of 1024 x 1024", batch, "2", (0.2, 0.5, 0.8), OWN_LOOPS_S
    busy = {"1": node("TrialBusy", value=fresh(), seconds=60.0)}
    busy["2"] = node("TrialShow", value=["1", 0])
    yield "busy Python code", busy, "1", (0.1, 0.3), PURE_PYTHON_S


def large_work(checkpoint: str) -> Iterator[Work]:
    """What a large checkpoint adds."""
    prompt = demo_prompt(seed=fresh(), steps=20, size=(256, 256), checkpoint=checkpoint)
    yield "loading a checkpoint", prompt, "1", (0.1, 0.5, 1.0, 1.5, 2.0), OWN_LOOPS_S
    yield "encoding a text", prompt, "2", (0.05, 0.1), OWN_LOOPS_S
    yield "sampling with it", prompt, "5", (0.1, 0.4, 1.5), OWN_LOOPS_S
    saving = {"1": prompt["1"]}
    saving["2"] = node(
        "CheckpointSave", model=["1", 0], clip=["1", 1], vae=["1", 2], filename_prefix="saved"
    )
    yield "saving a checkpoint", saving, "2", (0.3, 0.8), OWN_LOOPS_S


def has_begun(client: Client, prompt_id: str, node_id: str) -> bool:
    """Waits until a node runs; False if the prompt ended without it, its result being known."""
    for frame in client.frames():
        if isinstance(frame, bytes) or frame["data"].get("prompt_id") != prompt_id:
            continue
        if frame["type"] == "executing" and frame["data"]["node"] == node_id:
            return True
        if frame["type"] == "execution_success":
            return False
    raise AssertionError("the socket was closed")


def cancelled_after(client: Client, work: Work, delay_s: float) -> float | None:
    """Seconds from the cancellation to the end; None if the node was done before."""
    _, prompt, node_id, _, _ = work
    prompt_id = client.queue(prompt)
    if not has_begun(client, prompt_id, node_id):
        return None
    time.sleep(delay_s)
    begin = time.perf_counter()
    client.server.post(f"/api/jobs/{prompt_id}/cancel", {})
    client.wait_for("executing", prompt_id=prompt_id, node=None)
    took = time.perf_counter() - begin
    entry = client.server.get(f"/history/{prompt_id}")[prompt_id]
    kind, data = entry["status"]["messages"][-1]
    if kind != "execution_interrupted" or data["node_id"] != node_id:
        return None
    return took


def measure(server: ServerProcess, checkpoint: str | None) -> bool:
    """Prints a line for each kind of work; says whether all goals are met."""
    works = [*small_work(), *(large_work(checkpoint) if checkpoint else ())]
    all_met = True
    with connected(server) as client:
        for work in works:
            name, _, _, delays, goal = work
            found = [cancelled_after(client, work, delay) for delay in delays]
            took = [seconds for seconds in found if seconds is not None]
            missed = len(found) - len(took)
            note = f" ({missed} times it was done before)" if missed else ""
            if not took:
                print(f"{name:<36} was always done before")
                continue
            all_met &= max(took) <= goal
            verdict = "met" if max(took) <= goal else "MISSED"
            print(
                f"{name:<36} worst of {len(took)}: {max(took) * 1000:6.0f} ms   "
                f"goal {goal * 1000:.0f}: {verdict}{note}"
            )
    return all_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="a large checkpoint file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="latentloom-cancel-") as folder:
        base = Path(folder)
        (base / "input").mkdir()
        write_inputs(base / "input")
        arguments = ["--cpu", "--extra-model-paths-config"]
        arguments.append(str(REPOSITORY / "tests/blackbox/extra_model_paths.yaml"))
        if options.checkpoint:
            place = base / "output" / "checkpoints"
            place.mkdir(parents=True)
            (place / options.checkpoint.name).symlink_to(options.checkpoint.resolve())
        with running_server(base, *arguments) as server:
            name = options.checkpoint.name if options.checkpoint else None
            return 0 if measure(server, name) else 1


if __name__ == "__main__":
    sys.exit(main())
