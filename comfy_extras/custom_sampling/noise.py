"""Nodes that make the noise a sampler starts from, and add it to a latent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy.sampling import checks
from comfy.sampling import noise as noise_source
from comfy_api.latest import io
from comfy_nodes.latent_basics import replaced
from comfy_nodes.sampling import LARGEST_SEED

Latent = dict[str, Any]
NOISE = "sampling/custom_sampling/noise"


class Noise_EmptyNoise:
    """No noise: zeros."""

    seed = 0

    def generate_noise(self, input_latent: Latent) -> Tensor:
        """Zeros in the shape of the latent."""
        return noise_source.empty_noise(input_latent["samples"])


class Noise_RandomNoise:
    """Noise of a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def generate_noise(self, input_latent: Latent) -> Tensor:
        """Unit noise in the shape of the latent, drawn for the items' own indices."""
        return noise_source.prepare_noise(
            input_latent["samples"], self.seed, input_latent.get("batch_index")
        )


class DisableNoise(io.ComfyNode):
    """No noise."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DisableNoise", category=NOISE, inputs=[], outputs=[io.Noise.Output()]
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput(Noise_EmptyNoise())

    get_noise = execute


class RandomNoise(io.ComfyNode):
    """Noise of a seed."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        seed = io.Int.Input(
            "noise_seed", default=0, min=0, max=LARGEST_SEED, control_after_generate=True
        )
        return io.Schema(
            node_id="RandomNoise", category=NOISE, inputs=[seed], outputs=[io.Noise.Output()]
        )

    @classmethod
    def execute(cls, noise_seed: int) -> io.NodeOutput:
        return io.NodeOutput(Noise_RandomNoise(noise_seed))

    get_noise = execute


class AddNoise(io.ComfyNode):
    """Adds noise to a latent, as strong as the first level is above the last."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AddNoise",
            category="_for_testing/custom_sampling/noise",
            is_experimental=True,
            inputs=[
                io.Model.Input("model"),
                io.Noise.Input("noise"),
                io.Sigmas.Input("sigmas"),
                io.Latent.Input("latent_image"),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, model: Any, noise: Any, sigmas: Tensor, latent_image: Latent) -> io.NodeOutput:
        sigmas = checks.levels_of(sigmas)
        if len(sigmas) == 0:
            return io.NodeOutput(latent_image)
        samples = latent_image["samples"]
        drawn = noise.generate_noise(latent_image)
        sampling = model.get_model_object("model_sampling")
        scale = torch.abs(sigmas[0] - sigmas[-1]) if len(sigmas) > 1 else sigmas[0]
        inner = samples
        if torch.count_nonzero(samples) > 0:  # an empty latent stays empty
            inner = model.get_model_object("process_latent_in")(samples)
        noisy = sampling.noise_scaling(scale, drawn, inner)
        noisy = model.get_model_object("process_latent_out")(noisy)
        return io.NodeOutput(replaced(latent_image, torch.nan_to_num(noisy, 0.0, 0.0, 0.0)))

    add_noise = execute
