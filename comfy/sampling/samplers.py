"""Sampler objects, which carry a solver through a guided and possibly masked run, and the KSampler
front end that picks schedule and solver by name."""
# ruff: noqa: ARG001, ARG002

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from comfy.sampling import checks, guidance, noise, schedules, solvers

StepReport = Callable[[int, Tensor, Tensor, int], None]
"""callback(step, denoised, x, total_steps)."""


class KSamplerX0Inpaint:
    """Denoiser that keeps the unmasked part of the latent.

    Before each call the known region is replaced by the given latent at the current noise level,
    and after it by the latent itself.

    Args:
        model: A guider.
        sigmas: Levels of the run, for `denoise_mask_function`.
    """

    latent_image: Any  # a tensor; None only in runs without a mask
    noise: Tensor

    def __init__(self, model: Any, sigmas: Tensor) -> None:
        self.inner_model = model
        self.sigmas = sigmas

    def __call__(
        self,
        x: Tensor,
        sigma: Tensor,
        denoise_mask: Tensor | None,
        model_options: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> Tensor:
        options = model_options or {}
        if denoise_mask is None:
            return self.inner_model(x, sigma, model_options=options, seed=seed)
        if "denoise_mask_function" in options:
            facts = {"model": self.inner_model, "sigmas": self.sigmas}
            denoise_mask = options["denoise_mask_function"](
                sigma, denoise_mask, extra_options=facts
            )
        known = self.inner_model.inner_model.scale_latent_inpaint(
            x=x, sigma=sigma, noise=self.noise, latent_image=self.latent_image
        )
        x = x * denoise_mask + known * (1.0 - denoise_mask)
        out = self.inner_model(x, sigma, model_options=options, seed=seed)
        return out * denoise_mask + self.latent_image * (1.0 - denoise_mask)


class Sampler:
    """Base of sampler objects: subclasses implement `sample`."""

    def sample(
        self,
        model_wrap: Any,
        sigmas: Tensor,
        extra_args: dict[str, Any],
        callback: StepReport | None,
        noise: Tensor,
        latent_image: Tensor | None = None,
        denoise_mask: Tensor | None = None,
        disable_pbar: bool = False,
    ) -> Tensor:
        """Latent after the last level; see `KSAMPLER.sample`."""
        raise TypeError(f"{type(self).__name__} does not implement sample()")

    def max_denoise(self, model_wrap: Any, sigmas: Tensor) -> bool:
        """Whether the run starts at (or above) the model's highest noise level."""
        highest = float(model_wrap.inner_model.model_sampling.sigma_max)
        first = float(sigmas[0])
        return math.isclose(highest, first, rel_tol=1e-05) or first > highest


class KSAMPLER(Sampler):
    """A solver function with its options.

    Args:
        sampler_function: fn(model, x, sigmas, extra_args=, callback=, disable=, **options).
        extra_options: Options passed to every call.
        inpaint_options: `random`: noise the known region with a draw of its own.
    """

    def __init__(
        self,
        sampler_function: Callable[..., Tensor],
        extra_options: dict[str, Any] | None = None,
        inpaint_options: dict[str, Any] | None = None,
    ) -> None:
        self.sampler_function = sampler_function
        self.extra_options = extra_options or {}
        self.inpaint_options = inpaint_options or {}

    def sample(
        self,
        model_wrap: Any,
        sigmas: Tensor,
        extra_args: dict[str, Any],
        callback: StepReport | None,
        noise: Tensor,
        latent_image: Tensor | None = None,
        denoise_mask: Tensor | None = None,
        disable_pbar: bool = False,
    ) -> Tensor:
        """Mix noise and latent at the first level, run the solver, unmix at the last.

        Args:
            model_wrap: A guider whose `inner_model` is loaded.
            sigmas: [steps + 1], descending.
            extra_args: `model_options` and `seed`; `denoise_mask` is added.
            noise: Unit noise like the latent.
            latent_image: In the network's scale.
            denoise_mask: Like the latent, or None.
        """
        extra_args["denoise_mask"] = denoise_mask
        sigmas = checks.levels_of(sigmas).clone()  # a solver may move its last level
        model_k = KSamplerX0Inpaint(model_wrap, sigmas)
        model_k.latent_image = latent_image
        model_k.noise = self._known_region_noise(noise, extra_args.get("seed"))
        sampling = model_wrap.inner_model.model_sampling
        x = sampling.noise_scaling(
            sigmas[0], noise, latent_image, self.max_denoise(model_wrap, sigmas)
        )
        samples = self.sampler_function(
            model_k, x, sigmas, extra_args=extra_args,
            callback=_step_callback(callback, len(sigmas) - 1), disable=disable_pbar,
            **self.extra_options,
        )  # fmt: skip
        return sampling.inverse_noise_scaling(sigmas[-1], samples)

    def _known_region_noise(self, start_noise: Tensor, seed: int | None) -> Tensor:
        if not self.inpaint_options.get("random", False):
            return start_noise
        generator = noise.seed_global_generator((41 if seed is None else seed) + 1)
        drawn = torch.randn(start_noise.shape, generator=generator, device="cpu")
        return drawn.to(start_noise)


def _step_callback(
    callback: StepReport | None, total_steps: int
) -> Callable[[dict[str, Any]], None] | None:
    """A solver's callback that reports to a node's; a solver may know better how many steps it
    takes than the number of levels says."""
    if callback is None:
        return None
    return lambda step: callback(
        step["i"], step["denoised"], step["x"], step.get("total", total_steps)
    )


def ksampler(
    sampler_name: str,
    extra_options: dict[str, Any] | None = None,
    inpaint_options: dict[str, Any] | None = None,
) -> KSAMPLER:
    """Sampler object of a solver by name, with options.

    Raises:
        ValueError: no solver has the name.
    """
    row = solvers.find(sampler_name)
    return KSAMPLER(
        row.function,
        {**row.options, **(extra_options or {})},
        {**row.inpaint_options, **(inpaint_options or {})},
    )


def sampler_object(name: str) -> KSAMPLER:
    """Sampler object of a KSampler menu name."""
    return ksampler(name)


def sample(
    model: Any,
    noise: Any,
    positive: Any,
    negative: Any,
    cfg: float,
    device: Any,
    sampler: Any,
    sigmas: Tensor,
    model_options: dict[str, Any] | None = None,
    latent_image: Any = None,
    denoise_mask: Any = None,
    callback: StepReport | None = None,
    disable_pbar: bool = False,
    seed: int | None = None,
) -> Any:
    """One run with classifier-free guidance; the device is the model's own."""
    guider = guidance.CFGGuider(model)
    guider.set_conds(positive, negative)
    guider.set_cfg(cfg)
    return guider.sample(
        noise, latent_image, sampler, sigmas, denoise_mask, callback, disable_pbar, seed
    )


SAMPLER_NAMES: list[str] = list(solvers.MENU_NAMES)
# Those that are functions `sample_<name>` of the public module of solvers; packs make menus of it.
KSAMPLER_NAMES: list[str] = [
    name for name in SAMPLER_NAMES if name not in ("ddim", "uni_pc", "uni_pc_bh2")
]


class KSampler:
    """Schedule and solver by name for one model: what the KSampler nodes run.

    Args:
        model: A MODEL.
        steps: Steps that are run.
        device: Accepted for compatibility; a model knows its device.
        sampler: A name of `SAMPLERS`.
        scheduler: A name of `SCHEDULERS`.
        denoise: Share 0..1 of the schedule that is run; None for all.
        model_options: Accepted for compatibility.
    Raises:
        ValueError: an unknown sampler or scheduler.
    """

    SCHEDULERS = schedules.SCHEDULER_NAMES
    SAMPLERS = SAMPLER_NAMES
    # Their last step would start next to zero: they run on a schedule one step longer without its
    # second-to-last level.
    DISCARD_PENULTIMATE_SIGMA_SAMPLERS: ClassVar = {
        "dpm_2",
        "dpm_2_ancestral",
        "uni_pc",
        "uni_pc_bh2",
    }

    def __init__(
        self,
        model: Any,
        steps: int,
        device: Any,
        sampler: str | None = None,
        scheduler: str | None = None,
        denoise: float | None = None,
        model_options: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.scheduler = self.SCHEDULERS[0] if scheduler is None else scheduler
        self.sampler = self.SAMPLERS[0] if sampler is None else sampler
        self.denoise = denoise
        self.model_options = model_options or {}
        solvers.find(self.sampler)
        self.set_steps(steps, denoise)

    def calculate_sigmas(self, steps: int) -> Tensor:
        """Whole schedule of a number of steps for this model and sampler."""
        discard = self.sampler in self.DISCARD_PENULTIMATE_SIGMA_SAMPLERS
        sampling = self.model.get_model_object("model_sampling")
        sigmas = schedules.calculate_sigmas(sampling, self.scheduler, steps + discard)
        return torch.cat([sigmas[:-2], sigmas[-1:]]) if discard else sigmas

    def set_steps(self, steps: int, denoise: float | None = None) -> None:
        """Choose the steps and their share of the schedule."""
        self.steps = steps
        self.sigmas = schedules.sigmas_for_denoise(self.calculate_sigmas, steps, denoise)

    def sample(
        self,
        noise: Any,
        positive: Any,
        negative: Any,
        cfg: float,
        latent_image: Any = None,
        start_step: int | None = None,
        last_step: int | None = None,
        force_full_denoise: bool = False,
        denoise_mask: Any = None,
        sigmas: Tensor | None = None,
        callback: StepReport | None = None,
        disable_pbar: bool = False,
        seed: int | None = None,
    ) -> Any:
        """Run the steps from start_step to last_step; nothing to run returns the latent.

        Args:
            force_full_denoise: End a run that stops early at the clean level.
        """
        levels = self.sigmas if sigmas is None else checks.levels_of(sigmas)
        if last_step is not None and last_step < len(levels) - 1:
            levels = levels[: last_step + 1].clone()
            if force_full_denoise:
                levels[-1] = 0
        if start_step is not None:
            levels = levels[start_step:] if start_step < len(levels) - 1 else levels[:0]
        if len(levels) < 2:
            return torch.zeros_like(noise) if latent_image is None else latent_image
        return sample(
            self.model, noise, positive, negative, cfg, self.device, sampler_object(self.sampler),
            levels, self.model_options, latent_image=latent_image, denoise_mask=denoise_mask,
            callback=callback, disable_pbar=disable_pbar, seed=seed,
        )  # fmt: skip
