"""Nodes that make noise and guiders, and run a sampler with them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import latent_preview
import node_helpers
from comfy import progress
from comfy.devices import placement
from comfy.nested_tensor import NestedTensor
from comfy.sampling import batching, checks, guidance, run
from comfy.sampling import noise as noise_source
from comfy_api.latest import io
from comfy_extras.guidance import say_unasked
from comfy_nodes.latent_basics import replaced
from comfy_nodes.sampling import LARGEST_SEED

Latent = dict[str, Any]
GUIDERS = "sampling/custom_sampling/guiders"
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


def cfg_input(id: str) -> io.Float.Input:
    """Declaration of a guidance scale."""
    return io.Float.Input(id, default=8.0, min=0.0, max=100.0, step=0.1, round=0.01)


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


class Guider_Basic(guidance.CFGGuider):
    """Guidance by one conditioning, without a negative one."""

    def set_conds(self, positive: Any) -> None:  # type: ignore[override]
        """The one conditioning."""
        self.inner_set_conds({"positive": positive})


class BasicGuider(io.ComfyNode):
    """Guidance by one conditioning."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BasicGuider",
            category=GUIDERS,
            inputs=[io.Model.Input("model"), io.Conditioning.Input("conditioning")],
            outputs=[io.Guider.Output()],
        )

    @classmethod
    def execute(cls, model: Any, conditioning: Any) -> io.NodeOutput:
        guider = Guider_Basic(model)
        guider.set_conds(conditioning)
        return io.NodeOutput(guider)

    get_guider = execute


class CFGGuider(io.ComfyNode):
    """Classifier-free guidance."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CFGGuider",
            category=GUIDERS,
            inputs=[
                io.Model.Input("model"),
                io.Conditioning.Input("positive"),
                io.Conditioning.Input("negative"),
                cfg_input("cfg"),
            ],
            outputs=[io.Guider.Output()],
        )

    @classmethod
    def execute(cls, model: Any, positive: Any, negative: Any, cfg: float) -> io.NodeOutput:
        guider = guidance.CFGGuider(model)
        guider.set_conds(positive, negative)
        guider.set_cfg(cfg)
        return io.NodeOutput(guider)

    get_guider = execute


class Guider_DualCFG(guidance.CFGGuider):
    """Guidance by two conditionings and a negative one.

    regular: negative + (middle - negative) * cfg2 + (positive - middle) * cfg1;
    nested: the result of (positive, middle) at cfg1 guided against the negative one at cfg2.
    Guidance hooks of the model act on the first of these differences that is made: between negative
    and middle, or between middle and positive; the other one is plain.
    """

    cfg1, cfg2, nested = 1.0, 1.0, False
    has_one_scale = False

    def set_cfg(self, cfg1: float, cfg2: float, nested: bool = False) -> None:  # type: ignore[override]
        """Scale between the two conditionings, and between the second and the negative one."""
        self.cfg1, self.cfg2, self.nested = cfg1, cfg2, nested

    def set_conds(self, positive: Any, middle: Any, negative: Any) -> None:  # type: ignore[override]
        """The three conditionings; models take the middle one for a negative text."""
        middle = node_helpers.conditioning_set_values(middle, {"prompt_type": "negative"})
        conds = {"positive": positive, "middle": middle, "negative": negative}
        self.inner_set_conds(conds)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """As of every guider."""
        say_unasked(self, "sampler_pre_cfg_function", "sampler_calc_cond_batch_function")
        return super().sample(*args, **kwargs)

    def predict_noise(
        self,
        x: Tensor,
        timestep: Tensor,
        model_options: dict[str, Any] | None = None,
        seed: int | None = None,  # noqa: ARG002 - goes with the options
    ) -> Tensor:
        """Clean estimate under both scales."""
        options = model_options or {}
        conds = [self.conds.get(name) for name in ("negative", "middle", "positive")]
        may_skip = options.get("disable_cfg1_optimization", False) is False
        if not self.nested and math.isclose(self.cfg2, 1.0) and may_skip:
            conds[0] = None
            if math.isclose(self.cfg1, 1.0):
                conds[1] = None
        network = self.inner_model
        negative, middle, positive = batching.calc_cond_batch(network, conds, x, timestep, options)
        if self.nested:
            inner = guidance.cfg_function(
                network, positive, middle, self.cfg1, x, timestep, options,
                cond=conds[2], uncond=conds[1],
            )  # fmt: skip
            return negative + (inner - negative) * self.cfg2
        outer = guidance.cfg_function(
            network, middle, negative, self.cfg2, x, timestep, options,
            cond=conds[1], uncond=conds[0],
        )  # fmt: skip
        return outer + (positive - middle) * self.cfg1


class DualCFGGuider(io.ComfyNode):
    """Guidance by two conditionings and a negative one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DualCFGGuider",
            category=GUIDERS,
            inputs=[
                io.Model.Input("model"),
                io.Conditioning.Input("cond1"),
                io.Conditioning.Input("cond2"),
                io.Conditioning.Input("negative"),
                cfg_input("cfg_conds"),
                cfg_input("cfg_cond2_negative"),
                io.Combo.Input("style", options=["regular", "nested"]),
            ],
            outputs=[io.Guider.Output()],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        cond1: Any,
        cond2: Any,
        negative: Any,
        cfg_conds: float,
        cfg_cond2_negative: float,
        style: str,
    ) -> io.NodeOutput:
        guider = Guider_DualCFG(model)
        guider.set_conds(cond1, cond2, negative)
        guider.set_cfg(cfg_conds, cfg_cond2_negative, nested=style == "nested")
        return io.NodeOutput(guider)

    get_guider = execute


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
