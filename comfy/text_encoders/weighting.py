"""What a weight on a token does to the text encoder's states; one function per interpretation.

Each takes states ``[chunks, L, D]``, those of the empty text ``[L, D]`` and weights ``[chunks, L,
1]``, and gives states.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Weighting = Callable[[Tensor, Tensor, Tensor], Tensor]


def from_empty_text(states: Tensor, empty: Tensor, weights: Tensor) -> Tensor:
    """Move along the line from the empty text's state: ``e + (z - e) * w`` (the compatible one)."""
    moved = empty + (states - empty) * weights
    return torch.where(weights == 1, states, moved)  # weight 1 leaves a state exactly as it is


def keeping_the_mean(states: Tensor, empty: Tensor, weights: Tensor) -> Tensor:
    """Multiply states by weights, then scale each chunk back to the mean it had.

    Source: the prompt emphasis of AUTOMATIC1111's web interface, as its documentation describes it.
    """
    del empty
    before = states.mean(dim=(1, 2), keepdim=True)
    scaled = states * weights
    after = scaled.mean(dim=(1, 2), keepdim=True)
    return torch.where(after == 0, scaled, scaled * (before / after))


def down_weighting(states: Tensor, empty: Tensor, weights: Tensor) -> Tensor:
    """Divide all weights by the largest, if that is above 1: nothing is exaggerated, the rest
    fades."""
    return from_empty_text(states, empty, weights / weights.max().clamp(min=1.0))


def ignoring_weights(states: Tensor, empty: Tensor, weights: Tensor) -> Tensor:
    """Leave the states as they are."""
    del empty, weights
    return states


DEFAULT = "default"

INTERPRETATIONS: dict[str, Weighting] = {
    DEFAULT: from_empty_text,
    "A1111": keeping_the_mean,
    "down-weight": down_weighting,
    "none": ignoring_weights,
}


INTERPRETATION_TEXT = (
    "default: away from the empty text; A1111: scaled, the mean kept; down-weight: the heaviest "
    "stays as it is and the rest fades; none: weights are read and ignored."
)


def interpretation(name: str) -> Weighting:
    """An interpretation by name; raises ValueError with the known ones."""
    if name not in INTERPRETATIONS:
        known = ", ".join(INTERPRETATIONS)
        raise ValueError(f"unknown interpretation of weights {name!r}; known: {known}")
    return INTERPRETATIONS[name]


def weight_states(name: str, states: Tensor, empty: Tensor, chunks: list[list[float]]) -> Tensor:
    """Apply the weights of chunks of tokens to their states."""
    weights = states.new_ones(states.shape[:2])
    for number, chunk in enumerate(chunks):
        row = torch.tensor(chunk[: weights.shape[1]], dtype=weights.dtype, device=weights.device)
        weights[number, : len(row)] = row
    return interpretation(name)(states, empty, weights[..., None])
