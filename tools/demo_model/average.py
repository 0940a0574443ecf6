"""Averages the states of several short runs that started from the same one.

Usage: python -m tools.demo_model.average work/unet_1.pt work/unet_2.pt --out work/unet.pt

Runs that differ in their seeds only stay close enough for their mean to be better than each
(https://arxiv.org/abs/2203.05482): on a CPU, two runs of one thread each learn more than one run
of two.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from tools.demo_model.training import save_atomically


def mean_weights(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of equally shaped state dicts."""
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("states", type=Path, nargs="+", help="written by train_unet")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    states = [torch.load(path) for path in arguments.states]
    merged = {part: mean_weights([s[part] for s in states]) for part in ("average", "raw")}
    save_atomically({**merged, "used": states[0]["used"]}, arguments.out)


if __name__ == "__main__":
    main()
