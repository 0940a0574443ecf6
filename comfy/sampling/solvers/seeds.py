"""Stochastic exponential integrators with two or three evaluations a step.

The noise of the stages is one Wiener path: each stage carries the previous one's noise on and adds
the part of its own interval.
Source: Gonzalez et al. 2023, https://arxiv.org/abs/2305.14267 (SEEDS), for the data prediction; the
second-order weights are those of Hochbruck and Ostermann 2005.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comfy.sampling.noise import NoiseSampler
from comfy.sampling.solvers.tensor_forms import (
    ei_h_phi_1,
    ei_h_phi_2,
    half_log_snr_to_sigma,
    sigma_to_half_log_snr,
)
from comfy.sampling.solvers.trajectory import Denoiser, StepCallback, Trajectory


class _Stage:
    """Factors of one stage, for each step between levels above zero.

    They have the precision of the levels and its rounding, as pictures were made.

    Args:
        levels, lambdas: Levels above zero of a run and their half-log-SNRs.
        fraction, before: Where in the step the stage lies, and where the stage before it; None is
            the end of the step. The level of a stage at the fraction 1 is computed like any other:
            it may be the next digit to that end, which a mask with a threshold in time sees.
        eta: Share of the reverse SDE's noise; 0 is deterministic.

    Attributes:
        sigmas, alphas: Levels of the stage and their weights of the clean latent.
        kept: What is left of x.
        carried, fresh: Parts of the noise gathered before and of a new draw in the noise.
    """

    def __init__(
        self, run: Trajectory, levels: Tensor, lambdas: Tensor, fraction: float | None,
        before: float, eta: float,
    ) -> None:  # fmt: skip
        h = lambdas.diff()
        if fraction is None:
            fraction, reached, half_log_snr = 1.0, levels[1:], lambdas[1:]
        else:
            half_log_snr = torch.lerp(lambdas[:-1], lambdas[1:], fraction)
            reached = half_log_snr_to_sigma(half_log_snr, run.sampling)
        decay = (before - fraction) * h * eta
        self.sigmas: list[float] = reached.tolist()
        self.alphas: list[float] = (reached * half_log_snr.exp()).tolist()
        self.kept: list[float] = (reached / levels[:-1] * (-fraction * h * eta).exp()).tolist()
        self.carried: list[float] = decay.exp().tolist()
        self.fresh: list[float] = (2 * decay).expm1().neg().sqrt().tolist()


class _Stages:
    """The stages of each step of a run, with the noise gathered so far in a step.

    Args:
        fractions: Where the stages lie in a step; one more is its end.
        eta, s_noise: Share of the reverse SDE's noise, and its factor; 0 draws none.

    Attributes:
        h_eta: Lengths of the steps in half-log-SNR, with the share of the noise.
    """

    def __init__(
        self, run: Trajectory, fractions: Sequence[float], eta: float, s_noise: float
    ) -> None:
        self.run, self.s_noise, self.adds_noise = run, s_noise, eta > 0 and s_noise > 0
        levels = run.noisy
        lambdas = sigma_to_half_log_snr(levels, run.sampling)
        self.h_eta = lambdas.diff() * (eta + 1)
        self.stages = [
            _Stage(run, levels, lambdas, fraction, before, eta)
            for before, fraction in zip((0.0, *fractions), (*fractions, None))
        ]
        self._noise: Tensor | None = None

    def sigma(self, stage: int) -> float:
        """Level of a stage of the current step."""
        return self.stages[stage].sigmas[self.run.index]

    def advance(self, stage: int, x: Tensor, estimates: list[tuple[list[float], Tensor]]) -> Tensor:
        """The latent at a stage, from x at the start of the step: decay, estimates, noise."""
        i, at = self.run.index, self.stages[stage]
        (weights, estimate), *others = estimates
        mixed = estimate * weights[i]
        for weights, estimate in others:
            mixed = mixed + estimate * weights[i]
        made = x * at.kept[i] - mixed * at.alphas[i]
        if self.adds_noise:
            before = self.sigma(stage - 1) if stage else self.run.levels[i]
            noise = self.run.draw(before, at.sigmas[i]) * at.fresh[i]
            if stage and self._noise is not None:
                noise = noise + self._noise * at.carried[i]
            self._noise = noise
            made = made + noise * (at.sigmas[i] * self.s_noise)
        return made


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
    stages = _Stages(run, (r,), eta, s_noise)
    h = -stages.h_eta
    first: list[float] = (r * h).expm1().tolist()
    second = ei_h_phi_1(h) / (2 * r) if solver_type == "phi_1" else ei_h_phi_2(h) / r
    shares: tuple[list[float], list[float]] = ((h.expm1() - second).tolist(), second.tolist())
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        if sigma_next == 0:
            x = denoised
            continue
        middle = stages.advance(0, x, [(first, denoised)])
        denoised_2 = run.denoise(middle, stages.sigma(0), report=False)
        x = stages.advance(1, x, [(shares[0], denoised), (shares[1], denoised_2)])
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
    stages = _Stages(run, (r_1, r_2), eta, s_noise)
    h = -stages.h_eta
    second, third = r_2 / r_1 * ei_h_phi_2(r_2 * h), ei_h_phi_2(h) / r_2
    to_1: list[float] = (r_1 * h).expm1().tolist()
    to_2: list[list[float]] = [((r_2 * h).expm1() - second).tolist(), second.tolist()]
    to_end: list[list[float]] = [(h.expm1() - third).tolist(), third.tolist()]
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        if sigma_next == 0:
            x = denoised
            continue
        stage = stages.advance(0, x, [(to_1, denoised)])
        denoised_2 = run.denoise(stage, stages.sigma(0), report=False)
        stage = stages.advance(1, x, [(to_2[0], denoised), (to_2[1], denoised_2)])
        denoised_3 = run.denoise(stage, stages.sigma(1), report=False)
        x = stages.advance(2, x, [(to_end[0], denoised), (to_end[1], denoised_3)])
    return x
