"""What a sampling step costs: beside the network, and with it.

    python benchmarks/sampling.py [--steps 50] [--runs 5] [--size 64] [--every [NAME ...]]
        [--network-ms 0]
    python benchmarks/sampling.py --beside-diffusers [--family sd1] [--pixels 512]
        [--network-steps 3]

The first measures everything but the network: a base model whose forward only returns a tensor is
sampled through the same path as the KSampler node takes: guidance, batching, masks, solver, step
noise, callback. The goal is under 1 ms a step for a latent of Stable Diffusion 1.x at batch 1
(64 x 64 cells, cfg on). Processor time of this thread is shown beside wall time: on a busy machine
only it is comparable. SDE samplers draw their noise beside the network, so they are also measured
with one that computes for a while (`--network-ms` gives one to all). `--every` goes through the
whole menu, or the samplers named, and divides by model calls, not by steps.

The second takes whole steps of the full-size network beside diffusers' (see beside_diffusers.py):
8 GB of memory, 2 minutes on two cores; `--family sdxl` 16 GB and 3 minutes.
"""

# ruff: noqa: ARG002, ARG005

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from comfy import conds
from comfy.latent_formats import SD15
from comfy.patching.patcher import ModelPatcher
from comfy.sampling import noise, noise_levels, run, solvers

CPU = torch.device("cpu")
GOAL_MS = 1.0
WORK = torch.ones(256, 256)


class FreeModel(nn.Module):
    """A base model that costs nothing, or a set time, and counts the time spent in it."""

    def __init__(self, milliseconds: float = 0.0) -> None:
        super().__init__()
        self.milliseconds = milliseconds
        self.model_sampling = noise_levels.build_model_sampling("EPS")
        self.latent_format = SD15()
        self.current_patcher = None
        self.calls, self.seconds, self.busy_seconds = 0, 0.0, 0.0

    def apply_model(self, x: Tensor, t: Tensor, **kwargs: Any) -> Tensor:
        start, start_busy = time.perf_counter(), time.thread_time()
        out = x * 0.5
        while time.perf_counter() - start < self.milliseconds / 1000:
            torch.mm(WORK, WORK)  # as a network does, without the interpreter's lock
        self.calls += 1
        self.seconds += time.perf_counter() - start
        self.busy_seconds += time.thread_time() - start_busy
        return out

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        return {"c_crossattn": conds.CONDCrossAttn(kwargs["cross_attn"])}

    def extra_conds_shapes(self, **kwargs: Any) -> dict[str, Any]:
        return {}

    def memory_required(self, input_shape: Any, cond_shapes: Any = None) -> float:
        return 1e6

    def get_dtype(self) -> torch.dtype:
        return torch.float32

    def process_latent_in(self, latent: Tensor) -> Tensor:
        return self.latent_format.process_in(latent)

    def process_latent_out(self, latent: Tensor) -> Tensor:
        return self.latent_format.process_out(latent)

    def scale_latent_inpaint(
        self, sigma: Tensor, noise: Tensor, latent_image: Tensor, **kwargs: Any
    ) -> Tensor:
        scaled: Tensor = self.model_sampling.noise_scaling(sigma, noise, latent_image)
        return scaled


def entry(**options: Any) -> list[Any]:
    return [[torch.randn(1, 77, 768), options]]


def measure(
    sampler: str, positive: list[Any], args: argparse.Namespace, cfg: float = 7.0, **options: Any
) -> tuple[float, float, float]:
    """(wall and processor milliseconds a step without the forward, model calls a step); medians."""
    negative, latent = entry(), torch.zeros(1, 4, args.size, args.size)
    model = FreeModel(options.pop("network_ms", args.network_ms))
    patcher = ModelPatcher(model, load_device=CPU, offload_device=CPU)
    wall, busy = [], []
    for attempt in range(args.runs + 1):
        start_noise = noise.prepare_noise(latent, attempt)
        model.calls, model.seconds, model.busy_seconds = 0, 0.0, 0.0
        start, start_busy = time.perf_counter(), time.thread_time()
        run.sample(
            patcher, start_noise, args.steps, cfg, sampler, "normal", positive, negative, latent,
            callback=lambda *step: None, disable_pbar=True, seed=attempt, **options,
        )  # fmt: skip
        if attempt:  # the first run warms caches up
            wall.append((time.perf_counter() - start - model.seconds) / args.steps)
            busy.append((time.thread_time() - start_busy - model.busy_seconds) / args.steps)
    calls = model.calls / args.steps
    return 1000 * statistics.median(wall), 1000 * statistics.median(busy), calls


def cases(args: argparse.Namespace) -> dict[str, Callable[[], tuple[float, float, float]]]:
    area = entry() + entry(area=(16, 16, 8, 8), strength=1.0)
    mask = torch.zeros(1, 8 * args.size, 8 * args.size)
    mask[:, : 4 * args.size] = 1
    return {
        "euler, cfg 7": lambda: measure("euler", entry(), args),
        "euler, cfg 1": lambda: measure("euler", entry(), args, cfg=1.0),
        "dpmpp_2m, cfg 7": lambda: measure("dpmpp_2m", entry(), args),
        "euler_ancestral, cfg 7": lambda: measure("euler_ancestral", entry(), args),
        "dpmpp_2m_sde, cfg 7": lambda: measure("dpmpp_2m_sde", entry(), args),
        "dpmpp_2m_sde, 10 ms network": lambda: measure(
            "dpmpp_2m_sde", entry(), args, network_ms=10.0
        ),
        "dpmpp_sde, 10 ms network": lambda: measure("dpmpp_sde", entry(), args, network_ms=10.0),
        "uni_pc, cfg 7": lambda: measure("uni_pc", entry(), args),
        "euler, area": lambda: measure("euler", area, args),
        "euler, noise mask": lambda: measure("euler", entry(), args, noise_mask=mask),
    }


def every_sampler(
    args: argparse.Namespace,
) -> dict[str, Callable[[], tuple[float, float, float]]]:
    names = args.every or solvers.MENU_NAMES
    return {name: partial(measure, name, entry(), args) for name in names}


def compare_with_diffusers(args: argparse.Namespace) -> None:
    from benchmarks import beside_diffusers

    print(
        f"{args.family}, {args.pixels} x {args.pixels} pixels, cfg, float32, {args.threads} threads"
    )
    try:
        report = beside_diffusers.compare(
            args.pixels, args.network_steps, args.layouts, args.family
        )
    except beside_diffusers.DiffusersMissing as missing:
        sys.exit(f"diffusers is not installed ({missing}): python -m pip install diffusers")
    report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--size", type=int, default=64, help="cells of the square latent")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--every", nargs="*", metavar="NAME", choices=solvers.MENU_NAMES,
        help="all samplers, or these, by model call",
    )  # fmt: skip
    parser.add_argument("--network-ms", type=float, default=0.0, help="time of a model call")
    parser.add_argument("--beside-diffusers", action="store_true", help="whole steps instead")
    parser.add_argument("--family", choices=["sd1", "sdxl"], default="sd1", help="network there")
    parser.add_argument("--pixels", type=int, default=512, help="side of the picture there")
    parser.add_argument("--network-steps", type=int, default=3, help="steps there, after a first")
    parser.add_argument(
        "--layouts", nargs="+", choices=["contiguous", "channels_last"],
        default=["contiguous", "channels_last"], help="how diffusers' weights lie there",
    )  # fmt: skip
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.beside_diffusers:
        compare_with_diffusers(args)
        return
    print(f"latent [1, 4, {args.size}, {args.size}], {args.steps} steps, {args.threads} threads")
    by_call = args.every is not None
    unit = "call" if by_call else "step"
    table = every_sampler(args) if by_call else cases(args)
    for name, case in table.items():
        wall, busy, calls = case()
        if by_call:
            wall, busy = wall / max(calls, 1), busy / max(calls, 1)
        mark = "" if min(wall, busy) < GOAL_MS else f"  above the goal of {GOAL_MS:g} ms"
        spent = f"{wall:7.3f} ms a {unit}, processor {busy:7.3f} ms"
        print(f"{name:30s} {spent}, {calls:.2f} calls{mark}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
