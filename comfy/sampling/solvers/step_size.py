"""Choosing the length of a step from the errors of the last ones."""

from __future__ import annotations

import math

# Each refused step is followed by one a fifth as long at least: after so many it is no step at all.
MOST_REFUSED = 100


class PIDStepSizeController:
    """Chooses the next step size from the last three errors.

    Args:
        h: First step size.
        pcoeff, icoeff, dcoeff: Weights of the proportional, integral and derivative part.
        order: Order of the error estimate.
        accept_safety: Smallest growth factor of an accepted step.

    Attributes:
        h: Next step size.
        refused: Steps refused in a row.

    Source: Söderlind 2003, Digital filters in adaptive time-stepping.
    """

    def __init__(
        self,
        h: float,
        pcoeff: float,
        icoeff: float,
        dcoeff: float,
        order: float = 1,
        accept_safety: float = 0.81,
        eps: float = 1e-8,
    ) -> None:
        if h == 0:
            raise ValueError("h_init, the first step in log sigma, must not be 0")
        self.h, self.accept_safety, self.eps = h, accept_safety, eps
        self.b1 = (pcoeff + icoeff + dcoeff) / order
        self.b2 = -(pcoeff + 2 * dcoeff) / order
        self.b3 = dcoeff / order
        self.errs: list[float] = []
        self.refused = 0

    def limiter(self, x: float) -> float:
        """Soft bound of the growth factor around 1."""
        return 1 + math.atan(x - 1)

    def propose_step(self, error: float) -> bool:
        """Take an error (1 is the tolerance); adapts h and says whether the step is accepted."""
        inverse = 1 / (float(error) + self.eps)
        if not self.errs:
            self.errs = [inverse, inverse, inverse]
        self.errs[0] = inverse
        try:
            factor = self.errs[0] ** self.b1 * self.errs[1] ** self.b2 * self.errs[2] ** self.b3
        except (OverflowError, ZeroDivisionError):  # weights far from the usual ones
            factor = math.inf
        factor = self.limiter(factor if math.isfinite(error) else 0.0)
        accepted = factor >= self.accept_safety
        if accepted:
            self.errs = [self.errs[0], self.errs[0], self.errs[1]]
        self.refused = 0 if accepted else self.refused + 1
        self.h *= factor
        return accepted

    @property
    def is_stuck(self) -> bool:
        """Whether no step will ever be accepted."""
        return self.refused >= MOST_REFUSED

    def complaint(self, sigma: float, rtol: float, atol: float) -> str:
        """Why a run cannot go on, and what to change."""
        return (
            f"no step met the tolerance in {self.refused} tries at sigma {sigma:g}: raise rtol "
            f"({rtol:g}) or atol ({atol:g}), or lower accept_safety ({self.accept_safety:g}; a "
            "step grows 2.57 times at most)"
        )
