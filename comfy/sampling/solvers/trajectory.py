"""The loop every solver runs in: levels, progress, cancellation, model calls and step noise.

A solver iterates a `Trajectory` and asks it for the clean estimate at a level. Levels are plain
floats (one transfer from the device at the start, none per step); only latents are tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import trange

from comfy.interrupt import throw_exception_if_processing_interrupted
from comfy.sampling import checks, noise
from comfy.sampling.parameterisation import EXPLODING, NoisePath

Denoiser = Callable[..., Tensor]
"""model(x, sigma [B], **extra_args) -> denoised, shaped like x."""
StepCallback = Callable[[dict[str, Any]], None]
"""Called once a step with x, i, total (steps), sigma, sigma_hat and denoised."""

# Flow models hold no signal at sigma = 1, where the half-log-SNR is -infinity; solvers that work in
# it start this far into the sampling instead.
FINITE_SNR_PERCENT = 1e-4

# The highest level of any model is 4,519, of Stable Diffusion with zero terminal SNR.
HIGHEST_OF_MODELS = 1e4

# Drawing the console bar takes as long as the small operations of half a step.
CONSOLE_INTERVAL_S = 0.5


def sampling_of(model: Any) -> Any | None:
    """The sampling object at the end of a model's `inner_model` chain, or None."""
    base = getattr(getattr(model, "inner_model", None), "inner_model", None)
    return getattr(base, "model_sampling", None)


class Trajectory:
    """One pass over the noise levels.

    Args:
        model: The denoiser. With the chain `inner_model.inner_model.model_sampling` it decides
            which noise path the levels belong to; without one they are variance exploding.
        sigmas: [steps + 1], descending standard deviations; may end in 0.
        extra_args: Passed on to every model call; `seed` also seeds the step noise.
        callback: See `StepCallback`.
        disable: No console progress bar.
        finite_snr: Lower a first level without any signal to one that has a finite SNR.
        distinct: Leave out levels that repeat the one before them. Solvers that divide by the
            length of a step need it; the others keep such steps, which change nothing but draw
            noise, as users' seeds expect. A repeated clean level is left out for all.
    """

    def __init__(
        self,
        model: Denoiser,
        sigmas: Tensor,
        extra_args: dict[str, Any] | None = None,
        callback: StepCallback | None = None,
        disable: bool | None = None,
        finite_snr: bool = False,
        distinct: bool = False,
    ) -> None:
        self.model = model
        self.extra_args = {} if extra_args is None else extra_args
        self.callback, self.disable = callback, disable
        self.sampling = sampling_of(model)
        self.path: NoisePath = getattr(self.sampling, "path", EXPLODING)
        sigmas = checks.levels_of(sigmas)
        self.levels: list[float] = sigmas.tolist()
        checks.check_sigmas(self.levels)
        kept = [place for place in range(len(self.levels)) if self._is_step(place, distinct)]
        if len(kept) < len(self.levels):
            sigmas, self.levels = sigmas[kept], [self.levels[place] for place in kept]
        self.sigmas = sigmas
        self.index = 0
        self._noise_sampler: noise.NoiseSampler | None = None
        if (
            finite_snr
            and self.sampling is not None
            and len(self.levels) > 1
            and self.path.half_log_snr(self.levels[0]) == -float("inf")
        ):
            self.sigmas = sigmas.clone()
            lowered = self.sampling.percent_to_sigma(FINITE_SNR_PERCENT)
            # Of very many steps the second may begin higher still.
            self.sigmas[0] = max(lowered, (1 + self.levels[1]) / 2)
            self.levels[0] = self.sigmas[0].item()

    def _is_step(self, place: int, distinct: bool) -> bool:
        """Whether a level is to be stepped to."""
        level = self.levels[place]
        return place == 0 or level != self.levels[place - 1] or not (distinct or level == 0)

    @property
    def steps(self) -> int:
        return len(self.levels) - 1

    @property
    def noisy(self) -> Tensor:
        """Levels above zero, on the CPU.

        Solvers compute the factors of all steps from them at once, in their precision and with its
        rounding, as pictures were made: in short steps a difference of two terms is so small that
        the rounding of either is a digit of the picture. Where different levels have the same
        logarithm, all are given in double precision.
        """
        levels = self.sigmas[self.sigmas > 0].cpu()
        is_told = (levels.log().diff() != 0) | (levels.diff() == 0)
        return levels if bool(is_told.all()) else levels.double()

    @property
    def seed(self) -> int | None:
        return self.extra_args.get("seed")

    def __iter__(self) -> Iterator[tuple[float, float]]:
        """Pairs (sigma, sigma_next); `index` is the number of the step."""
        for index in trange(self.steps, disable=self.disable, mininterval=CONSOLE_INTERVAL_S):
            self.index = index
            throw_exception_if_processing_interrupted()
            yield self.levels[index], self.levels[index + 1]

    def denoise(self, x: Tensor, sigma: float, report: bool = True) -> Tensor:
        """Clean estimate of x [B, ...] at level sigma; `report` hands it to the callback."""
        throw_exception_if_processing_interrupted()
        denoised = self.model(x, x.new_full((x.shape[0],), sigma), **self.extra_args)
        if report:
            self.report(x, denoised, sigma)
        return denoised

    def report(self, x: Tensor, denoised: Tensor, sigma_hat: float | None = None) -> None:
        """Tell the callback about the current step."""
        if self.callback is not None:
            sigma = self.sigmas[self.index]
            is_level = sigma_hat is None or sigma_hat == self.levels[self.index]
            hat = sigma if is_level else sigma.new_tensor(sigma_hat)
            self.callback(
                {
                    "x": x,
                    "i": self.index,
                    "sigma": sigma,
                    "sigma_hat": hat,
                    "denoised": denoised,
                    "total": self.steps,
                }
            )

    def slope(self, x: Tensor, sigma: float, report: bool = True) -> Tensor:
        """dx / dsigma of the probability-flow ODE: (x - denoised) / sigma."""
        return (x - self.denoise(x, sigma, report)) / sigma

    def use_noise(self, x: Tensor, sampler: noise.NoiseSampler | None) -> None:
        """Choose the step noise: the given sampler, or the default one for this run's seed."""
        checks.check_descending(self.levels)
        self._noise_sampler = sampler or noise.default_noise_sampler(x, seed=self.seed)

    def use_brownian_noise(
        self, x: Tensor, sampler: noise.NoiseSampler | None, sigmas: Tensor, cpu: bool = True
    ) -> None:
        """Choose the step noise: the given sampler, or a Brownian tree over `sigmas`."""
        checks.check_descending(self.levels)
        sigmas = checks.levels_of(sigmas)
        if sampler is None and bool((sigmas > 0).any()):
            sampler = noise.brownian_noise(x, sigmas, self.seed, cpu=cpu)
        self._noise_sampler = sampler

    def prepare_draw(self, sigma: float, sigma_next: float) -> None:
        """Say before a model call which noise is drawn after it: a Brownian tree begins with it."""
        prepare = getattr(self._noise_sampler, "prepare", None)
        if prepare is not None:
            prepare(torch.tensor(sigma), torch.tensor(sigma_next))

    def draw(self, sigma: float, sigma_next: float) -> Tensor:
        """Unit noise for the step between two levels."""
        if self._noise_sampler is None:
            raise RuntimeError("step noise was not chosen: call use_noise before the first draw")
        return self._noise_sampler(torch.tensor(sigma), torch.tensor(sigma_next))


def towards(denoised: Tensor, x: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """Euler step from sigma to a lower level.

    A long step from a level far above the latent's own size takes off nearly all of x, and what
    rounding leaves is a digit of the picture: so the order is that of pictures so far, also where
    the end is known to be the estimate. Above the levels of models nothing but rounding is left.
    """
    if sigma_next == 0 and sigma > HIGHEST_OF_MODELS:
        return denoised
    return x + (x - denoised) / sigma * (sigma_next - sigma)


def churn(
    x: Tensor,
    sigma: float,
    steps: int,
    s_churn: float,
    s_tmin: float,
    s_tmax: float,
    s_noise: float,
) -> tuple[Tensor, float]:
    """Raise the noise level a little before a step.

    Noise comes from the global generator, as users' seeds expect.

    Returns:
        (x at the raised level, the raised level); both unchanged where there is nothing to add.
    Source: Karras et al. 2022, https://arxiv.org/abs/2206.00364, algorithm 2.
    """
    if s_churn <= 0 or not s_tmin <= sigma <= s_tmax:
        return x, sigma
    level = torch.tensor(sigma)  # in single precision, as pictures were made
    raised = level * (1 + min(s_churn / steps, 2**0.5 - 1))
    added = torch.randn_like(x) * s_noise * (raised**2 - level**2) ** 0.5
    return x + added, raised.item()
