"""Where the noise levels of a run lie: the schedulers of the KSampler nodes.

A schedule is a descending float32 tensor [steps + 1] of standard deviations that ends in 0. Some
are picked from the model's own table or timesteps (`use_ms`), the others are curves between the
model's lowest and highest level. `SCHEDULER_HANDLERS` is the table; custom nodes add rows to it in
place.

Known quirks are kept because pictures depend on them: `ddim_uniform` walks the table in whole
strides and so may return a few steps more or fewer than asked for, `beta` merges equal picks. The
caller counts the steps of what it gets, never of what it asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# A longer schedule would take memory and time for levels that nobody can tell apart.
LONGEST_SCHEDULE = 1_000_000


def append_zero(sigmas: Tensor) -> Tensor:
    """Add the clean level at the end."""
    return torch.cat([sigmas, sigmas.new_zeros([1])])


def simple_scheduler(model_sampling: Any, steps: int) -> Tensor:
    """Every (n / steps)-th entry of the model's table, from the top."""
    table = model_sampling.sigmas
    stride = len(table) / steps
    places = [len(table) - 1 - int(step * stride) for step in range(steps)]
    return append_zero(table.cpu().float()[places])


def ddim_scheduler(model_sampling: Any, steps: int) -> Tensor:
    """Whole strides through the table, from its second entry upwards (Song et al. 2020)."""
    table = model_sampling.sigmas
    levels = [] if math.isclose(float(table[1]), 0, abs_tol=1e-5) else [0.0]
    if not levels:
        steps += 1
    stride = max(len(table) // steps, 1)
    levels += [float(table[index]) for index in range(1, len(table), stride)]
    return torch.FloatTensor(levels[::-1])


def normal_scheduler(
    model_sampling: Any,
    steps: int,
    sgm: bool = False,
    floor: bool = False,  # noqa: ARG001 - public signature
) -> Tensor:
    """Uniform in the model's timestep; `sgm` leaves out the lowest level."""
    start = model_sampling.timestep(model_sampling.sigma_max)
    end = model_sampling.timestep(model_sampling.sigma_min)
    ends_at_zero = False
    if sgm:
        timesteps = torch.linspace(float(start), float(end), steps + 1)[:-1]
    else:
        ends_at_zero = math.isclose(float(model_sampling.sigma(end)), 0, abs_tol=1e-5)
        timesteps = torch.linspace(float(start), float(end), steps + ends_at_zero)
    levels = _levels_at(model_sampling, timesteps)
    return torch.FloatTensor(levels if ends_at_zero else [*levels, 0.0])


def _levels_at(model_sampling: Any, timesteps: Tensor) -> list[float]:
    """Levels of timesteps: at once from our own classes, one by one from those of custom nodes,
    which need not take more than one."""
    owner = getattr(type(model_sampling).sigma, "__module__", None)
    if owner == "comfy.sampling.noise_levels":
        return model_sampling.sigma(timesteps).tolist()
    return [float(model_sampling.sigma(timestep)) for timestep in timesteps]


def sgm_uniform_scheduler(model_sampling: Any, steps: int) -> Tensor:
    """Uniform in the model's timestep without its lowest level."""
    return normal_scheduler(model_sampling, steps, sgm=True)


def get_sigmas_karras(
    n: int, sigma_min: float, sigma_max: float, rho: float = 7.0, device: Any = "cpu"
) -> Tensor:
    """Uniform in sigma^(1/rho): more steps where there is little noise.

    Source: Karras et al. 2022, https://arxiv.org/abs/2206.00364, equation 5.
    """
    if rho == 0 or min(sigma_min, sigma_max) < 0:
        raise ValueError(
            f"rho {rho:g} and levels {sigma_min:g} to {sigma_max:g} give no schedule: rho must not "
            "be 0 and levels not negative"
        )
    ramp = torch.linspace(0, 1, n, device=device)
    try:
        low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    except ArithmeticError as error:
        raise ValueError(
            f"rho: expected one whose powers of the levels {sigma_min:g} to {sigma_max:g} are "
            f"numbers, found {rho:g}; 7 is usual"
        ) from error
    return append_zero((high + ramp * (low - high)) ** rho).to(device)


def check_logarithms(sigma_min: float, sigma_max: float) -> None:
    """Refuse ends that have no logarithm.

    Raises:
        ValueError: A level is not above 0.
    """
    if sigma_min <= 0 or sigma_max <= 0:
        raise ValueError(
            f"levels must be above 0 for a schedule in log sigma, got sigma_min {sigma_min:g} and "
            f"sigma_max {sigma_max:g}"
        )


def get_sigmas_exponential(
    n: int, sigma_min: float, sigma_max: float, device: Any = "cpu"
) -> Tensor:
    """Uniform in log sigma."""
    check_logarithms(sigma_min, sigma_max)
    return append_zero(
        torch.linspace(math.log(sigma_max), math.log(sigma_min), n, device=device).exp()
    )


def beta_scheduler(
    model_sampling: Any, steps: int, alpha: float = 0.6, beta: float = 0.6
) -> Tensor:
    """Table entries at quantiles of a beta distribution; equal neighbours are merged.

    Source: Lee et al. 2024, https://arxiv.org/abs/2407.12173.
    """
    from scipy import special  # half a second that most runs need not wait for

    if alpha <= 0 or beta <= 0:
        raise ValueError(f"alpha and beta must be above 0, got {alpha:g} and {beta:g}")
    last = len(model_sampling.sigmas) - 1
    quantiles = 1 - np.linspace(0, 1, steps, endpoint=False)
    indices = np.rint(special.betaincinv(alpha, beta, quantiles) * last).astype(int).tolist()
    kept = [
        index for place, index in enumerate(indices) if place == 0 or index != indices[place - 1]
    ]
    return torch.FloatTensor([*(float(model_sampling.sigmas[index]) for index in kept), 0.0])


def linear_quadratic_schedule(
    model_sampling: Any, steps: int, threshold_noise: float = 0.025, linear_steps: int | None = None
) -> Tensor:
    """Small linear steps down to 1 - threshold_noise, then a parabola, scaled to the model.

    Source: Polyak et al. 2024 (Movie Gen), https://arxiv.org/abs/2410.13720, section 3.4.2.
    """
    if steps == 1:
        done = [0.0, 1.0]
    else:
        if linear_steps is None:
            linear_steps = steps // 2
        rest = steps - linear_steps
        slope = threshold_noise / linear_steps
        excess = linear_steps - threshold_noise * steps
        square = excess / (linear_steps * rest**2)
        tilt = slope - 2 * excess / rest**2
        offset = square * linear_steps**2
        done = [step * slope for step in range(linear_steps)]
        done += [square * step**2 + tilt * step + offset for step in range(linear_steps, steps)]
        done.append(1.0)
    return torch.FloatTensor([1.0 - part for part in done]) * model_sampling.sigma_max.cpu()


def kl_optimal_scheduler(n: int, sigma_min: float, sigma_max: float) -> Tensor:
    """Uniform in atan(sigma).

    Source: Sabour et al. 2024 (Align Your Steps), https://arxiv.org/abs/2404.14507, theorem 3.1.
    """
    place = torch.arange(n, dtype=torch.float) / max(n - 1, 1)
    angles = place * math.atan(sigma_min) + (1 - place) * math.atan(sigma_max)
    return append_zero(angles.tan())


class SchedulerHandler(NamedTuple):
    """A scheduler: called as handler(model_sampling, steps) if use_ms, else with
    n, sigma_min and sigma_max by name."""

    handler: Callable[..., Tensor]
    use_ms: bool = True


SCHEDULER_HANDLERS: dict[str, SchedulerHandler] = {
    "simple": SchedulerHandler(simple_scheduler),
    "sgm_uniform": SchedulerHandler(sgm_uniform_scheduler),
    "karras": SchedulerHandler(get_sigmas_karras, use_ms=False),
    "exponential": SchedulerHandler(get_sigmas_exponential, use_ms=False),
    "ddim_uniform": SchedulerHandler(ddim_scheduler),
    "beta": SchedulerHandler(beta_scheduler),
    "normal": SchedulerHandler(normal_scheduler),
    "linear_quadratic": SchedulerHandler(linear_quadratic_schedule),
    "kl_optimal": SchedulerHandler(kl_optimal_scheduler, use_ms=False),
}
SCHEDULER_NAMES: list[str] = list(SCHEDULER_HANDLERS)


def calculate_sigmas(model_sampling: Any, scheduler_name: str, steps: int) -> Tensor:
    """Schedule of a scheduler in the table for one model.

    Returns:
        Descending sigmas, usually [steps + 1], ending in 0.
    Raises:
        ValueError: the name is not in `SCHEDULER_HANDLERS`, or steps is below 1.
    """
    row = SCHEDULER_HANDLERS.get(scheduler_name)
    if row is None:
        known = ", ".join(SCHEDULER_HANDLERS)
        raise ValueError(f"unknown scheduler {scheduler_name!r}; known: {known}")
    if steps < 1:
        raise ValueError(f"a schedule needs at least 1 step, got {steps}")
    if row.use_ms:
        return row.handler(model_sampling, steps)
    return row.handler(
        n=steps,
        sigma_min=float(model_sampling.sigma_min),
        sigma_max=float(model_sampling.sigma_max),
    )


def sigmas_for_denoise(
    schedule: Callable[[int], Tensor], steps: int, denoise: float | None
) -> Tensor:
    """The last `steps` steps of a schedule long enough that they cover `denoise` of it.

    Args:
        schedule: From a step count to its sigmas.
        denoise: Strength 0..1; None or above 0.9999 means the whole schedule, 0 gives no levels.
    """
    if denoise is None or denoise > 0.9999:
        return schedule(steps)
    if denoise <= 0.0:
        return torch.FloatTensor([])
    return schedule(_whole_steps(steps, denoise))[-(steps + 1) :]


def _whole_steps(steps: int, denoise: float) -> int:
    """Steps of a whole schedule of which `steps` are the share `denoise`."""
    total = int(steps / denoise)
    if total > LONGEST_SCHEDULE:
        raise ValueError(
            f"{steps} steps at a denoise of {denoise:g} are the end of a schedule of {total} "
            f"steps, and {LONGEST_SCHEDULE} are the most; use a denoise of "
            f"{steps / LONGEST_SCHEDULE:g} or more"
        )
    return total


def basic_schedule(model_sampling: Any, scheduler_name: str, steps: int, denoise: float) -> Tensor:
    """The schedule of the BasicScheduler node: at most steps + 1 levels, whatever the scheduler.

    Args:
        denoise: Strength 0..1; below 1 a longer schedule is cut to its end, 0 gives no levels.
    """
    if denoise <= 0.0:
        return torch.FloatTensor([])
    total = steps if denoise >= 1.0 else _whole_steps(steps, denoise)
    return calculate_sigmas(model_sampling, scheduler_name, total).cpu()[-(steps + 1) :]
