"""Residuals of control networks, added to the tokens of transformers."""

from __future__ import annotations

from torch import Tensor


def check_residual(tokens: Tensor, residual: Tensor, part: str) -> None:
    """Refuse what another kind of network made.

    Args:
        tokens: ``[B, L, D]``, to which it is to be added.
        residual: ``[B or 1, l, D]`` for the first l of them.
        part: "input" or "output", for the message.

    Raises:
        ValueError: With both shapes.
    """
    fits = residual.ndim == 3 and residual.shape[0] in (1, tokens.shape[0])
    fits = fits and residual.shape[1] <= tokens.shape[1] and residual.shape[2] == tokens.shape[2]
    if not fits:
        raise ValueError(
            f"control_net: expected a residual for the tokens {tuple(tokens.shape)} of this model "
            f"({part}), found one of shape {tuple(residual.shape)}: the ControlNet or adapter was "
            "made for another model"
        )


def add_at(x: Tensor, residual: Tensor, start: int, part: str) -> Tensor:
    """x with a residual added to the tokens from ``start`` on."""
    check_residual(x[:, start:], residual, part)
    x = x.clone()
    x[:, start : start + residual.shape[1]] += residual
    return x
