"""Solvers beside the schedulers of diffusers: same levels, same noise, same Gaussian data.

    python benchmarks/solvers_beside_diffusers.py [--steps 10] [--seed 0]

Printed is the largest distance between the two ends, in deviations of the data (0.5); theirs is
computed in single precision in places, so 1e-5 is "equal". Rows marked * have other formulas on
purpose; each says which. A few seconds. diffusers is no dependency of the project:
`python -m pip install diffusers` puts it beside an installation.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from comfy.sampling import solvers
from comfy.sampling.parameterisation import EXPLODING, FLOW
from tests.comfy.sampling.gaussian import NETWORKS, SPREAD, GaussianDenoiser, exact_estimate

SHAPE = (1, 4, 6, 5)
EQUAL = 1e-5
SD = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
}
SD_EVEN = {**SD, "lower_order_final": False}
SDE = {**SD_EVEN, "algorithm_type": "sde-dpmsolver++"}
FLOWS = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
LOW = {"final_sigmas_type": "sigma_min"}


@dataclass(frozen=True)
class Pair:
    """One of our solvers and one of their schedulers.

    Attributes:
        ours, options: Name and options of our solver.
        theirs, config: Class and configuration of their scheduler.
        form: How their sample is scaled: "exploding", "preserving", "edm" or "flow".
        noise: Whether both draw noise.
        step: Options of their steps.
        levels: Where our levels come from: "sigmas", "distinct" ones (each is listed twice), or the
            ones "seen" by the network, then 0.
        before_last: Compare before the last step.
        differs: Why the ends differ, if they do on purpose.
    """

    ours: str
    theirs: str
    form: str = "exploding"
    config: dict[str, Any] = field(default_factory=lambda: SD)
    options: dict[str, Any] = field(default_factory=dict)
    noise: bool = False
    step: dict[str, Any] = field(default_factory=dict)
    levels: str = "sigmas"
    before_last: bool = False
    differs: str = ""


STILL = {"eta": 0.0, "s_noise": 0.0}
UNCLIPPED = {**SD, "clip_sample": False}
LCM = {**SD, "timestep_scaling": 1e9}


def _tau(_: Any) -> float:
    return 1.0


SA = {"predictor_order": 3, "corrector_order": 3, "tau_func": _tau}
PAIRS = [
    Pair("euler", "EulerDiscreteScheduler"),
    Pair("euler", "EulerDiscreteScheduler", config={**SD, "use_karras_sigmas": True}),
    Pair("euler_ancestral", "EulerAncestralDiscreteScheduler", noise=True),
    Pair("heun", "HeunDiscreteScheduler", levels="distinct"),
    Pair("dpm_2", "KDPM2DiscreteScheduler", levels="distinct"),
    Pair("dpm_2_ancestral", "KDPM2AncestralDiscreteScheduler", noise=True, levels="distinct"),
    Pair("lms", "LMSDiscreteScheduler", before_last=True),
    Pair("lms", "LMSDiscreteScheduler", differs="ours ends at the estimate"),
    Pair("ddim", "DDIMScheduler", "preserving", UNCLIPPED, levels="seen"),
    Pair(
        "euler_ancestral", "DDIMScheduler", "preserving", UNCLIPPED, {"eta": 0.5}, noise=True,
        step={"eta": 0.5}, levels="seen",
    ),
    Pair("ddpm", "DDPMScheduler", "preserving", UNCLIPPED, noise=True, levels="seen"),
    Pair("lcm", "LCMScheduler", "preserving", LCM, noise=True, levels="seen"),
    Pair("dpmpp_2m", "DPMSolverMultistepScheduler", "preserving", SD_EVEN),
    Pair(
        "dpmpp_2m_sde_heun", "DPMSolverMultistepScheduler", "preserving",
        {**SD_EVEN, "solver_type": "heun"}, STILL,
    ),
    Pair(
        "dpmpp_3m_sde", "DPMSolverMultistepScheduler", "preserving",
        {**SD_EVEN, "solver_type": "heun", "solver_order": 3}, STILL,
    ),
    Pair("dpmpp_2m_sde", "DPMSolverMultistepScheduler", "preserving", SDE, noise=True),
    Pair(
        "dpmpp_2m_sde_heun", "DPMSolverMultistepScheduler", "preserving",
        {**SDE, "solver_type": "heun"}, noise=True,
    ),
    Pair(
        "dpmpp_3m_sde", "DPMSolverMultistepScheduler", "preserving",
        {**SDE, "solver_type": "heun", "solver_order": 3}, noise=True,
        differs="a constant of theirs has the other sign",
    ),
    Pair("uni_pc", "UniPCMultistepScheduler", "preserving",
         {**SD, **LOW, "solver_order": 3, "solver_type": "bh1"}),
    Pair("uni_pc_bh2", "UniPCMultistepScheduler", "preserving", {**SD, **LOW, "solver_order": 3}),
    Pair("uni_pc_bh2", "UniPCMultistepScheduler", "preserving", {**SD, "solver_order": 3},
         differs="ours ends next to zero"),
    Pair("deis", "DEISMultistepScheduler", "preserving", {**SD_EVEN, "solver_order": 1},
         {"max_order": 1}),
    Pair("deis", "DEISMultistepScheduler", "preserving", {**SD_EVEN, "solver_order": 3},
         differs="ours is a polynomial in time, theirs in log sigma"),
    Pair("sa_solver", "SASolverScheduler", "preserving", {**SD_EVEN, **SA},
         {**SA, "simple_order_2": True}, noise=True, before_last=True),
    Pair("euler", "EDMEulerScheduler", "edm", {}),
    Pair("dpmpp_2m", "EDMDPMSolverMultistepScheduler", "edm", {"lower_order_final": False}),
    Pair("dpmpp_2m_sde", "EDMDPMSolverMultistepScheduler", "edm",
         {"lower_order_final": False, "algorithm_type": "sde-dpmsolver++"}, noise=True),
    Pair("euler", "FlowMatchEulerDiscreteScheduler", "flow", {"shift": 3.0}),
    Pair("heun", "FlowMatchHeunDiscreteScheduler", "flow", {"shift": 3.0}, levels="distinct"),
    Pair("lcm", "FlowMatchEulerDiscreteScheduler", "flow",
         {"shift": 3.0, "stochastic_sampling": True}, noise=True),
    Pair("dpmpp_2m_sde", "DPMSolverMultistepScheduler", "flow",
         {**FLOWS, "lower_order_final": False}, STILL),
    Pair("dpmpp_2m_sde", "DPMSolverMultistepScheduler", "flow",
         {**FLOWS, "lower_order_final": False, "algorithm_type": "sde-dpmsolver++"}, noise=True),
    Pair("dpmpp_2m", "DPMSolverMultistepScheduler", "flow", {**FLOWS, "lower_order_final": False},
         differs="ours takes levels for variance exploding"),
]  # fmt: skip


class Draws:
    """The same noise for both: the n-th draw is the n-th tensor."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed + 1)

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        return torch.randn(SHAPE, generator=self.generator, dtype=torch.float64)


def _level(scheduler: Any, form: str, x: Tensor, timestep: Any) -> float:
    """Noise level that the scheduler is at, in its own terms."""
    if form == "exploding":  # it scales inputs to unit variance
        scale = (x / scheduler.scale_model_input(x, timestep)).flatten()[0].double()
        return float((scale**2 - 1).sqrt())
    if not hasattr(scheduler, "sigmas"):
        return _tabled(scheduler, timestep)
    if form == "edm":
        scheduler.scale_model_input(x, timestep)
    return float(scheduler.sigmas[scheduler.step_index or 0])


def _tabled(scheduler: Any, timestep: Any) -> float:
    alpha_bar = float(scheduler.alphas_cumprod[int(timestep)])
    return math.sqrt((1 - alpha_bar) / alpha_bar)


def _alpha(form: str, sigma: float) -> float:
    return 1 / math.sqrt(1 + sigma**2) if form == "preserving" else 1.0


def their_run(pair: Pair, scheduler: Any, start: Tensor, seed: int) -> tuple[Tensor, list[float]]:
    """End of their trajectory on variance-exploding scale, and the levels the network saw."""
    module: Any = sys.modules[type(scheduler).__module__]
    if hasattr(module, "randn_tensor"):
        module.randn_tensor = Draws(seed)
    kind = {"flow": "flow", "edm": "edm"}.get(pair.form, "eps")
    network, path = NETWORKS[kind][2], FLOW if kind == "flow" else EXPLODING
    timesteps = scheduler.timesteps[: -1 if pair.before_last else None]
    first = getattr(scheduler, "sigmas", None)
    high = _tabled(scheduler, timesteps[0]) if first is None else float(first.max())
    x = start * (1.0 if kind == "flow" else high * _alpha(pair.form, high))
    seen: list[float] = []
    for timestep in timesteps:
        sigma = _level(scheduler, pair.form, x, timestep)
        seen.append(sigma)
        exploding = x.double() / _alpha(pair.form, sigma)
        level = torch.tensor([sigma], dtype=torch.float64)
        output = network(exploding, exact_estimate(exploding, level, path), level)
        x = scheduler.step(output, timestep, x, **pair.step).prev_sample
    return x.double(), seen


def _levels(pair: Pair, scheduler: Any, seen: list[float]) -> list[float]:
    if pair.levels == "seen":
        return [*seen, 0.0]
    levels = [float(sigma) for sigma in scheduler.sigmas]
    if pair.levels == "distinct":
        levels = list(dict.fromkeys(levels))
    return levels[:-1] if pair.before_last else levels


def distance(pair: Pair, schedulers: Any, steps: int, seed: int) -> float:
    """Largest distance between both ends, in deviations of the data."""
    scheduler = getattr(schedulers, pair.theirs)(**pair.config)
    scheduler.set_timesteps(steps)
    start = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    theirs, seen = their_run(pair, scheduler, start, seed)
    levels = _levels(pair, scheduler, seen)
    theirs = theirs / _alpha(pair.form, levels[-1])
    options = dict(pair.options)
    if pair.noise:
        options["noise_sampler"] = Draws(seed)
    kind = "flow" if pair.form == "flow" else "eps"
    ours = solvers.find(pair.ours).function(
        GaussianDenoiser(kind), start if kind == "flow" else start * levels[0],
        torch.tensor(levels, dtype=torch.float64), extra_args={"seed": seed}, disable=True,
        **options,
    )  # fmt: skip
    return float((ours - theirs).abs().max()) / SPREAD


def lines(schedulers: Any, steps: int, seed: int) -> Iterator[str]:
    """A line for each pair."""
    for pair in PAIRS:
        apart = distance(pair, schedulers, steps, seed)
        mark = f"* {pair.differs}" if pair.differs else "" if apart < EQUAL else "NOT EQUAL"
        short = pair.theirs.removesuffix("Scheduler")
        beyond = {k: v for k, v in pair.config.items() if k not in SD and not callable(v)}
        said = ", ".join(f"{key} {value}" for key, value in beyond.items())
        yield f"{apart:8.1e}  {pair.ours:18s} {short:28s} {mark}{'  ' if mark else ''}({said})"


def main() -> None:
    """Prints a line for each pair."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        schedulers: Any = importlib.import_module("diffusers.schedulers")
    except ImportError as missing:
        sys.exit(f"diffusers is not installed ({missing}): python -m pip install diffusers")
    show: Callable[[str], Any] = print
    for line in lines(schedulers, args.steps, args.seed):
        show(line)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
