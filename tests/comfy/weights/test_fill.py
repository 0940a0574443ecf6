"""Filling networks: what is said about keys that fit nowhere."""

from __future__ import annotations

import logging

import pytest
import torch

from comfy.weights.fill import IncompleteWeightsError, fill


def network() -> torch.nn.Linear:
    return torch.nn.Linear(2, 2, device="meta")


def weights(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight": torch.eye(2), "bias": torch.zeros(2), **more}


def test_stray_keys_are_named_but_counting_buffers_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    fill(network(), weights(stray=torch.zeros(1), position_ids=torch.arange(3)), "text encoder")
    assert "text encoder: no place for 1 key (stray)" in caplog.text


def test_missing_keys_are_an_error_that_names_them() -> None:
    with pytest.raises(IncompleteWeightsError, match="text encoder lacks 1 key \\(bias\\)"):
        fill(network(), {"weight": torch.eye(2)}, "text encoder")
