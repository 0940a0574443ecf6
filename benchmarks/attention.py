"""How far each attention back end is off from attention in float64.

    python benchmarks/attention.py [--device cpu] [--queries 64] [--heads 2] [--interpreted]

Random queries, keys and values of head sizes 40 to 256, with 77, 1,024 and 4,608 keys, without a
mask, with a boolean mask and with an additive one. Printed is the norm of the difference to float64
over the norm of the result: the largest of the head sizes, and at which of them. The inputs are
rounded to the number type first, so that only the back end's own loss counts. 10 seconds on one
core.

Back ends of packages (flash, sage, xformers) are in the list where they are installed and the
device is an accelerator, or with `--interpreted`: then the packages' own Triton kernels run on the
CPU (`benchmarks/interpreted.py` says which versions, and what must be in the environment), three
minutes. Where a package leaves all to torch's kernel that is what is printed, and where only some
head sizes, these are left out and named at the end of the line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import interpreted
from comfy.nn import attention
from comfy.nn.attention import kernels

HEAD_SIZES = (40, 64, 80, 128, 160, 256)
KEYS = (77, 1024, 4608)
MASKS = ("none", "boolean", "additive")
TYPES = (torch.float32, torch.float16, torch.bfloat16)


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


class TorchInstead:
    """Counts calls of torch's kernel, to which packages' back ends leave what they cannot do."""

    def __init__(self) -> None:
        self.calls, self._kernel = 0, kernels.fused
        kernels.fused = self  # type: ignore[assignment]

    def __call__(self, *args: Any) -> Tensor:
        self.calls += 1
        return self._kernel(*args)


def error(
    row: attention.Backend, dtype: torch.dtype, shape: tuple[int, int, int, int], mask_kind: str,
    device: torch.device,
) -> float:  # fmt: skip
    """Norm of the difference over that of the result; ``shape`` is heads, queries, keys, size."""
    heads, queries, keys, size = shape
    generator = torch.Generator().manual_seed(size + keys)
    q, k, v = (
        torch.randn(1, heads, length, size, generator=generator).to(device, dtype)
        for length in (queries, keys, keys)
    )
    mask = mask_of(mask_kind, queries, keys, q)
    wanted = exact(q, k, v, mask)
    out = row.function(q, k, v, heads, mask, skip_reshape=True, skip_output_reshape=True)
    return float((out.double() - wanted).norm() / wanted.norm())


def back_ends(device: torch.device, interpreted: bool) -> Iterator[attention.Backend]:
    """Those that act on a device."""
    acts = interpreted or device.type != "cpu"
    for row in attention.BACKENDS:
        if not row.package or (row.is_available() and acts):
            yield row


def line(
    row: attention.Backend, dtype: torch.dtype, keys: int, args: argparse.Namespace,
    instead: TorchInstead,
) -> str:  # fmt: skip
    """What is printed of a back end, a number type and a number of keys."""
    cells: list[str] = []
    left_out: set[int] = set()
    for kind in MASKS:
        made: dict[int, float] = {}
        by_torch: set[int] = set()
        for size in HEAD_SIZES:
            before = instead.calls
            off = error(row, dtype, (args.heads, args.queries, keys, size), kind, args.device)
            if row.package and instead.calls > before:
                by_torch.add(size)
            else:
                made[size] = off
        worst = max(made, key=made.__getitem__, default=0)
        cells.append(f"{made[worst]:.2e} ({worst})" if made else "torch")
        left_out |= by_torch if made else set()
    note = f"   torch: {', '.join(map(str, sorted(left_out)))}" if left_out else ""
    name = str(dtype).removeprefix("torch.")
    return f"{row.name:12}{name:10}{keys:6d}{''.join(f'{cell:>18}' for cell in cells)}{note}\n"


def main() -> None:
    """Prints a line for each back end, number type and number of keys."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--interpreted", action="store_true", help="packages' kernels, on the CPU")
    args = parser.parse_args()
    if args.interpreted:
        interpreted.accept_cpu_tensors()
    instead = TorchInstead()
    titles = "".join(f"{kind:>18}" for kind in MASKS)
    sys.stdout.write(f"{'back end':12}{'type':10}{'keys':>6}{titles}   (at head size)\n")
    for row in back_ends(args.device, args.interpreted):
        for dtype in TYPES:
            for keys in KEYS:
                sys.stdout.write(line(row, dtype, keys, args, instead))
                sys.stdout.flush()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
