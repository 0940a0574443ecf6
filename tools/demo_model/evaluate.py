"""Measures a checkpoint: how often its pictures show what the text asks for.

Usage: python -m tools.demo_model.evaluate FILE.safetensors --size 128x128 192x128 --cfg 2 4

Sizes, steps and guidance may be lists; every combination gives one line. --grid writes the
pictures.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tools.demo_model.judge import judge, random_requests
from tools.demo_model.reference import Checkpoint, Settings

REQUEST_SEED = 123  # of the held-out texts
NOISE_SEED = 1000
BATCH = 8


def parse_size(text: str) -> tuple[int, int]:
    """ "192x128" as (192, 128)."""
    width, height = text.split("x")
    return int(width), int(height)


def measure(
    checkpoint: Checkpoint, count: int, settings: Settings
) -> tuple[dict[str, float], list[np.ndarray]]:
    """Shares of fulfilled wishes over `count` requests, and the pictures."""
    requests = list(itertools.islice(random_requests(REQUEST_SEED), count))
    pictures: list[np.ndarray] = []
    for i in range(0, count, BATCH):
        texts = [request.text for request in requests[i : i + BATCH]]
        pictures.extend(checkpoint.sample(texts, NOISE_SEED + i, settings))
    marks = [request.marks(judge(picture)) for request, picture in zip(requests, pictures)]
    shares = {name: float(np.mean([mark[name] for mark in marks])) for name in marks[0]}
    shares["all four"] = float(np.mean([all(mark.values()) for mark in marks]))
    return shares, pictures


def save_grid(pictures: list[np.ndarray], columns: int, path: Path) -> None:
    """Write equally large pictures as one, row by row."""
    height, width = pictures[0].shape[:2]
    rows = -(-len(pictures) // columns)
    grid = Image.new("RGB", (columns * (width + 4), rows * (height + 4)), "white")
    for i, picture in enumerate(pictures):
        place = (i % columns * (width + 4), i // columns * (height + 4))
        grid.paste(Image.fromarray(picture), place)
    grid.save(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--count", type=int, default=72, help="texts per line")
    parser.add_argument("--size", type=parse_size, nargs="+", default=[(128, 128)])
    parser.add_argument("--steps", type=int, nargs="+", default=[20])
    parser.add_argument("--cfg", type=float, nargs="+", default=[4.0])
    parser.add_argument("--solver", choices=["dpmpp_2m", "euler"], default="dpmpp_2m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--grid", type=Path, help="PNG for the pictures of the last line")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    checkpoint = Checkpoint(arguments.checkpoint)
    for size, steps, cfg in itertools.product(arguments.size, arguments.steps, arguments.cfg):
        started = time.process_time()
        settings = Settings(steps=steps, cfg=cfg, size=size, solver=arguments.solver)
        shares, pictures = measure(checkpoint, arguments.count, settings)
        seconds = (time.process_time() - started) / arguments.count
        figures = "  ".join(f"{name} {share:.2f}" for name, share in shares.items())
        print(
            f"{size[0]}x{size[1]} {steps} steps cfg {cfg:g} {arguments.solver}:  {figures}"
            f"  ({seconds:.2f} CPU s a picture)",
            flush=True,
        )
    if arguments.grid:
        save_grid(pictures, 8, arguments.grid)


if __name__ == "__main__":
    main()
