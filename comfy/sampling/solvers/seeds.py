"""Stochastic exponential integrators with two or three evaluations a step.

The noise of the stages is one Wiener path: each stage carries the previous one's noise on and adds
the part of its own interval.
Source: Gonzalez et al. 2023, https://arxiv.org/abs/2305.14267 (SEEDS), for the data prediction; the
second-order weights are those of Hochbruck and Ostermann 2005.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy.sampling.noise import NoiseSampler
from comfy.sampling.solvers.tensor_forms import half_log_snr_to_sigma, sigma_to_half_log_snr
from comfy.sampling.solvers.trajectory import Denoiser, StepCallback, Trajectory


def _h_phi_2(h: Tensor) -> Tensor:
    """h * phi_2(h) = (e^h - 1 - h) / h."""
    return (h.expm1() - h) / h


class _Step:
    """One step between two levels in half-log-SNR, with the noise gathered so far.

    Its factors have the precision of the levels and its rounding, as pictures were made.

    Args:
        run: The trajectory, at the step.
        x: Latent at the start.
        levels, lambdas: Levels above zero of the run and their half-log-SNRs.
        eta: Share of the reverse SDE's noise; 0 is deterministic.
        s_noise: Factor of the noise; 0 draws none.
    """

    def __init__(
        self,
        run: Trajectory,
        x: Tensor,
        levels: Tensor,
        lambdas: Tensor,
        eta: float,
        s_noise: float,
    ) -> None:
        self.run, self.x, self.eta, self.s_noise = run, x, eta, s_noise
        self.sigma, self.sigma_next = levels[run.index], levels[run.index + 1]
        self.start, self.end = lambdas[run.index], lambdas[run.index + 1]
        self.h = self.end - self.start
        self.h_eta = self.h * (eta + 1)
        self._noise: Tensor | None = None
        self._reached, self._sigma = 0.0, self.sigma

    def place(self, fraction: float) -> tuple[Tensor, Tensor]:
        """(level, half-log-SNR) at a fraction of the step."""
        if fraction == 1:
            return self.sigma_next, self.end
        half_log_snr = torch.lerp(self.start, self.end, fraction)
        return half_log_snr_to_sigma(half_log_snr, self.run.sampling), half_log_snr

    def sigma_at(self, fraction: float) -> float:
        """Level at a fraction of the step."""
        return self.place(fraction)[0].item()

    def advance(self, fraction: float, estimates: list[tuple[Tensor, Tensor]]) -> Tensor:
        """x at a fraction of the step: decay, weighted estimates, noise."""
        sigma_to, half_log_snr = self.place(fraction)
        alpha = sigma_to * half_log_snr.exp()
        x = self.x * float(sigma_to / self.sigma * (-fraction * self.h * self.eta).exp())
        (weight, estimate), *others = estimates
        mixed = estimate * float(weight)
        for weight, estimate in others:
            mixed = mixed + estimate * float(weight)
        x = x - mixed * float(alpha)
        if self.eta > 0 and self.s_noise > 0:
            x = x + self._noise_at(fraction, sigma_to) * float(sigma_to * self.s_noise)
        return x

    def _noise_at(self, fraction: float, sigma_to: Tensor) -> Tensor:
        decay = (self._reached - fraction) * self.h * self.eta
        share = float((2 * decay).expm1().neg().sqrt())
        fresh = self.run.draw(float(self._sigma), float(sigma_to)) * share
        if self._noise is not None:
            fresh = fresh + self._noise * float(decay.exp())
        self._noise, self._reached, self._sigma = fresh, fraction, sigma_to
        return fresh


@torch.no_grad()
def sample_seeds_2(
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
    solver_type: str = "phi_1",
) -> Tensor:
    """SEEDS-2: an intermediate level at the fraction r.

    Args:
        solver_type: "phi_1" combines the two estimates linearly, "phi_2" with the exact weights of
            a linear estimate.
    """
    if solver_type not in ("phi_1", "phi_2"):
        raise ValueError(f"unknown solver_type {solver_type!r}; known: phi_1, phi_2")
    run = Trajectory(
        model, sigmas, extra_args, callback, disable, finite_snr=True,
        distinct=solver_type == "phi_2",
    )  # fmt: skip
    run.use_noise(x, noise_sampler)
    levels = run.noisy
    lambdas = sigma_to_half_log_snr(levels, run.sampling)
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        if sigma_next == 0:
            x = denoised
            continue
        step = _Step(run, x, levels, lambdas, eta, s_noise)
        middle = step.advance(r, [((-r * step.h_eta).expm1(), denoised)])
        denoised_2 = run.denoise(middle, step.sigma_at(r), report=False)
        whole = (-step.h_eta).expm1()
        second = whole / (2 * r) if solver_type == "phi_1" else _h_phi_2(-step.h_eta) / r
        x = step.advance(1.0, [(whole - second, denoised), (second, denoised_2)])
    return x


@torch.no_grad()
def sample_exp_heun_2_x0(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    solver_type: str = "phi_2",
) -> Tensor:
    """Exponential Heun on the clean estimate, deterministic: SEEDS-2 with r = 1 and no noise."""
    return sample_seeds_2(
        model, x, sigmas, extra_args, callback, disable,
        eta=0.0, s_noise=0.0, r=1.0, solver_type=solver_type,
    )  # fmt: skip


@torch.no_grad()
def sample_exp_heun_2_x0_sde(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    eta: float = 1.0,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
    solver_type: str = "phi_2",
) -> Tensor:
    """Exponential Heun on the clean estimate with noise: SEEDS-2 with r = 1."""
    return sample_seeds_2(
        model, x, sigmas, extra_args, callback, disable, eta, s_noise, noise_sampler,
        r=1.0, solver_type=solver_type,
    )  # fmt: skip


@torch.no_grad()
def sample_seeds_3(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    eta: float = 1.0,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
    r_1: float = 1.0 / 3,
    r_2: float = 2.0 / 3,
) -> Tensor:
    """SEEDS-3: two intermediate levels at the fractions r_1 and r_2."""
    run = Trajectory(model, sigmas, extra_args, callback, disable, finite_snr=True, distinct=True)
    run.use_noise(x, noise_sampler)
    levels = run.noisy
    lambdas = sigma_to_half_log_snr(levels, run.sampling)
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        if sigma_next == 0:
            x = denoised
            continue
        step = _Step(run, x, levels, lambdas, eta, s_noise)
        stage = step.advance(r_1, [((-r_1 * step.h_eta).expm1(), denoised)])
        denoised_2 = run.denoise(stage, step.sigma_at(r_1), report=False)
        second = r_2 / r_1 * _h_phi_2(-r_2 * step.h_eta)
        first = (-r_2 * step.h_eta).expm1() - second
        stage = step.advance(r_2, [(first, denoised), (second, denoised_2)])
        denoised_3 = run.denoise(stage, step.sigma_at(r_2), report=False)
        third = _h_phi_2(-step.h_eta) / r_2
        first = (-step.h_eta).expm1() - third
        x = step.advance(1.0, [(first, denoised), (third, denoised_3)])
    return x
