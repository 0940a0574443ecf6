"""DPM-Solver on the predicted noise, with fixed or adaptive steps.

Time is ``t = -log sigma``. Within a step the noise direction eps is expanded around its start; one,
two or three evaluations give first, second or third order.

Times are reckoned in single precision, operation by operation, as pictures were made: an adaptive
run chooses its next step by the error of the last, and its first rounded digit decides where the
run has come to ten steps later.
Source: Lu et al. 2022, https://arxiv.org/abs/2206.00927, algorithms 1 and 2, section 3.3, appendix
C.
"""
# ruff: noqa: ARG001, ARG002

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from comfy.sampling import checks
from comfy.sampling.noise import NoiseSampler, default_noise_sampler
from comfy.sampling.parameterisation import split_ancestral
from comfy.sampling.solvers.step_size import PIDStepSizeController
from comfy.sampling.solvers.trajectory import Denoiser, StepCallback, Trajectory

EpsCache = dict[str, Tensor]


class DPMSolver:
    """Single steps of the solver, and drivers over a span of time.

    Times are numbers or 0-dimensional tensors.

    Args:
        model: The denoiser.
        extra_args: Passed to every model call.
        eps_callback: Called after each model call.
        info_callback: Called once a step with x, i, t, t_up, denoised and the driver's facts.
    """

    def __init__(
        self,
        model: Denoiser,
        extra_args: dict[str, Any] | None = None,
        eps_callback: Callable[[], None] | None = None,
        info_callback: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.model = model
        self.extra_args = extra_args or {}
        self.eps_callback, self.info_callback = eps_callback, info_callback
        self._run = Trajectory(model, torch.zeros(1), self.extra_args, disable=True)

    def t(self, sigma: Any) -> Any:
        """Time of a level."""
        return -sigma.log() if torch.is_tensor(sigma) else -math.log(sigma)

    def sigma(self, t: Any) -> Any:
        """Level of a time."""
        return t.neg().exp() if torch.is_tensor(t) else math.exp(-t)

    def eps(
        self, eps_cache: EpsCache, key: str, x: Tensor, t: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, EpsCache]:
        """Noise direction of x at time t, remembered under a key."""
        if key in eps_cache:
            return eps_cache[key], eps_cache
        eps = self._run.slope(x, float(self.sigma(t)), report=False)
        if self.eps_callback is not None:
            self.eps_callback()
        return eps, {key: eps, **eps_cache}

    def dpm_solver_1_step(
        self, x: Tensor, t: Any, t_next: Any, eps_cache: EpsCache | None = None
    ) -> tuple[Tensor, EpsCache]:
        """First-order step."""
        t, t_next = _time(t), _time(t_next)
        eps, cache = self.eps(eps_cache or {}, "eps", x, t)
        return x - self.sigma(t_next) * (t_next - t).expm1() * eps, cache

    def dpm_solver_2_step(
        self, x: Tensor, t: Any, t_next: Any, r1: float = 0.5, eps_cache: EpsCache | None = None
    ) -> tuple[Tensor, EpsCache]:
        """Second-order step with an evaluation at the fraction r1."""
        t, t_next = _time(t), _time(t_next)
        h, sigma_next = t_next - t, self.sigma(t_next)
        eps, cache = self.eps(eps_cache or {}, "eps", x, t)
        s1 = t + r1 * h
        u1 = x - self.sigma(s1) * (r1 * h).expm1() * eps
        eps_r1, cache = self.eps(cache, "eps_r1", u1, s1)
        bend = sigma_next / (2 * r1) * h.expm1()
        return x - sigma_next * h.expm1() * eps - bend * (eps_r1 - eps), cache

    def dpm_solver_3_step(
        self,
        x: Tensor,
        t: Any,
        t_next: Any,
        r1: float = 1 / 3,
        r2: float = 2 / 3,
        eps_cache: EpsCache | None = None,
    ) -> tuple[Tensor, EpsCache]:
        """Third-order step with evaluations at the fractions r1 and r2."""
        t, t_next = _time(t), _time(t_next)
        h, sigma_next = t_next - t, self.sigma(t_next)
        eps, cache = self.eps(eps_cache or {}, "eps", x, t)
        s1, s2 = t + r1 * h, t + r2 * h
        u1 = x - self.sigma(s1) * (r1 * h).expm1() * eps
        eps_r1, cache = self.eps(cache, "eps_r1", u1, s1)
        growth = (r2 * h).expm1()
        bend = self.sigma(s2) * (r2 / r1) * (growth / (r2 * h) - 1)
        u2 = x - self.sigma(s2) * growth * eps - bend * (eps_r1 - eps)
        eps_r2, cache = self.eps(cache, "eps_r2", u2, s2)
        growth = h.expm1()
        bend = sigma_next / r2 * (growth / h - 1)
        return x - sigma_next * growth * eps - bend * (eps_r2 - eps), cache

    def _info(self, **facts: Any) -> None:
        if self.info_callback is not None:
            self.info_callback(facts)

    def _towards(
        self, t: Tensor, t_next: Tensor, t_limit: Tensor, eta: float
    ) -> tuple[Tensor, Tensor | None]:
        """(time of the deterministic part, deviation of the fresh noise) of a step."""
        if not eta:
            return t_next, None
        down, _ = split_ancestral(float(self.sigma(t)), float(self.sigma(t_next)), eta)
        time = torch.minimum(t_limit, self.t(torch.tensor(down)))
        return time, (self.sigma(t_next) ** 2 - self.sigma(time) ** 2).clamp(min=0).sqrt()

    def dpm_solver_fast(
        self,
        x: Tensor,
        t_start: Any,
        t_end: Any,
        nfe: int,
        eta: float = 0.0,
        s_noise: float = 1.0,
        noise_sampler: NoiseSampler | None = None,
    ) -> Tensor:
        """Steps of equal length whose orders add up to `nfe` evaluations."""
        noise_sampler = noise_sampler or default_noise_sampler(x, self.extra_args.get("seed"))
        t_start, t_end = _time(t_start), _time(t_end)
        if eta and t_end < t_start:
            raise ValueError("eta must be 0 for sampling from low to high noise")
        count = nfe // 3 + 1
        tail = [2, 1] if nfe % 3 == 0 else [nfe % 3]
        orders = [3] * (count - len(tail)) + tail
        times = torch.linspace(float(t_start), float(t_end), count + 1)
        for i, order in enumerate(orders):
            t, t_next = times[i], times[i + 1]
            t_down, sigma_up = self._towards(t, t_next, t_end, eta)
            eps, cache = self.eps({}, "eps", x, t)
            self._info(x=x, i=i, t=t, t_up=t, denoised=x - eps * self.sigma(t), total=len(orders))
            x, _ = self._step(order, x, t, t_down, cache)
            if sigma_up is not None:
                x = x + sigma_up * s_noise * noise_sampler(self.sigma(t), self.sigma(t_next))
        return x

    def _step(
        self, order: int, x: Tensor, t: Tensor, t_next: Tensor, cache: EpsCache
    ) -> tuple[Tensor, EpsCache]:
        if order == 1:
            return self.dpm_solver_1_step(x, t, t_next, eps_cache=cache)
        if order == 2:
            return self.dpm_solver_2_step(x, t, t_next, eps_cache=cache)
        return self.dpm_solver_3_step(x, t, t_next, eps_cache=cache)

    def dpm_solver_adaptive(
        self,
        x: Tensor,
        t_start: Any,
        t_end: Any,
        order: int = 3,
        rtol: float = 0.05,
        atol: float = 0.0078,
        h_init: float = 0.05,
        pcoeff: float = 0.0,
        icoeff: float = 1.0,
        dcoeff: float = 0.0,
        accept_safety: float = 0.81,
        eta: float = 0.0,
        s_noise: float = 1.0,
        noise_sampler: NoiseSampler | None = None,
    ) -> tuple[Tensor, dict[str, int]]:
        """Steps whose error, from two orders that share evaluations, stays below a tolerance.

        Returns:
            (x at t_end, counts: steps, nfe, n_accept, n_reject).
        """
        if order not in (2, 3):
            raise ValueError(f"order must be 2 or 3, got {order}")
        noise_sampler = noise_sampler or default_noise_sampler(x, self.extra_args.get("seed"))
        t_start, t_end = _time(t_start), _time(t_end)
        forward = bool(t_end > t_start)
        if eta and t_end < t_start:
            raise ValueError("eta must be 0 for sampling from low to high noise")
        control = PIDStepSizeController(
            abs(h_init) * (1 if forward else -1), pcoeff, icoeff, dcoeff,
            1.5 if eta else order, accept_safety,
        )  # fmt: skip
        counts = {"steps": 0, "nfe": 0, "n_accept": 0, "n_reject": 0}
        t, x_prev = t_start, x
        while (t < t_end - 1e-5) if forward else (t > t_end + 1e-5):
            t_next = (torch.minimum if forward else torch.maximum)(t_end, t + control.h)
            if t_next == t or control.is_stuck:
                raise ValueError(control.complaint(float(self.sigma(t)), rtol, atol))
            t_down, sigma_up = self._towards(t, t_next, t_end, eta)
            x_low, x_high, denoised = self._pair(order, x, t, t_down)
            delta = torch.clamp(torch.maximum(x_low.abs(), x_prev.abs()) * rtol, min=atol)
            error = torch.linalg.norm((x_low - x_high) / delta) / x.numel() ** 0.5
            accepted = control.propose_step(float(error))
            if accepted:
                x_prev, x = x_low, x_high
                if sigma_up is not None:
                    x = x + sigma_up * s_noise * noise_sampler(self.sigma(t), self.sigma(t_next))
                t = t_next
            counts["n_accept" if accepted else "n_reject"] += 1
            counts["nfe"] += order
            counts["steps"] += 1
            self._info(
                x=x, i=counts["steps"] - 1, t=t, t_up=t, denoised=denoised, error=error,
                h=control.h, **counts,
            )  # fmt: skip
        return x, counts

    def _pair(
        self, order: int, x: Tensor, t: Tensor, t_next: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Steps of order - 1 and order from shared evaluations, and the estimate at t."""
        eps, cache = self.eps({}, "eps", x, t)
        denoised = x - eps * self.sigma(t)
        if order == 2:
            low, cache = self.dpm_solver_1_step(x, t, t_next, cache)
            high, _ = self.dpm_solver_2_step(x, t, t_next, eps_cache=cache)
        else:
            low, cache = self.dpm_solver_2_step(x, t, t_next, r1=1 / 3, eps_cache=cache)
            high, _ = self.dpm_solver_3_step(x, t, t_next, eps_cache=cache)
        return low, high, denoised


def _time(t: Any) -> Tensor:
    """A time as a 0-dimensional tensor on the CPU; numbers take single precision."""
    return t.cpu() if torch.is_tensor(t) else torch.tensor(t, dtype=torch.float32)


def _reporter(
    solver: DPMSolver, callback: StepCallback | None
) -> Callable[[dict[str, Any]], None] | None:
    if callback is None:
        return None
    return lambda info: callback(
        {"sigma": solver.sigma(info["t"]), "sigma_hat": solver.sigma(info["t_up"]), **info}
    )


def _span(sigmas: Tensor) -> tuple[float, float]:
    """Ends of a run; clean levels at its end are replaced by the one before them."""
    given: list[float] = checks.levels_of(sigmas).tolist()
    checks.check_sigmas(given)
    levels = [level for level in given if level > 0]
    if not levels:
        raise ValueError(f"no level of {given} is above 0: there is nothing to remove")
    return levels[0], levels[-1]


def _to_clean(
    model: Denoiser, x: Tensor, sigma: float, extra_args: dict[str, Any] | None,
    callback: StepCallback | None, disable: bool | None,
) -> Tensor:  # fmt: skip
    """A run whose only level above zero is its first: there is no way between levels to go."""
    run = Trajectory(model, torch.tensor([sigma, 0.0]), extra_args, callback, disable)
    for level, _ in run:
        x = run.denoise(x, level)
    return x


@torch.no_grad()
def sample_dpm_fast(
    model: Denoiser,
    x: Tensor,
    sigma_min: float,
    sigma_max: float,
    n: int,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    eta: float = 0.0,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
) -> Tensor:
    """DPM-Solver-Fast with n evaluations between two levels."""
    if sigma_min <= 0 or sigma_max <= 0:
        raise ValueError(f"levels must be above 0, got {sigma_min} and {sigma_max}")
    solver = DPMSolver(model, extra_args)
    solver.info_callback = _reporter(solver, callback)
    start, end = (solver.t(torch.tensor(float(level))) for level in (sigma_max, sigma_min))
    return solver.dpm_solver_fast(x, start, end, n, eta, s_noise, noise_sampler)


@torch.no_grad()
def sample_dpm_adaptive(
    model: Denoiser,
    x: Tensor,
    sigma_min: float,
    sigma_max: float,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    order: int = 3,
    rtol: float = 0.05,
    atol: float = 0.0078,
    h_init: float = 0.05,
    pcoeff: float = 0.0,
    icoeff: float = 1.0,
    dcoeff: float = 0.0,
    accept_safety: float = 0.81,
    eta: float = 0.0,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
    return_info: bool = False,
) -> Any:
    """DPM-Solver-12 or -23 with adaptive steps between two levels."""
    if sigma_min <= 0 or sigma_max <= 0:
        raise ValueError(f"levels must be above 0, got {sigma_min} and {sigma_max}")
    solver = DPMSolver(model, extra_args)
    solver.info_callback = _reporter(solver, callback)
    start, end = (solver.t(torch.tensor(float(level))) for level in (sigma_max, sigma_min))
    x, info = solver.dpm_solver_adaptive(
        x, start, end, order, rtol, atol, h_init, pcoeff, icoeff, dcoeff, accept_safety, eta,
        s_noise, noise_sampler,
    )  # fmt: skip
    return (x, info) if return_info else x


@torch.no_grad()
def dpm_fast_over_levels(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    **options: Any,
) -> Tensor:
    """`sample_dpm_fast` between the ends of a schedule, one evaluation for each of its steps."""
    if len(sigmas) <= 1:
        return x
    high, low = _span(sigmas)
    if high == low:
        return _to_clean(model, x, high, extra_args, callback, disable)
    return sample_dpm_fast(
        model, x, low, high, len(sigmas) - 1, extra_args, callback, disable, **options
    )


@torch.no_grad()
def dpm_adaptive_over_levels(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    **options: Any,
) -> Tensor:
    """`sample_dpm_adaptive` between the ends of a schedule."""
    if len(sigmas) <= 1:
        return x
    high, low = _span(sigmas)
    if high == low:
        return _to_clean(model, x, high, extra_args, callback, disable)
    return sample_dpm_adaptive(model, x, low, high, extra_args, callback, disable, **options)
