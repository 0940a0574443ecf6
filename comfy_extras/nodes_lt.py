"""Latents, noise levels and conditioning of LTX video."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

import node_helpers
from comfy.ldm.lightricks.symmetric_patchifier import SymmetricPatchifier  # noqa: F401
from comfy.nested_tensor import NestedTensor
from comfy.sampling import noise_levels
from comfy.sampling import parameterisation as predictions
from comfy.sampling.schedule_curves import MAX_TOKENS, ltxv_schedule, shift_for_tokens
from comfy_api.latest import io
from comfy_extras.declarations import (
    batch_input,
    frames_input,
    pair_and_latent_outputs,
    pair_inputs,
    pixels_input,
)
from comfy_extras.empty_latents import empty_video
from comfy_extras.extension import entrypoint_of
from comfy_extras.frame_compression import compressed
from comfy_extras.lt_guides import (  # packs import the functions from here
    LTXVAddGuide,
    LTXVCropGuides,
    get_keyframe_idxs,  # noqa: F401
    get_noise_mask,
)
from comfy_extras.video_frames import encoded_frames, frames_at
from comfy_nodes.latent_basics import VIDEO, samples_of

Latent = dict[str, Any]
CHANNELS, CELL, TIME = 128, 32, 8  # of a latent; pixels of a side, and frames, that share a cell


def video_inputs(least: int) -> list[io.Input]:
    """Size, length and number of the videos."""
    return [
        pixels_input("width", 768, 64, 32),
        pixels_input("height", 512, 64, 32),
        frames_input(97, step=8, least=least),
        batch_input(),
    ]


class EmptyLTXVLatentVideo(io.ComfyNode):
    """An empty latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EmptyLTXVLatentVideo",
            category="latent/video/ltxv",
            inputs=video_inputs(1),
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, width: int, height: int, length: int, batch_size: int = 1) -> io.NodeOutput:
        samples = empty_video(batch_size, CHANNELS, length, height, width, TIME, CELL)
        return io.NodeOutput({"samples": samples})

    generate = execute


def begun_with(latent: Latent, encoded: Tensor, strength: float) -> Latent:
    """A latent whose first cells are given, and are changed the less the greater the strength."""
    samples, mask = latent["samples"].clone(), get_noise_mask(latent)
    samples[:, :, : encoded.shape[2]] = encoded
    mask[:, :, : encoded.shape[2]] = 1.0 - strength
    return {**latent, "samples": samples, "noise_mask": mask}


def strength_input() -> io.Float.Input:
    """How closely the first frames are kept."""
    return io.Float.Input("strength", default=1.0, min=0.0, max=1.0)


class LTXVImgToVideo(io.ComfyNode):
    """A latent that begins with a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXVImgToVideo",
            category="conditioning/video_models",
            inputs=[
                *pair_inputs(),
                io.Vae.Input("vae"),
                io.Image.Input("image"),
                *video_inputs(9),
                strength_input(),
            ],
            outputs=pair_and_latent_outputs(),
        )

    @classmethod
    def execute(
        cls,
        positive: Any,
        negative: Any,
        image: Tensor,
        vae: Any,
        width: int,
        height: int,
        length: int,
        batch_size: int,
        strength: float,
    ) -> io.NodeOutput:
        encoded = encoded_frames(vae, frames_at(image, width, height), CHANNELS)
        samples = empty_video(batch_size, CHANNELS, length, height, width, TIME, CELL)
        return io.NodeOutput(
            positive, negative, begun_with({"samples": samples}, encoded, strength)
        )

    generate = execute


class LTXVImgToVideoInplace(io.ComfyNode):
    """Puts a picture at the beginning of a latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXVImgToVideoInplace",
            category="conditioning/video_models",
            inputs=[
                io.Vae.Input("vae"),
                io.Image.Input("image"),
                io.Latent.Input("latent"),
                strength_input(),
                io.Boolean.Input("bypass", default=False, tooltip="Change nothing."),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
        )

    @classmethod
    def execute(
        cls, vae: Any, image: Tensor, latent: Latent, strength: float, bypass: bool = False
    ) -> io.NodeOutput:
        if bypass:
            return io.NodeOutput(latent)
        channels, _, rows, columns = samples_of(latent, "latent", VIDEO).shape[1:]
        formula = vae.downscale_index_formula or (TIME, CELL, CELL)
        frames = frames_at(image, columns * formula[2], rows * formula[1])
        encoded = encoded_frames(vae, frames, channels)
        return io.NodeOutput(begun_with(latent, encoded, strength))

    generate = execute


class LTXVPreprocess(io.ComfyNode):
    """Compresses pictures as videos are, which the model expects of a first frame."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXVPreprocess",
            category="image",
            inputs=[
                io.Image.Input("image"),
                io.Int.Input(
                    "img_compression",
                    default=35,
                    min=0,
                    max=100,
                    tooltip="How much is lost; 0: nothing.",
                ),
            ],
            outputs=[io.Image.Output(display_name="output_image")],
        )

    @classmethod
    def execute(cls, image: Tensor, img_compression: int) -> io.NodeOutput:
        return io.NodeOutput(compressed(image, img_compression))

    preprocess = execute


class LTXVConcatAVLatent(io.ComfyNode):
    """Joins the latents of pictures and of sound."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXVConcatAVLatent",
            category="latent/video/ltxv",
            inputs=[io.Latent.Input("video_latent"), io.Latent.Input("audio_latent")],
            outputs=[io.Latent.Output(display_name="latent")],
        )

    @classmethod
    def execute(cls, video_latent: Latent, audio_latent: Latent) -> io.NodeOutput:
        parts = (video_latent, audio_latent)
        count, other = (part["samples"].shape[0] for part in parts)
        if count != other:
            raise ValueError(
                f"audio_latent: expected as many latents as video_latent has ({count}), found "
                f"{other}"
            )
        joined: Latent = {**video_latent, **audio_latent}
        joined["samples"] = NestedTensor([part["samples"] for part in parts])
        if any(part.get("noise_mask") is not None for part in parts):
            joined["noise_mask"] = NestedTensor(
                [
                    part["samples"].new_ones(part["samples"].shape)
                    if part.get("noise_mask") is None
                    else part["noise_mask"]
                    for part in parts
                ]
            )
        return io.NodeOutput(joined)


class LTXVSeparateAVLatent(io.ComfyNode):
    """Takes the latents of pictures and of sound apart."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXVSeparateAVLatent",
            category="latent/video/ltxv",
            inputs=[io.Latent.Input("av_latent")],
            outputs=[
                io.Latent.Output(display_name="video_latent"),
                io.Latent.Output(display_name="audio_latent"),
            ],
        )

    @classmethod
    def execute(cls, av_latent: Latent) -> io.NodeOutput:
        if not isinstance(av_latent["samples"], NestedTensor):
            raise ValueError(
                "av_latent: expected a latent of video and sound together, found a single one of "
                f"shape {tuple(av_latent['samples'].shape)}; join them with LTXVConcatAVLatent"
            )
        samples = av_latent["samples"].unbind()
        mask = av_latent.get("noise_mask")
        masks = [None] * len(samples) if mask is None else mask.unbind()
        parts = []
        for one, own in zip(samples, masks):
            part = {**av_latent, "samples": one}
            if own is not None:
                part["noise_mask"] = own
            parts.append(part)
        return io.NodeOutput(*parts[:2])


def tokens_of(latent: Latent | None) -> int:
    """Tokens of a latent; without one, as many as the larger shift is given for."""
    return MAX_TOKENS if latent is None else math.prod(latent["samples"].shape[2:])


def shift_inputs() -> list[io.Float.Input]:
    """Declarations of the shifts for few and many tokens."""
    return [
        io.Float.Input("max_shift", default=2.05, min=0.0, max=100.0, step=0.01),
        io.Float.Input("base_shift", default=0.95, min=0.0, max=100.0, step=0.01),
    ]


class LTXVConditioning(io.ComfyNode):
    """Tells the model how many frames a second has."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXVConditioning",
            category="conditioning/video_models",
            inputs=[
                io.Conditioning.Input("positive"),
                io.Conditioning.Input("negative"),
                io.Float.Input("frame_rate", default=25.0, min=0.0, max=1000.0, step=0.01),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive"),
                io.Conditioning.Output(display_name="negative"),
            ],
        )

    @classmethod
    def execute(cls, positive: Any, negative: Any, frame_rate: float) -> io.NodeOutput:
        values = {"frame_rate": frame_rate}
        return io.NodeOutput(
            node_helpers.conditioning_set_values(positive, values),
            node_helpers.conditioning_set_values(negative, values),
        )

    append = execute


class ModelSamplingLTXV(io.ComfyNode):
    """Shifts a model's noise levels by the size of the latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ModelSamplingLTXV",
            category="advanced/model",
            inputs=[
                io.Model.Input("model"),
                *shift_inputs(),
                io.Latent.Input("latent", optional=True),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls, model: Any, max_shift: float, base_shift: float, latent: Latent | None = None
    ) -> io.NodeOutput:
        view = model.clone()
        kind = noise_levels.compose(noise_levels.ModelSamplingFlux, predictions.CONST)
        sampling = kind(model.model.model_config)
        sampling.set_parameters(shift=shift_for_tokens(tokens_of(latent), base_shift, max_shift))
        view.add_object_patch("model_sampling", sampling)
        return io.NodeOutput(view)


class LTXVScheduler(io.ComfyNode):
    """Noise levels shifted by the size of the latent and stretched to a last level."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXVScheduler",
            category="sampling/custom_sampling/schedulers",
            inputs=[
                io.Int.Input("steps", default=20, min=1, max=10000),
                *shift_inputs(),
                io.Boolean.Input("stretch", default=True),
                io.Float.Input("terminal", default=0.1, min=0.0, max=0.99, step=0.01),
                io.Latent.Input("latent", optional=True),
            ],
            outputs=[io.Sigmas.Output()],
        )

    @classmethod
    def execute(
        cls,
        steps: int,
        max_shift: float,
        base_shift: float,
        stretch: bool,
        terminal: float,
        latent: Latent | None = None,
    ) -> io.NodeOutput:
        return io.NodeOutput(
            ltxv_schedule(steps, tokens_of(latent), max_shift, base_shift, stretch, terminal)
        )

    get_sigmas = execute


comfy_entrypoint = entrypoint_of(
    EmptyLTXVLatentVideo,
    LTXVImgToVideo,
    LTXVImgToVideoInplace,
    LTXVAddGuide,
    LTXVCropGuides,
    LTXVPreprocess,
    LTXVConcatAVLatent,
    LTXVSeparateAVLatent,
    LTXVConditioning,
    ModelSamplingLTXV,
    LTXVScheduler,
)
