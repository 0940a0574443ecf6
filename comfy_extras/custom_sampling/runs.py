"""Nodes that run a sampler with noise, a guider and noise levels made by other nodes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import latent_preview
from comfy import progress
from comfy.devices import placement
from comfy.nested_tensor import NestedTensor
from comfy.sampling import checks, run
from comfy_api.latest import io
from comfy_extras.custom_sampling.guiders import BasicGuider, CFGGuider, DualCFGGuider, cfg_input
from comfy_extras.custom_sampling.noise import (
    AddNoise,
    DisableNoise,
    Latent,
    Noise_EmptyNoise,
    Noise_RandomNoise,
    RandomNoise,
)
from comfy_nodes.latent_basics import replaced
from comfy_nodes.sampling import LARGEST_SEED


def both_outputs() -> list[io.Output]:
    """Declarations of the latent as it ended and of its last clean estimate."""
    return [
        io.Latent.Output(display_name="output"),
        io.Latent.Output(display_name="denoised_output"),
    ]


def finished(latent: Latent, samples: Tensor, kept: dict[str, Tensor], model: Any) -> io.NodeOutput:
    """Both outputs: the latent, and the last clean estimate in the autoencoder's scale."""
    out = replaced(latent, samples)
    denoised = out
    if "x0" in kept:
        estimates: Any = kept["x0"].cpu()
        process = model.model.process_latent_out
        if getattr(estimates, "is_nested", False):
            result: Any = NestedTensor([process(part) for part in estimates.unbind()])
        else:
            result = process(estimates)
        denoised = replaced(out, result)
    return io.NodeOutput(out, denoised)


def fitted(model: Any, latent: Latent) -> Latent:
    """The latent with the channels and axes of the model, if it is an empty one."""
    ratio = latent.get("downscale_ratio_spacial")
    return replaced(latent, run.fix_empty_latent_channels(model, latent["samples"], ratio))


class SamplerCustom(io.ComfyNode):
    """Denoises with a sampler and levels of one's own."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        seed = io.Int.Input(
            "noise_seed", default=0, min=0, max=LARGEST_SEED, control_after_generate=True
        )
        return io.Schema(
            node_id="SamplerCustom",
            category="sampling/custom_sampling",
            inputs=[
                io.Model.Input("model"),
                io.Boolean.Input("add_noise", default=True),
                seed,
                cfg_input("cfg"),
                io.Conditioning.Input("positive"),
                io.Conditioning.Input("negative"),
                io.Sampler.Input("sampler"),
                io.Sigmas.Input("sigmas"),
                io.Latent.Input("latent_image"),
            ],
            outputs=both_outputs(),
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        add_noise: bool,
        noise_seed: int,
        cfg: float,
        positive: Any,
        negative: Any,
        sampler: Any,
        sigmas: Tensor,
        latent_image: Latent,
    ) -> io.NodeOutput:
        latent, sigmas = fitted(model, latent_image), checks.levels_of(sigmas)
        source = Noise_RandomNoise(noise_seed) if add_noise else Noise_EmptyNoise()
        kept: dict[str, Tensor] = {}
        samples = run.sample_custom(
            model,
            source.generate_noise(latent),
            cfg,
            sampler,
            sigmas,
            positive,
            negative,
            latent["samples"],
            noise_mask=latent.get("noise_mask"),
            callback=latent_preview.prepare_callback(model, sigmas.shape[-1] - 1, kept),
            disable_pbar=not progress.PROGRESS_BAR_ENABLED,
            seed=noise_seed,
        )
        return finished(latent, samples, kept, model)

    sample = execute


class SamplerCustomAdvanced(io.ComfyNode):
    """Denoises with noise, guider, sampler and levels of one's own."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SamplerCustomAdvanced",
            category="sampling/custom_sampling",
            inputs=[
                io.Noise.Input("noise"),
                io.Guider.Input("guider"),
                io.Sampler.Input("sampler"),
                io.Sigmas.Input("sigmas"),
                io.Latent.Input("latent_image"),
            ],
            outputs=both_outputs(),
        )

    @classmethod
    def execute(
        cls, noise: Any, guider: Any, sampler: Any, sigmas: Tensor, latent_image: Latent
    ) -> io.NodeOutput:
        model = guider.model_patcher
        latent, sigmas = fitted(model, latent_image), checks.levels_of(sigmas)
        kept: dict[str, Tensor] = {}
        samples = guider.sample(
            noise.generate_noise(latent),
            latent["samples"],
            sampler,
            sigmas,
            denoise_mask=latent.get("noise_mask"),
            callback=latent_preview.prepare_callback(model, sigmas.shape[-1] - 1, kept),
            disable_pbar=not progress.PROGRESS_BAR_ENABLED,
            seed=noise.seed,
        )
        return finished(latent, samples.to(placement.intermediate_device()), kept, model)

    sample = execute


NODES: list[type[io.ComfyNode]] = [
    SamplerCustom,
    SamplerCustomAdvanced,
    BasicGuider,
    CFGGuider,
    DualCFGGuider,
    RandomNoise,
    DisableNoise,
    AddNoise,
]
