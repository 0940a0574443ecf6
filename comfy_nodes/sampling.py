"""Nodes that denoise: sampler and scheduler by name."""

from __future__ import annotations

from typing import Any

import latent_preview
from comfy import progress
from comfy.sampling import noise as noise_source
from comfy.sampling import run
from comfy.sampling.samplers import KSampler as SamplerFront
from comfy_nodes.conditioning import Conditioning
from comfy_nodes.latent_basics import Latent

LARGEST_SEED = 0xFFFFFFFFFFFFFFFF
LAST_STEP = 10000


def common_ksampler(
    model: Any,
    seed: int,
    steps: int,
    cfg: float,
    sampler_name: str,
    scheduler: str,
    positive: Conditioning,
    negative: Conditioning,
    latent: Latent,
    denoise: float = 1.0,
    disable_noise: bool = False,
    start_step: int | None = None,
    last_step: int | None = None,
    force_full_denoise: bool = False,
) -> tuple[Latent]:
    """Samples a latent: noise from the seed, previews on the way, everything else of the latent
    kept.

    Args:
        model: Model patcher.
        denoise: Part of the noise schedule that is run, 1 from pure noise.
        disable_noise: The latent already carries noise; add none.
        start_step: First step of the schedule to run.
        last_step: Step to stop before.
        force_full_denoise: Make the last step end without noise, wherever it lies.
    """
    samples = run.fix_empty_latent_channels(
        model, latent["samples"], latent.get("downscale_ratio_spacial")
    )
    if disable_noise:
        noise = noise_source.empty_noise(samples)
    else:
        noise = noise_source.prepare_noise(samples, seed, latent.get("batch_index"))
    result = run.sample(
        model,
        noise,
        steps,
        cfg,
        sampler_name,
        scheduler,
        positive,
        negative,
        samples,
        denoise=denoise,
        disable_noise=disable_noise,
        start_step=start_step,
        last_step=last_step,
        force_full_denoise=force_full_denoise,
        noise_mask=latent.get("noise_mask"),
        callback=latent_preview.prepare_callback(model, steps),
        disable_pbar=not progress.PROGRESS_BAR_ENABLED,
        seed=seed,
    )
    return ({**latent, "samples": result},)


def seed_input() -> tuple[str, dict[str, Any]]:
    """Declaration of a seed with the editor's control for the next one."""
    tooltip = "Start of the random numbers. The same seed gives the same picture."
    options = {"default": 0, "min": 0, "max": LARGEST_SEED, "control_after_generate": True}
    return ("INT", {**options, "tooltip": tooltip})


def steps_input() -> tuple[str, dict[str, Any]]:
    """Declaration of the number of steps."""
    tooltip = "How many steps the denoising takes."
    return ("INT", {"default": 20, "min": 1, "max": LAST_STEP, "tooltip": tooltip})


def cfg_input() -> tuple[str, dict[str, Any]]:
    """Declaration of the guidance scale."""
    tooltip = "How closely the text is followed. Too high values burn the picture."
    options = {"default": 8.0, "min": 0.0, "max": 100.0, "step": 0.1, "round": 0.01}
    return ("FLOAT", {**options, "tooltip": tooltip})


class KSampler:
    """Denoises a latent in one go."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        denoise = {
            "default": 1.0,
            "min": 0.0,
            "max": 1.0,
            "step": 0.01,
            "tooltip": "How much is made anew. Below 1 the given latent shows through.",
        }
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "Model that denoises."}),
                "seed": seed_input(),
                "steps": steps_input(),
                "cfg": cfg_input(),
                "sampler_name": (SamplerFront.SAMPLERS, {"tooltip": "Rule for one step."}),
                "scheduler": (
                    SamplerFront.SCHEDULERS,
                    {"tooltip": "How noise falls over the steps."},
                ),
                "positive": ("CONDITIONING", {"tooltip": "What the picture should show."}),
                "negative": ("CONDITIONING", {"tooltip": "What it should not show."}),
                "latent_image": ("LATENT", {"tooltip": "Latent to start from."}),
                "denoise": ("FLOAT", denoise),
            }
        }

    RETURN_TYPES = ("LATENT",)
    OUTPUT_TOOLTIPS = ("The denoised latent.",)
    FUNCTION = "sample"
    CATEGORY = "sampling"
    DESCRIPTION = "Denoises a latent with the model, guided by the conditionings."

    def sample(
        self,
        model: Any,
        seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        positive: Conditioning,
        negative: Conditioning,
        latent_image: Latent,
        denoise: float = 1.0,
    ) -> tuple[Latent]:
        """Runs `common_ksampler` over the whole schedule."""
        return common_ksampler(
            model,
            seed,
            steps,
            cfg,
            sampler_name,
            scheduler,
            positive,
            negative,
            latent_image,
            denoise=denoise,
        )


class KSamplerAdvanced:
    """Denoises part of the schedule."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "add_noise": (["enable", "disable"],),
                "noise_seed": seed_input(),
                "steps": steps_input(),
                "cfg": cfg_input(),
                "sampler_name": (SamplerFront.SAMPLERS,),
                "scheduler": (SamplerFront.SCHEDULERS,),
                "positive": ("CONDITIONING",),
                "negative": ("CONDITIONING",),
                "latent_image": ("LATENT",),
                "start_at_step": ("INT", {"default": 0, "min": 0, "max": LAST_STEP}),
                "end_at_step": ("INT", {"default": LAST_STEP, "min": 0, "max": LAST_STEP}),
                "return_with_leftover_noise": (["disable", "enable"],),
            }
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "sample"
    CATEGORY = "sampling"

    def sample(
        self,
        model: Any,
        add_noise: str,
        noise_seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        positive: Conditioning,
        negative: Conditioning,
        latent_image: Latent,
        start_at_step: int,
        end_at_step: int,
        return_with_leftover_noise: str,
        denoise: float = 1.0,
    ) -> tuple[Latent]:
        """Runs `common_ksampler` over some steps, so that another node can go on from there."""
        return common_ksampler(
            model,
            noise_seed,
            steps,
            cfg,
            sampler_name,
            scheduler,
            positive,
            negative,
            latent_image,
            denoise=denoise,
            disable_noise=add_noise == "disable",
            start_step=start_at_step,
            last_step=end_at_step,
            force_full_denoise=return_with_leftover_noise != "enable",
        )


NODE_CLASS_MAPPINGS: dict[str, type] = {
    "KSampler": KSampler,
    "KSamplerAdvanced": KSamplerAdvanced,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {
    "KSampler": "KSampler",
    "KSamplerAdvanced": "KSampler (Advanced)",
}
