"""Polynomials through levels, as multistep solvers integrate them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Relative error at which quadrature stops, of the implementation pictures were made with.
QUADRATURE_WITHIN = 1e-4


def integrals(nodes: Sequence[float] | np.ndarray, start: float, end: float) -> list[float]:
    """Integral from start to end of each polynomial that is 1 at one node and 0 at the others.

    In the precision of the nodes, as pictures were made: of single ones every value of a polynomial
    is rounded, and where rounding hides the error from the quadrature, it divides the step further.
    Of double ones the integrals are exact.

    Source: Piessens et al. 1983, QUADPACK (adaptive Gauss-Kronrod quadrature of 21 points).
    """
    from scipy import integrate  # a quarter of a second that most runs need not wait for

    def integral(place: int) -> float:
        others = [node for other, node in enumerate(nodes) if other != place]
        factors = [(other, nodes[place] - other) for other in others]

        def value(level: float) -> float:
            product = 1.0
            for other, scale in factors:
                product *= (level - other) / scale
            return product

        # The full output says in numbers, not by a warning, that rounding hides the error.
        found = integrate.quad(value, start, end, epsrel=QUADRATURE_WITHIN, full_output=1)
        return float(found[0])

    return [integral(place) for place in range(len(nodes))]
