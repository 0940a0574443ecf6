"""First-order solvers: one model evaluation a step, no memory of earlier ones."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from comfy.sampling.noise import NoiseSampler
from comfy.sampling.parameterisation import EXPLODING, split_ancestral
from comfy.sampling.solvers.cfg_pp import UnconditionalCapture
from comfy.sampling.solvers.tensor_forms import sigma_to_half_log_snr
from comfy.sampling.solvers.trajectory import Denoiser, StepCallback, Trajectory, churn, towards


@torch.no_grad()
def sample_euler(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    s_churn: float = 0.0,
    s_tmin: float = 0.0,
    s_tmax: float = math.inf,
    s_noise: float = 1.0,
) -> Tensor:
    """Explicit Euler steps on the probability-flow ODE, optionally with churn.

    Source: Karras et al. 2022, https://arxiv.org/abs/2206.00364, algorithm 2 without correction.
    """
    run = Trajectory(model, sigmas, extra_args, callback, disable)
    for sigma, sigma_next in run:
        x, sigma_hat = churn(x, sigma, run.steps, s_churn, s_tmin, s_tmax, s_noise)
        x = x + run.slope(x, sigma_hat) * (sigma_next - sigma_hat)
    return x


@torch.no_grad()
def sample_euler_ancestral(
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
    """Euler steps below the next level, then fresh noise up to it.

    A step that keeps none of the old noise (a high eta) adds no fresh one either, except in flow
    models: so are the pictures people have.
    Source: Song et al. 2020, https://arxiv.org/abs/2010.02502, in sigma; the flow split keeps the
    marginal of the straight path.
    """
    run = Trajectory(model, sigmas, extra_args, callback, disable)
    run.use_noise(x, noise_sampler)
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        if sigma_next == 0:
            x = denoised
            continue
        sigma_down, scale, sigma_up = run.path.ancestral_step(sigma, sigma_next, eta)
        if run.path is EXPLODING:
            if sigma_down == 0:
                x = denoised
                continue
            x = towards(denoised, x, sigma, sigma_down)
        else:
            x = (x * (sigma_down / sigma) + denoised * (1 - sigma_down / sigma)) * scale
        if eta > 0:
            x = x + run.draw(sigma, sigma_next) * (s_noise * sigma_up)
    return x


@torch.no_grad()
def sample_euler_ancestral_cfg_pp(
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
    """CFG++: land on the guided estimate, carry on along the unconditional noise direction.

    Source: Chung et al. 2024, https://arxiv.org/abs/2406.08070, algorithm 1, with DDIM's eta.
    """
    capture = UnconditionalCapture(extra_args)
    run = Trajectory(model, sigmas, capture.extra_args, callback, disable)
    run.use_noise(x, noise_sampler)
    # In the precision of the levels, as pictures were made: of an alpha of one the last digit is
    # a digit of the noise that a long step leaves.
    weights = run.noisy * sigma_to_half_log_snr(run.noisy, run.sampling).exp()
    alphas: list[float] = weights.tolist()
    exploding: list[float] = (run.noisy / weights).tolist()
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        if sigma_next == 0:
            x = denoised
            continue
        alpha, alpha_next = alphas[run.index : run.index + 2]
        noise_direction = (x - alpha * capture.denoised) / sigma
        if alpha_next == 0:  # a pure noise level repeated: nothing changes
            kept, fresh = sigma_next, 0.0
        elif alpha > 0:  # both levels as if the path were variance exploding
            split = split_ancestral(exploding[run.index], exploding[run.index + 1], eta)
            kept, fresh = (alpha_next * level for level in split)
        else:  # from pure noise, fresh noise replaces all of the old
            kept, fresh = (0.0, sigma_next) if eta > 0 else (sigma_next, 0.0)
        x = alpha_next * denoised + noise_direction * kept
        if eta > 0 and s_noise > 0:
            x = x + run.draw(sigma, sigma_next) * (s_noise * fresh)
    return x


@torch.no_grad()
def sample_euler_cfg_pp(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
) -> Tensor:
    """CFG++ without fresh noise (Chung et al. 2024)."""
    return sample_euler_ancestral_cfg_pp(
        model, x, sigmas, extra_args, callback, disable, eta=0.0, s_noise=0.0
    )


# Between these levels 1 / (1 + sigma^2) can be told from one and from zero in single precision.
UNIT_VARIANCE_LEVELS = (2.5e-4, 1e4)


@torch.no_grad()
def sample_ddpm(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    noise_sampler: NoiseSampler | None = None,
) -> Tensor:
    """Draws from the Gaussian posterior between two levels, as if variance exploding.

    Computed on the latent of unit variance, as in the paper and as pictures were made; near clean
    levels its rounding is a digit of the picture. Levels that leave it no digits are stepped
    through in sigma.

    Source: Ho et al. 2020, https://arxiv.org/abs/2006.11239, equations 6, 7 and 11.
    """
    run = Trajectory(model, sigmas, extra_args, callback, disable)
    run.use_noise(x, noise_sampler)
    table = run.sigmas.cpu()
    scale, alpha_bar = torch.sqrt(1 + table**2), 1 / (table * table + 1)
    low, high = UNIT_VARIANCE_LEVELS
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        if not low <= sigma <= high:
            sigma_down, to_levels, sigma_up = EXPLODING.ancestral_step(sigma, sigma_next, 1.0)
            x = denoised + (x - denoised) * (sigma_down / sigma)
        else:
            bar, bar_next = alpha_bar[run.index], alpha_bar[run.index + 1]
            alpha = bar / bar_next
            noise = (1 - alpha) * ((x - denoised) / sigma) / (1 - bar).sqrt()
            x = (1 / alpha).sqrt() * (x / scale[run.index] - noise)
            sigma_up = ((1 - alpha) * (1 - bar_next) / (1 - bar)).sqrt().item()
            to_levels = scale[run.index + 1].item()
        if sigma_next > 0:
            x = (x + run.draw(sigma, sigma_next) * sigma_up) * to_levels
    return x


@torch.no_grad()
def sample_lcm(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    noise_sampler: NoiseSampler | None = None,
) -> Tensor:
    """Multistep consistency sampling: jump to the clean estimate, noise it again.

    Source: Song et al. 2023, https://arxiv.org/abs/2303.01469, algorithm 1; Luo et al. 2023,
    https://arxiv.org/abs/2310.04378.
    """
    run = Trajectory(model, sigmas, extra_args, callback, disable)
    run.use_noise(x, noise_sampler)
    for sigma, sigma_next in run:
        x = run.denoise(x, sigma)
        if sigma_next > 0:
            drawn = run.draw(sigma, sigma_next)
            if run.sampling is None:
                x = x + drawn * sigma_next
            else:  # asked, not computed from the path: custom kinds mix in ways of their own
                x = run.sampling.noise_scaling(x.new_tensor(sigma_next), drawn, x)
    return x


def _gradient_estimation(run: Trajectory, x: Tensor, gamma: float, capture: Any) -> Tensor:
    previous: Tensor | None = None
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        origin = denoised if capture is None else capture.denoised
        slope = (x - origin) / sigma
        if sigma_next == 0:
            x = denoised
            continue
        x = x + slope * (sigma_next - sigma) if capture is None else denoised + slope * sigma_next
        if previous is not None:
            x = x + (slope - previous) * ((gamma - 1) * (sigma_next - sigma))
        previous = slope
    return x


@torch.no_grad()
def sample_gradient_estimation(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    ge_gamma: float = 2.0,
) -> Tensor:
    """Euler steps along a slope extrapolated from the last two.

    Source: Permenter and Yuan 2023, https://arxiv.org/abs/2306.04848, algorithm 1.
    """
    run = Trajectory(model, sigmas, extra_args, callback, disable)
    return _gradient_estimation(run, x, ge_gamma, None)


@torch.no_grad()
def sample_gradient_estimation_cfg_pp(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    ge_gamma: float = 2.0,
) -> Tensor:
    """Gradient estimation with CFG++: slopes point away from the unconditional estimate."""
    capture = UnconditionalCapture(extra_args)
    run = Trajectory(model, sigmas, capture.extra_args, callback, disable)
    return _gradient_estimation(run, x, ge_gamma, capture)
