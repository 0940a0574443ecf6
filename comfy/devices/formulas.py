"""Which formula is computed where the pictures that people have part from the published one.

The same seed gives the picture that it always gave, so what it was made with is the default, also
where the method's paper, or the model's, says otherwise. `--paper-formulas` asks for the latter.
docs/sampling.md lists the places, each of which asks here while it works.
"""

from __future__ import annotations

from comfy.devices.runtime import get_runtime


def as_published() -> bool:
    """Whether the papers' formulas were asked for."""
    return get_runtime().precision.paper_formulas
