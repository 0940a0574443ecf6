"""How far each attention back end is off from attention in float64.

    python benchmarks/attention.py [--device cpu] [--queries 64] [--heads 2]

Random queries, keys and values of head sizes 40 to 256, with 77, 1,024 and 4,608 keys, without a
mask, with a boolean mask and with an additive one. Printed is the norm of the difference to float64
over the norm of the result, in units of the number type's rounding (2^-24 of float32, 2^-11 of
float16, 2^-8 of bfloat16): the largest of the head sizes, and at which of them. The inputs are
rounded to the type first, so that only the back end's own loss counts. Back ends of packages are in
the list where they are installed and the device is an accelerator; what a package does not do,
torch's kernel does in its place. 10 seconds on one core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from comfy.nn import attention

HEAD_SIZES = (40, 64, 80, 128, 160, 256)
KEYS = (77, 1024, 4608)
MASKS = ("none", "boolean", "additive")
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention in float64, ``[B, heads, L, D]`` in and out."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None:
        is_boolean = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_boolean else scores + mask.double()
    return scores.softmax(-1) @ v


def mask_of(kind: str, queries: int, keys: int, like: Tensor) -> Tensor | None:
    """A mask ``[1, 1, queries, keys]`` that hides a third of the keys, or weighs them."""
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(3)
    drawn = torch.rand(1, 1, queries, keys, generator=generator).to(like.device)
    return drawn > 1 / 3 if kind == "boolean" else (4 * drawn - 4).to(like.dtype)


def error(
    row: attention.Backend, dtype: torch.dtype, shape: tuple[int, int, int, int], mask_kind: str,
    device: torch.device,
) -> float:  # fmt: skip
    """Relative error in units of rounding; ``shape`` is heads, queries, keys, head size."""
    heads, queries, keys, size = shape
    generator = torch.Generator().manual_seed(size + keys)
    q, k, v = (
        torch.randn(1, heads, length, size, generator=generator).to(device, dtype)
        for length in (queries, keys, keys)
    )
    mask = mask_of(mask_kind, queries, keys, q)
    wanted = exact(q, k, v, mask)
    out = row.function(q, k, v, heads, mask, skip_reshape=True, skip_output_reshape=True)
    return float((out.double() - wanted).norm() / wanted.norm()) / ROUNDING[dtype]


def back_ends(device: torch.device) -> Iterator[attention.Backend]:
    """Those that act on a device."""
    for row in attention.BACKENDS:
        if not row.package or (row.is_available() and device.type != "cpu"):
            yield row


def main() -> None:
    """Prints a line for each back end, number type and number of keys."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    args = parser.parse_args()
    titles = "".join(f"{kind:>18}" for kind in MASKS)
    sys.stdout.write(f"{'back end':12}{'type':10}{'keys':>6}{titles}   (at head size)\n")
    for row in back_ends(args.device):
        for dtype in ROUNDING:
            for keys in KEYS:
                cells = []
                for kind in MASKS:
                    off, size = max(
                        (error(row, dtype, (args.heads, args.queries, keys, size), kind,
                               args.device), size)
                        for size in HEAD_SIZES
                    )  # fmt: skip
                    cells.append(f"{off:12.2f} ({size:3d})")
                name = str(dtype).removeprefix("torch.")
                sys.stdout.write(f"{row.name:12}{name:10}{keys:6d}{''.join(cells)}\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
