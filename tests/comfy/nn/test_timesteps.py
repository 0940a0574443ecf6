"""Timestep embeddings."""

from __future__ import annotations

import math

import torch

from comfy.nn.timesteps import timestep_embedding


def test_waves_have_the_documented_frequencies() -> None:
    row = timestep_embedding(torch.tensor([3.0]), 4)[0]
    angles = [3.0, 3.0 * 10000**-0.5]
    expected = [*map(math.cos, angles), *map(math.sin, angles)]
    torch.testing.assert_close(row, torch.tensor(expected))


def test_odd_widths_end_in_zero() -> None:
    assert timestep_embedding(torch.tensor([7.0]), 5).shape == (1, 5)
    assert timestep_embedding(torch.tensor([7.0]), 5)[0, -1] == 0


def test_repeat_only_gives_the_timestep_itself() -> None:
    assert timestep_embedding(torch.tensor([7.0]), 3, repeat_only=True).tolist() == [[7, 7, 7]]
