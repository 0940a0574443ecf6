"""Interpretations of weights on tokens."""

from __future__ import annotations

import pytest
import torch

from comfy.text_encoders import weighting

STATES = torch.tensor([[[1.0, 3.0], [2.0, 2.0], [5.0, 5.0]]])
EMPTY = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]])


def apply(name: str, weights: list[float]) -> torch.Tensor:
    return weighting.weight_states(name, STATES, EMPTY, [weights])


@pytest.mark.parametrize("name", list(weighting.INTERPRETATIONS))
def test_weight_one_changes_nothing(name: str) -> None:
    assert torch.equal(apply(name, [1.0, 1.0, 1.0]), STATES)


def test_the_default_moves_away_from_the_empty_text() -> None:
    moved = apply("default", [1.0, 1.5, 0.0])
    assert moved.tolist() == [[[1.0, 3.0], [3.0, 3.0], [1.0, 1.0]]]


def test_a1111_keeps_the_mean_of_a_chunk() -> None:
    moved = apply("A1111", [1.0, 2.0, 1.0])
    torch.testing.assert_close(moved.mean(), STATES.mean())
    torch.testing.assert_close(moved[0, 1] / moved[0, 0], 2 * STATES[0, 1] / STATES[0, 0])


def test_down_weighting_fades_what_is_not_the_heaviest() -> None:
    faded = apply("down-weight", [1.0, 2.0, 1.0])
    assert torch.equal(faded[0, 1], STATES[0, 1])
    torch.testing.assert_close(faded[0, 0], torch.tensor([1.0, 2.0]))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'louder'.*A1111"):
        weighting.interpretation("louder")
