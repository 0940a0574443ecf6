"""What the training scripts share: a time budget, averaged weights, safe checkpoints."""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tools.demo_model.paint import paint
from tools.demo_model.scenes import random_scene

logger = logging.getLogger(__name__)

# Picture sizes (width, height) seen in training, with their share of the steps. Multiples of 32:
# the UNet halves the latent (one eighth of the picture) twice.
SIZE_SHARES: dict[tuple[int, int], float] = {
    (128, 128): 0.30,
    (96, 96): 0.05,
    (160, 160): 0.08,
    (192, 128): 0.10,
    (128, 192): 0.10,
    (192, 192): 0.09,
    (256, 192): 0.06,
    (192, 256): 0.06,
    (256, 128): 0.03,
    (128, 256): 0.03,
    (256, 256): 0.10,
}


class Budget:
    """How far a run has come, by wall clock and not by steps: the machine may be shared."""

    def __init__(self, minutes: float) -> None:
        self.seconds = minutes * 60
        self.started = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def progress(self) -> float:
        """0 at the start, 1 or more when the time is up."""
        return self.elapsed / self.seconds

    def steps(self) -> Iterator[int]:
        """Count steps until the time is up."""
        step = 0
        while self.progress < 1:
            yield step
            step += 1

    def learning_rate(self, step: int, peak: float, hold: float = 0.0) -> float:
        """100 steps of warm-up, `peak` for a share `hold` of the time, a cosine down to 2 %."""
        fall = max(0.0, min(1.0, (self.progress - hold) / (1 - hold)))
        return (
            peak * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * fall)))
        )


class WeightAverage:
    """Exponential moving average of a module's parameters."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module, self.decay, self.updates = module, decay, 0
        self.average = {k: v.detach().clone() for k, v in module.state_dict().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the present weights; early updates move further."""
        self.updates += 1
        decay = min(self.decay, self.updates / (self.updates + 12))
        names = list(self.average)
        present = self.module.state_dict()
        averages = [self.average[name] for name in names]
        torch._foreach_lerp_(averages, [present[name] for name in names], 1 - decay)


class RunningMeans:
    """Means of named figures between two log lines."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def add(self, **figures: float) -> None:
        """Remember one step's figures."""
        self.rows.append(figures)

    def flush(self) -> str:
        """The means since the last call, as text."""
        names = self.rows[0] if self.rows else {}
        text = " ".join(f"{k} {np.mean([row[k] for row in self.rows]):.4f}" for k in names)
        self.rows = []
        return text


def save_atomically(payload: object, path: Path) -> None:
    """Write with `torch.save` such that an interrupted run never leaves half a file."""
    temporary = path.with_suffix(".tmp")
    torch.save(payload, temporary)
    os.replace(temporary, path)


def painted_batch(seeds: range, size: tuple[int, int]) -> Tensor:
    """The scenes of `seeds` as pictures [B, 3, height, width] in -1..1."""
    pictures = np.stack([paint(random_scene(seed), *size) for seed in seeds])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


def random_size(rng: random.Random) -> tuple[int, int]:
    """A picture size drawn by its share."""
    return rng.choices(list(SIZE_SHARES), list(SIZE_SHARES.values()))[0]


def training_parser(description: str, minutes: float) -> argparse.ArgumentParser:
    """The options every training script has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--minutes", type=float, default=minutes, help="wall-clock limit")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    return parser


def start_training(arguments: argparse.Namespace) -> None:
    """Seed the generators, bound the threads and log to the terminal."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
