"""Orders of convergence of every deterministic solver, on every kind of network.

    python benchmarks/convergence.py [--steps 40] [--kinds eps v edm flow] [NAME ...]

The data are Gaussian, so the end of each trajectory is known in closed form; the network puts out
noise (eps), velocity (v), the preconditioned output of EDM, or the flow's velocity, and the levels
are equal steps in half-log-SNR (8 to 0.05, on the flow 0.95 to 0.05). Printed are the largest error
at `--steps` steps and the order that the errors at this and at twice the number show. Half a
minute.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from comfy.sampling import solvers
from tests.comfy.sampling.gaussian import (
    DETERMINISTIC,
    NETWORKS,
    WITHOUT_ORDER,
    error,
    seen_order,
)


def described(options: dict[str, Any]) -> str:
    """The options that are numbers or words."""
    return " ".join(f"{key}={value}" for key, value in options.items() if not callable(value))


def measured(name: str, options: dict[str, Any], kinds: list[str], steps: int) -> str:
    """Error and order for each kind of network."""
    function, cells = solvers.find(name).function, []
    for kind in kinds:
        few, many = (error(function, kind, count, **options) for count in (steps, 2 * steps))
        cells.append(f"{few:8.1e} {seen_order(few, many):6.2f}")
    return "".join(f"{cell:>20s}" for cell in cells)


def main() -> None:
    """Prints a line for each solver and set of options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="these solvers instead of all")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kinds", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    args = parser.parse_args()
    print(f"error at {args.steps} steps and order seen from there to {2 * args.steps} steps")
    print(f"{'':60s} order" + "".join(f"{kind:>20s}" for kind in args.kinds))
    rows = [(name, options, str(order)) for name, options, order in DETERMINISTIC]
    rows += [(name, options, "-") for name, options in WITHOUT_ORDER]
    for name, options, order in rows:
        if not args.names or name in args.names:
            cells = measured(name, options, args.kinds, args.steps)
            print(f"{name + ' ' + described(options):60s} {order:>5s}{cells}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
