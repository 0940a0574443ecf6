"""Extended reverse-time SDE solvers, of order one to three.

They work in ``level = sigma / alpha``. A noise scaler phi(level) chooses the SDE: the share
r = phi(next) / phi(now) of x is kept, the rest is replaced by the estimate and fresh noise.
Source: Cui et al. 2023, https://arxiv.org/abs/2309.06169, algorithms 1 to 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from comfy.sampling.noise import NoiseSampler
from comfy.sampling.solvers.tensor_forms import sigma_to_half_log_snr
from comfy.sampling.solvers.trajectory import Denoiser, StepCallback, Trajectory

# The integrals over 1 / phi are left Riemann sums with this many points, as in the paper's code.
INTEGRATION_POINTS = 200

NoiseScaler = Callable[[Tensor], Tensor]
"""phi, elementwise on levels."""


def default_noise_scaler(level: Tensor) -> Tensor:
    """phi of ER-SDE 5: level * (exp(level^0.3) + 10)."""
    return level * ((level**0.3).exp() + 10.0)


@torch.no_grad()
def sample_er_sde(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
    noise_scaler: NoiseScaler | None = None,
    max_stage: int = 3,
) -> Tensor:
    """Steps of up to `max_stage` estimates: constant, linear, quadratic in the level."""
    run = Trajectory(model, sigmas, extra_args, callback, disable, finite_snr=True, distinct=True)
    run.use_noise(x, noise_sampler)
    scaler = noise_scaler or default_noise_scaler
    noisy = run.noisy
    levels = sigma_to_half_log_snr(noisy, run.sampling).neg().exp()
    alphas = noisy / levels
    previous: Tensor | None = None
    previous_slope: Tensor | None = None
    for sigma, sigma_next in run:
        i = run.index
        denoised = run.denoise(x, sigma)
        if sigma_next == 0:
            x = denoised
            continue
        now, after, alpha = levels[i], levels[i + 1], alphas[i + 1]
        scale_after = scaler(after)
        kept = scale_after / scaler(now)
        x = x * (alpha / alphas[i] * kept) + denoised * (alpha * (1 - kept))
        if previous is not None and max_stage >= 2:
            first, second = _scaler_integrals(scaler, now, after)
            slope = (denoised - previous) / (now - levels[i - 1])
            x = x + slope * (alpha * (after - now + first * scale_after))
            if previous_slope is not None and max_stage >= 3:
                bend = (slope - previous_slope) / ((now - levels[i - 2]) / 2)
                x = x + bend * (alpha * ((after - now) ** 2 / 2 + second * scale_after))
            previous_slope = slope
        if s_noise > 0:
            variance = after**2 - now**2 * kept**2
            noise = run.draw(sigma, sigma_next)
            x = x + noise * (alpha * s_noise * variance.clamp(min=0).sqrt())
        previous = denoised
    return x


def _scaler_integrals(scaler: NoiseScaler, now: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Sums for the integrals of 1 / phi and of (level - now) / phi from `after` up to `now`."""
    width = (now - after) / INTEGRATION_POINTS
    points = after + torch.arange(INTEGRATION_POINTS, dtype=now.dtype) * width
    scaled = scaler(points)
    return (1 / scaled).sum() * width, ((points - now) / scaled).sum() * width
