"""Text, latents and pictures of Hunyuan-DiT, HunyuanImage and HunyuanVideo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy_api.latest import io
from comfy_extras.declarations import (
    batch_input,
    frames_input,
    pair_and_latent_outputs,
    pair_inputs,
    pixels_input,
    text_input,
)
from comfy_extras.empty_latents import empty_image, empty_video
from comfy_extras.extension import entrypoint_of
from comfy_extras.latent_upscaling import (
    HunyuanVideo15LatentUpscaleWithModel as HunyuanVideo15LatentUpscaleWithModel,
)
from comfy_extras.latent_upscaling import LatentUpscaleModelLoader as LatentUpscaleModelLoader
from comfy_extras.text_tokens import tokens_for
from comfy_extras.video_frames import cells_of, encoded_frames, frames_at, with_values
from comfy_nodes.latent_basics import VIDEO, samples_of

Latent = dict[str, Any]
FRAMES_A_CELL = 4
V1_CHANNELS, V1_CELL = 16, 8
V15_CHANNELS, V15_CELL = 32, 16
IMAGE_CHANNELS, IMAGE_CELL = 64, 32


class CLIPTextEncodeHunyuanDiT(io.ComfyNode):
    """Text to conditioning, with a text for each of two encoders."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CLIPTextEncodeHunyuanDiT",
            category="advanced/conditioning",
            inputs=[io.Clip.Input("clip"), text_input("bert"), text_input("mt5xl")],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, clip: Any, bert: str, mt5xl: str) -> io.NodeOutput:
        tokens = {**clip.tokenize(bert), "mt5xl": tokens_for(clip, mt5xl, "mt5xl")}
        return io.NodeOutput(clip.encode_from_tokens_scheduled(tokens))

    encode = execute


# What the picture-to-video model was taught with: https://github.com/Tencent/HunyuanVideo-I2V
PICTURE_TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\n<image>\nDescribe the video by detailing the "
    "following aspects according to the reference image: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, "
    "physical movement changes of the objects."
    "4. background environment, light, style and atmosphere.5. camera angles, movements, and "
    "transitions used in the video:<|eot_id|>\n\n<|start_header_id|>user<|end_header_id|>\n\n{}"
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)


class TextEncodeHunyuanVideo_ImageToVideo(io.ComfyNode):
    """Text to conditioning, read beside the picture that the video goes on from."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        interleave = io.Int.Input(
            "image_interleave",
            default=2,
            min=1,
            max=512,
            tooltip="Of the picture's tokens only one in so many is used: the more are left out, "
            "the more the text counts.",
        )
        return io.Schema(
            node_id="TextEncodeHunyuanVideo_ImageToVideo",
            category="advanced/conditioning",
            inputs=[
                io.Clip.Input("clip"),
                io.ClipVisionOutput.Input("clip_vision_output"),
                text_input("prompt"),
                interleave,
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(
        cls, clip: Any, clip_vision_output: Any, prompt: str, image_interleave: int
    ) -> io.NodeOutput:
        picture = getattr(clip_vision_output, "mm_projected", None)
        if picture is None:
            raise ValueError(
                "clip_vision_output: expected what LLaVA's image encoder saw, in the language "
                "model's space, found that of an image encoder without such a projection; load "
                "the model's own (llava_llama3_vision)"
            )
        tokens = clip.tokenize(
            prompt,
            llama_template=PICTURE_TEMPLATE,
            image_embeds=picture,
            image_interleave=image_interleave,
        )
        return io.NodeOutput(clip.encode_from_tokens_scheduled(tokens))

    encode = execute


def video_inputs(length: int) -> list[io.Input]:
    """Size, length and number of the videos."""
    return [
        pixels_input("width", 848),
        pixels_input("height", 480),
        frames_input(length),
        batch_input(),
    ]


class EmptyHunyuanLatentVideo(io.ComfyNode):
    """An empty latent of HunyuanVideo 1.0."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EmptyHunyuanLatentVideo",
            display_name="Empty HunyuanVideo 1.0 Latent",
            category="latent/video",
            inputs=video_inputs(25),
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, width: int, height: int, length: int, batch_size: int = 1) -> io.NodeOutput:
        size = (length, height, width, FRAMES_A_CELL, V1_CELL)
        return io.NodeOutput({"samples": empty_video(batch_size, V1_CHANNELS, *size)})

    generate = execute


class EmptyHunyuanVideo15Latent(io.ComfyNode):
    """An empty latent of HunyuanVideo 1.5."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EmptyHunyuanVideo15Latent",
            display_name="Empty HunyuanVideo 1.5 Latent",
            category="latent/video",
            inputs=video_inputs(25),
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, width: int, height: int, length: int, batch_size: int = 1) -> io.NodeOutput:
        size = (length, height, width, FRAMES_A_CELL, V15_CELL)
        return io.NodeOutput({"samples": empty_video(batch_size, V15_CHANNELS, *size)})


class EmptyHunyuanImageLatent(io.ComfyNode):
    """An empty latent of HunyuanImage 2.1."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EmptyHunyuanImageLatent",
            category="latent",
            inputs=[
                pixels_input("width", 2048, 64, 32),
                pixels_input("height", 2048, 64, 32),
                batch_input(),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, width: int, height: int, batch_size: int = 1) -> io.NodeOutput:
        samples = empty_image(batch_size, IMAGE_CHANNELS, height, width, IMAGE_CELL)
        return io.NodeOutput({"samples": samples})

    generate = execute


def beginning_mask(frames: int, latent: Tensor, space: tuple[int, int]) -> Tensor:
    """[1, 1, T, H, W]: 0 where the first `frames` frames are given, 1 elsewhere."""
    mask = torch.ones(1, 1, latent.shape[2], *space)
    mask[:, :, : cells_of(frames, FRAMES_A_CELL)] = 0.0
    return mask


class HunyuanImageToVideo(io.ComfyNode):
    """Asks HunyuanVideo 1.0 to go on from a picture, in one of the ways its models were taught."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        kinds = ["v1 (concat)", "v2 (replace)", "custom"]
        return io.Schema(
            node_id="HunyuanImageToVideo",
            category="conditioning/video_models",
            inputs=[
                io.Conditioning.Input("positive"),
                io.Vae.Input("vae"),
                *video_inputs(53),
                io.Combo.Input("guidance_type", options=kinds),
                io.Image.Input("start_image", optional=True),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive"),
                io.Latent.Output(display_name="latent"),
            ],
        )

    @classmethod
    def execute(
        cls,
        positive: Any,
        vae: Any,
        width: int,
        height: int,
        length: int,
        batch_size: int,
        guidance_type: str,
        start_image: Tensor | None = None,
    ) -> io.NodeOutput:
        size = (length, height, width, FRAMES_A_CELL, V1_CELL)
        latent = empty_video(batch_size, V1_CHANNELS, *size)
        made: Latent = {"samples": latent}
        if start_image is None:
            return io.NodeOutput(positive, made)
        frames = frames_at(start_image, width, height, length)
        encoded = encoded_frames(vae, frames, V1_CHANNELS)
        mask = beginning_mask(frames.shape[0], latent, (encoded.shape[-2], encoded.shape[-1]))
        if guidance_type == "v1 (concat)":
            values: dict[str, Any] = {"concat_latent_image": encoded, "concat_mask": mask}
        elif guidance_type == "v2 (replace)":
            values = {"guiding_frame_index": 0}
            latent[:, :, : encoded.shape[2]] = encoded
            made["noise_mask"] = mask
        else:
            values = {"ref_latent": encoded}
        return io.NodeOutput(*with_values(values, positive), made)

    encode = execute


class HunyuanVideo15ImageToVideo(io.ComfyNode):
    """Asks HunyuanVideo 1.5 to go on from a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HunyuanVideo15ImageToVideo",
            category="conditioning/video_models",
            inputs=[
                *pair_inputs(),
                io.Vae.Input("vae"),
                *video_inputs(33),
                io.Image.Input("start_image", optional=True),
                io.ClipVisionOutput.Input("clip_vision_output", optional=True),
            ],
            outputs=pair_and_latent_outputs(),
        )

    @classmethod
    def execute(
        cls,
        positive: Any,
        negative: Any,
        vae: Any,
        width: int,
        height: int,
        length: int,
        batch_size: int,
        start_image: Tensor | None = None,
        clip_vision_output: Any = None,
    ) -> io.NodeOutput:
        size = (length, height, width, FRAMES_A_CELL, V15_CELL)
        latent = empty_video(batch_size, V15_CHANNELS, *size)
        values: dict[str, Any] = {}
        if start_image is not None:
            frames = frames_at(start_image, width, height, length)
            encoded = encoded_frames(vae, frames, V15_CHANNELS)
            shown = torch.zeros_like(latent)
            shown[:, :, : encoded.shape[2]] = encoded
            space = (latent.shape[-2], latent.shape[-1])
            mask = beginning_mask(frames.shape[0], latent, space)
            values = {"concat_latent_image": shown, "concat_mask": mask}
        if clip_vision_output is not None:
            values["clip_vision_output"] = clip_vision_output
        return io.NodeOutput(*with_values(values, positive, negative), {"samples": latent})

    encode = execute


def noise_input(default: float) -> io.Float.Input:
    """How much noise the given latent gets."""
    return io.Float.Input("noise_augmentation", default=default, min=0.0, max=1.0, step=0.01)


class HunyuanVideo15SuperResolution(io.ComfyNode):
    """Gives the super-resolution model the small video, and the picture it began with."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HunyuanVideo15SuperResolution",
            category="sd",
            inputs=[
                *pair_inputs(),
                io.Latent.Input("latent"),
                noise_input(0.7),
                io.Vae.Input("vae", optional=True),
                io.Image.Input("start_image", optional=True),
                io.ClipVisionOutput.Input("clip_vision_output", optional=True),
            ],
            outputs=pair_and_latent_outputs(),
        )

    @classmethod
    def execute(
        cls,
        positive: Any,
        negative: Any,
        latent: Latent,
        noise_augmentation: float,
        vae: Any = None,
        start_image: Tensor | None = None,
        clip_vision_output: Any = None,
    ) -> io.NodeOutput:
        samples = samples_of(latent, "latent", VIDEO)
        batch, channels, cells, rows, columns = samples.shape
        # Channels: the picture, whether a frame has one, the small video, that it is there.
        shown = torch.zeros(batch, 2 * channels + 2, cells, rows, columns)
        shown[:, channels + 1 : 2 * channels + 1] = samples
        shown[:, 2 * channels + 1] = 1
        if start_image is not None:
            if vae is None:
                raise ValueError("start_image needs a vae to encode it; connect one")
            frames = frames_at(start_image, columns * V15_CELL, rows * V15_CELL)
            encoded = encoded_frames(vae, frames, channels)
            if encoded.shape[-2:] != (rows, columns):
                found = frames.shape[2] // encoded.shape[-1]
                raise ValueError(
                    f"vae: expected a video autoencoder of cells of {V15_CELL} pixels, found "
                    f"one of {found}; connect that of HunyuanVideo 1.5"
                )
            shown[:, :channels, : encoded.shape[2]] = encoded
            shown[:, channels, 0] = 1
        values = {"concat_latent_image": shown, "noise_augmentation": noise_augmentation}
        if clip_vision_output is not None:
            values["clip_vision_output"] = clip_vision_output
        return io.NodeOutput(*with_values(values, positive, negative), latent)


class HunyuanRefinerLatent(io.ComfyNode):
    """Gives the refiner the picture to refine."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HunyuanRefinerLatent",
            category="sd",
            inputs=[*pair_inputs(), io.Latent.Input("latent"), noise_input(0.1)],
            outputs=pair_and_latent_outputs(),
        )

    @classmethod
    def execute(
        cls, positive: Any, negative: Any, latent: Latent, noise_augmentation: float
    ) -> io.NodeOutput:
        samples = samples_of(latent, "latent", VIDEO)
        values = {"concat_latent_image": samples, "noise_augmentation": noise_augmentation}
        empty = torch.zeros(samples.shape[0], V15_CHANNELS, *samples.shape[-3:])
        return io.NodeOutput(*with_values(values, positive, negative), {"samples": empty})


comfy_entrypoint = entrypoint_of(
    CLIPTextEncodeHunyuanDiT,
    TextEncodeHunyuanVideo_ImageToVideo,
    EmptyHunyuanLatentVideo,
    EmptyHunyuanVideo15Latent,
    EmptyHunyuanImageLatent,
    HunyuanImageToVideo,
    HunyuanVideo15ImageToVideo,
    HunyuanVideo15SuperResolution,
    HunyuanRefinerLatent,
    LatentUpscaleModelLoader,
    HunyuanVideo15LatentUpscaleWithModel,
)
