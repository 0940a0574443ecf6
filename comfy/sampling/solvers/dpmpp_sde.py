"""DPM-Solver++ on the reverse SDE: exponential steps with part of the noise drawn afresh.

All of them work in half-log-SNR lambda with alpha_t = sigma_t * exp(lambda_t), so one text serves
variance-exploding and flow models. Noise comes from a Brownian tree over the levels given; the
`_gpu` variants build it on the device of the latent.
Source: Lu et al. 2022, https://arxiv.org/abs/2211.01095, section 5 and appendix; Karras et al. 2022
for eta.
"""

from __future__ import annotations

import math
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
        start, middle, end, sigma_mid = _stages(run, sigma, sigma_next, r)
        if adds_noise:
            run.prepare_draw(sigma, sigma_mid)
            run.prepare_draw(sigma, sigma_next)
        denoised = run.denoise(x, sigma)

        def stage(target: float, sigma_to: float, estimate: Tensor) -> Tensor:
            down, up = split_ancestral(math.exp(-start), math.exp(-target), eta)  # noqa: B023
            alpha, alpha_to = run.path.alpha(sigma), run.path.alpha(sigma_to)  # noqa: B023
            ratio = down * math.exp(start)  # noqa: B023
            moved = x * (alpha_to / alpha * ratio) + estimate * (alpha_to * (1 - ratio))  # noqa: B023
            if adds_noise:
                moved = moved + run.draw(sigma, sigma_to) * (alpha_to * s_noise * up)  # noqa: B023
            return moved

        denoised_mid = run.denoise(stage(middle, sigma_mid, denoised), sigma_mid, report=False)
        x = stage(end, sigma_next, denoised * (1 - weight) + denoised_mid * weight)
    return x


def _stages(
    run: Trajectory, sigma: float, sigma_next: float, r: float
) -> tuple[float, float, float, float]:
    """Half-log-SNRs at the ends of a step and between them, and the level between them.

    In the precision of the levels and with its rounding, as pictures were made: the motion is asked
    at the level between, in millionths, and in a short step one of these is a hundredth of the
    noise.
    """
    ends = (torch.tensor(level, dtype=run.sigmas.dtype) for level in (sigma, sigma_next))
    start, end = (sigma_to_half_log_snr(level, run.sampling) for level in ends)
    middle = start + r * (end - start)
    sigma_mid = half_log_snr_to_sigma(middle, run.sampling)
    return start.item(), middle.item(), end.item(), sigma_mid.item()


def _noise_share(h: float, eta: float) -> float:
    """Standard deviation of the fresh noise of a step, as a share of sigma_next."""
    return math.sqrt(-math.expm1(-2 * h * eta))


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
    previous: Tensor | None = None
    h_last = 0.0
    for sigma, sigma_next in run:
        if adds_noise and sigma_next > 0:
            run.prepare_draw(sigma, sigma_next)
        denoised = run.denoise(x, sigma)
        if sigma_next == 0:
            x = denoised
            continue
        h = run.path.half_log_snr(sigma_next) - run.path.half_log_snr(sigma)
        alpha, h_eta = run.path.alpha(sigma_next), h * (eta + 1)
        gain = -math.expm1(-h_eta)
        x = x * (sigma_next / sigma * math.exp(-h * eta)) + denoised * (alpha * gain)
        if previous is not None:
            second = 0.5 * gain if solver_type == "midpoint" else 1 - gain / h_eta
            x = x + (denoised - previous) * (alpha * second * h / h_last)
        if adds_noise:
            noise = run.draw(sigma, sigma_next)
            x = x + noise * (sigma_next * _noise_share(h, eta) * s_noise)
        previous, h_last = denoised, h
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
    past: list[
        tuple[float, Tensor]
    ] = []  # newest first: (step that followed the estimate, estimate)
    for sigma, sigma_next in run:
        if adds_noise and sigma_next > 0:
            run.prepare_draw(sigma, sigma_next)
        denoised = run.denoise(x, sigma)
        if sigma_next == 0:
            x = denoised
            continue
        h = run.path.half_log_snr(sigma_next) - run.path.half_log_snr(sigma)
        alpha, h_eta = run.path.alpha(sigma_next), h * (eta + 1)
        gain = -math.expm1(-h_eta)
        x = x * (sigma_next / sigma * math.exp(-h * eta)) + denoised * (alpha * gain)
        if past:
            phi_2 = 1 - gain / h_eta
            r_0 = past[0][0] / h
            slope = (denoised - past[0][1]) / r_0
            if len(past) > 1:
                r_1 = past[1][0] / h
                bend = slope - (past[0][1] - past[1][1]) / r_1
                x = x - bend * (alpha * (phi_2 / h_eta - 0.5) / (r_0 + r_1))
                slope = slope + bend * (r_0 / (r_0 + r_1))
            x = x + slope * (alpha * phi_2)
        if adds_noise:
            noise = run.draw(sigma, sigma_next)
            x = x + noise * (sigma_next * _noise_share(h, eta) * s_noise)
        past = [(h, denoised), *past][:2]
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
