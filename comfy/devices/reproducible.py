"""Matrix products that round alike whatever the number of rows and threads.

The math library inside torch picks its kernel by the shape of the whole product, so one picture
came out different by a last bit when it shared a call with another. Its reproducible mode computes
every row in the same way, on Intel processors; docs/sampling.md says what was measured of its cost.
The library looks for the mode once, at its first product.
Source: Intel oneMKL developer guide, "Obtaining numerically reproducible results".
"""

from __future__ import annotations

import os

VARIABLE, MODE = "MKL_CBWR", "AUTO,STRICT"


def ask_for_equal_products() -> None:
    """Choose the mode, unless the environment says otherwise."""
    os.environ.setdefault(VARIABLE, MODE)
