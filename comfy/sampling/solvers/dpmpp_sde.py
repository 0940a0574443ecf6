"""DPM-Solver++ on the reverse SDE: exponential steps with part of the noise drawn afresh.

All of them work in half-log-SNR lambda with alpha_t = sigma_t * exp(lambda_t), so one text serves
variance-exploding and flow models. Noise comes from a Brownian tree over the levels given; the
`_gpu` variants build it on the device of the latent.
Source: Lu et al. 2022, https://arxiv.org/abs/2211.01095, section 5 and appendix; Karras et al. 2022
for eta.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comfy.sampling import checks
from comfy.sampling.noise import NoiseSampler, brownian_noise
from comfy.sampling.parameterisation import split_ancestral
from comfy.sampling.solvers.tensor_forms import half_log_snr_to_sigma, sigma_to_half_log_snr
from comfy.sampling.solvers.trajectory import Denoiser, StepCallback, Trajectory


@torch.no_grad()
def sample_dpmpp_sde(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    eta: float = 1.0,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
    r: float = 0.5,
) -> Tensor:
    """DPM-Solver++ (stochastic): an intermediate level at the fraction r, noise at both stages."""
    if len(sigmas) <= 1:
        return x
    if r == 0:
        raise ValueError("r, the place of the intermediate level in a step, must not be 0")
    run = Trajectory(model, sigmas, extra_args, callback, disable, finite_snr=True, distinct=True)
    run.use_brownian_noise(x, noise_sampler, sigmas)
    adds_noise = eta > 0 and s_noise > 0
    weight = 1 / (2 * r)
    for sigma, sigma_next in run:
        if sigma_next == 0:
            x = run.denoise(x, sigma)
            continue
        first, second = _stages(run, sigma, sigma_next, r, eta)
        if adds_noise:
            run.prepare_draw(sigma, first.sigma)
            run.prepare_draw(sigma, sigma_next)
        denoised = run.denoise(x, sigma)

        def moved(stage: _Stage, estimate: Tensor) -> Tensor:
            made = x * stage.kept - estimate * stage.gain  # noqa: B023
            if adds_noise:
                made = made + run.draw(sigma, stage.sigma) * (s_noise * stage.fresh)  # noqa: B023
            return made

        denoised_mid = run.denoise(moved(first, denoised), first.sigma, report=False)
        x = moved(second, denoised * (1 - weight) + denoised_mid * weight)
    return x


@dataclass(frozen=True)
class _Stage:
    """A level that a step goes to, and the factors on the way from the step's start.

    Attributes:
        kept: What is left of x.
        gain: Minus the weight of the estimate.
        fresh: Standard deviation of the fresh noise.
    """

    sigma: float
    kept: float
    gain: float
    fresh: float


def _stages(
    run: Trajectory, sigma: float, sigma_next: float, r: float, eta: float
) -> tuple[_Stage, _Stage]:
    """The level between the ends of a step, and its end.

    In the precision of the levels and with its rounding, as pictures were made: the motion is asked
    at the level between, in millionths, and in a short step one of these is a hundredth of the
    noise.
    """
    before, after = torch.tensor([sigma, sigma_next], dtype=run.sigmas.dtype)
    start, end = (sigma_to_half_log_snr(level, run.sampling) for level in (before, after))
    middle = start + r * (end - start)
    alpha = before * start.exp()

    def stage(level: Tensor, half_log_snr: Tensor) -> _Stage:
        down, up = split_ancestral((-start).exp().item(), (-half_log_snr).exp().item(), eta)
        h = -start.new_tensor(down).log() - start
        # Far beyond the end of the step (a large r) the level rounds to zero, where alpha is one.
        alpha_to = (level * half_log_snr.exp()).nan_to_num(nan=1.0, posinf=1.0)
        kept, gain = alpha_to / alpha * (-h).exp(), alpha_to * (-h).expm1()
        return _Stage(level.item(), kept.item(), gain.item(), float(alpha_to * up))

    return stage(half_log_snr_to_sigma(middle, run.sampling), middle), stage(after, end)


class _Steps:
    """Factors of the steps between levels above zero, one of each a step.

    Attributes:
        h, h_eta: Length in half-log-SNR, without and with the share of the noise.
        alpha: Weight of the clean latent at the end.
        kept: What is left of x.
        gain, first: Weight of a constant estimate, without and with alpha.
        fresh: Standard deviation of the fresh noise, in parts of the level at the end.
    """

    def __init__(self, run: Trajectory, eta: float, s_noise: float) -> None:
        levels = run.noisy
        sigma, sigma_next = levels[:-1], levels[1:]
        lambdas = sigma_to_half_log_snr(levels, run.sampling)
        self.h = lambdas.diff()
        self.h_eta = self.h * (eta + 1)
        self.alpha = sigma_next * lambdas[1:].exp()
        self.gain = (-self.h_eta).expm1().neg()
        self.kept: list[float] = (sigma_next / sigma * (-self.h * eta).exp()).tolist()
        self.first: list[float] = (self.alpha * self.gain).tolist()
        share = (-2 * self.h * eta).expm1().neg().sqrt()
        self.fresh: list[float] = (share * s_noise).tolist()

    @property
    def phi_2(self) -> Tensor:
        """Weight of a linear estimate's slope, before alpha."""
        return 1 - self.gain / self.h_eta


@torch.no_grad()
def sample_dpmpp_2m_sde(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    eta: float = 1.0,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
    solver_type: str = "midpoint",
) -> Tensor:
    """SDE-DPM-Solver++(2M): the estimate's slope comes from the last step."""
    if len(sigmas) <= 1:
        return x
    if solver_type not in ("midpoint", "heun"):
        raise ValueError(f"unknown solver_type {solver_type!r}; known: midpoint, heun")
    run = Trajectory(model, sigmas, extra_args, callback, disable, finite_snr=True, distinct=True)
    run.use_brownian_noise(x, noise_sampler, sigmas)
    adds_noise = eta > 0 and s_noise > 0
    steps = _Steps(run, eta, s_noise)
    second = 0.5 * steps.gain if solver_type == "midpoint" else steps.phi_2
    lasts = steps.h[:-1] / steps.h[1:]
    slopes: list[float] = (steps.alpha[1:] * second[1:] * (1 / lasts)).tolist()
    previous: Tensor | None = None
    for sigma, sigma_next in run:
        if adds_noise and sigma_next > 0:
            run.prepare_draw(sigma, sigma_next)
        denoised = run.denoise(x, sigma)
        if sigma_next == 0:
            x = denoised
            continue
        x = x * steps.kept[run.index] + denoised * steps.first[run.index]
        if previous is not None:
            x = x + (denoised - previous) * slopes[run.index - 1]
        if adds_noise:
            x = x + run.draw(sigma, sigma_next) * sigma_next * steps.fresh[run.index]
        previous = denoised
    return x


@torch.no_grad()
def sample_dpmpp_2m_sde_heun(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    eta: float = 1.0,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
    solver_type: str = "heun",
) -> Tensor:
    """SDE-DPM-Solver++(2M) with the exact weight of a linear estimate."""
    return sample_dpmpp_2m_sde(
        model, x, sigmas, extra_args, callback, disable, eta, s_noise, noise_sampler, solver_type
    )


@torch.no_grad()
def sample_dpmpp_3m_sde(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    eta: float = 1.0,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
) -> Tensor:
    """SDE-DPM-Solver++(3M): slope and curvature of the estimate from the last two steps."""
    if len(sigmas) <= 1:
        return x
    run = Trajectory(model, sigmas, extra_args, callback, disable, finite_snr=True, distinct=True)
    run.use_brownian_noise(x, noise_sampler, sigmas)
    adds_noise = eta > 0 and s_noise > 0
    steps = _Steps(run, eta, s_noise)
    lengths: list[float] = steps.h.tolist()
    slopes: list[float] = (steps.alpha * steps.phi_2).tolist()
    bends: list[float] = (steps.alpha * (steps.phi_2 / steps.h_eta - 0.5)).tolist()
    past: list[Tensor] = []  # estimates, newest first
    for sigma, sigma_next in run:
        if adds_noise and sigma_next > 0:
            run.prepare_draw(sigma, sigma_next)
        denoised = run.denoise(x, sigma)
        if sigma_next == 0:
            x = denoised
            continue
        i = run.index
        x = x * steps.kept[i] + denoised * steps.first[i]
        if past:
            r_0 = lengths[i - 1] / lengths[i]
            slope = (denoised - past[0]) / r_0
            if len(past) > 1:
                r_1 = lengths[i - 2] / lengths[i]
                bend = slope - (past[0] - past[1]) / r_1
                x = x - bend * (bends[i] / (r_0 + r_1))
                slope = slope + bend * (r_0 / (r_0 + r_1))
            x = x + slope * slopes[i]
        if adds_noise:
            x = x + run.draw(sigma, sigma_next) * sigma_next * steps.fresh[i]
        past = [denoised, *past][:2]
    return x


def _on_latent_device(
    solver: Any,
    x: Tensor,
    sigmas: Tensor,
    extra_args: Any,
    sampler: NoiseSampler | None,
    rest: tuple[Any, ...],
) -> Tensor:
    """Run a solver with its Brownian tree built where the latent is."""
    sigmas = checks.levels_of(sigmas)
    if sampler is None and len(sigmas) > 1 and bool((sigmas > 0).any()):
        sampler = brownian_noise(x, sigmas, (extra_args or {}).get("seed"), cpu=False)
    model, callback, disable, eta, s_noise, *options = rest
    return solver(model, x, sigmas, extra_args, callback, disable, eta, s_noise, sampler, *options)


@torch.no_grad()
def sample_dpmpp_sde_gpu(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    eta: float = 1.0,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
    r: float = 0.5,
) -> Tensor:
    """`sample_dpmpp_sde` with noise made on the device of the latent."""
    rest = (model, callback, disable, eta, s_noise, r)
    return _on_latent_device(sample_dpmpp_sde, x, sigmas, extra_args, noise_sampler, rest)


@torch.no_grad()
def sample_dpmpp_2m_sde_gpu(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    eta: float = 1.0,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
    solver_type: str = "midpoint",
) -> Tensor:
    """`sample_dpmpp_2m_sde` with noise made on the device of the latent."""
    rest = (model, callback, disable, eta, s_noise, solver_type)
    return _on_latent_device(sample_dpmpp_2m_sde, x, sigmas, extra_args, noise_sampler, rest)


@torch.no_grad()
def sample_dpmpp_2m_sde_heun_gpu(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    eta: float = 1.0,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
    solver_type: str = "heun",
) -> Tensor:
    """`sample_dpmpp_2m_sde_heun` with noise made on the device of the latent."""
    rest = (model, callback, disable, eta, s_noise, solver_type)
    return _on_latent_device(sample_dpmpp_2m_sde, x, sigmas, extra_args, noise_sampler, rest)


@torch.no_grad()
def sample_dpmpp_3m_sde_gpu(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    eta: float = 1.0,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
) -> Tensor:
    """`sample_dpmpp_3m_sde` with noise made on the device of the latent."""
    rest = (model, callback, disable, eta, s_noise)
    return _on_latent_device(sample_dpmpp_3m_sde, x, sigmas, extra_args, noise_sampler, rest)
