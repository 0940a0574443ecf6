"""Polynomials through points, as multistep solvers integrate them."""

from __future__ import annotations

from collections.abc import Sequence


def basis(nodes: Sequence[float], place: int, origin: float) -> list[float]:
    """Lagrange basis polynomial that is 1 at nodes[place] and 0 at the other nodes.

    Returns:
        Coefficients of the powers of (s - origin), lowest first.
    """
    coefficients = [1.0]
    for other_place, other in enumerate(nodes):
        if other_place != place:
            scale, shift = 1 / (nodes[place] - other), other - origin
            raised, lowered = [0.0, *coefficients], [*coefficients, 0.0]
            coefficients = [scale * (a - shift * b) for a, b in zip(raised, lowered)]
    return coefficients


def integrals(nodes: Sequence[float], start: float, end: float) -> list[float]:
    """Integral from start to end of each basis polynomial over the nodes."""
    length = end - start
    return [
        sum(
            coefficient * length ** (power + 1) / (power + 1)
            for power, coefficient in enumerate(basis(nodes, place, start))
        )
        for place in range(len(nodes))
    ]
