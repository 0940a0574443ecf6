"""Wan models that move with sound: S2V, and HuMo.

An audio encoder's output holds `encoded_audio_all_layers`, the states [1, T, D] after each of its
layers at 50 a second, and `audio_samples`, the length at 16,000 a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from comfy_api.latest import io
from comfy_extras.declarations import frames_input, pair_and_latent_outputs, pair_inputs
from comfy_extras.video_frames import (
    GREY,
    Conditioning,
    appended,
    blank,
    cells_of,
    encoded_frames,
    frames_at,
    padded_frames,
    with_values,
)
from comfy_extras.wan.common import (
    CELL,
    CHANNELS,
    TIME,
    Latent,
    beginning_with,
    empty,
    image_input,
    neutral,
    video_inputs,
)
from comfy_nodes.latent_basics import VIDEO, samples_of

STATES_A_SECOND = 50
SPEECH_RATE, FRAME_RATE = 30, 16  # of the states that S2V was taught with, and of its videos
MOTION_FRAMES, MOTION_CELLS = 73, 19  # that S2V looks back
HUMO_RATE, HUMO_SAMPLES_A_FRAME = 25, 640
HUMO_LAYERS, HUMO_GROUP, HUMO_WIDTH = 33, 8, 1280  # layers of Whisper large; how many are averaged
WINDOW, MARGIN = 8, 2  # states for a cell in time; how many of them are its neighbours', a side


def audio_input() -> io.AudioEncoderOutput.Input:
    """What an audio encoder heard."""
    return io.AudioEncoderOutput.Input("audio_encoder_output", optional=True)


def at_rate(states: Tensor, rate: int) -> Tensor:
    """States [B, T, D] at another number a second, by linear interpolation."""
    count = int(states.shape[1] / STATES_A_SECOND * rate)
    if count < 1:
        raise ValueError(
            f"audio_encoder_output: expected a sound of at least {1 / rate:.3f} seconds, found "
            f"{states.shape[1] / STATES_A_SECOND:.3f}"
        )
    moved = functional.interpolate(
        states.transpose(1, 2), size=count, mode="linear", align_corners=True
    )
    return moved.transpose(1, 2)


def speech_states(layers: list[Tensor], frames: int, offset: int) -> Tensor:
    """States for the frames of S2V's video [1, layers, D, T].

    Args:
        frames: Frames of the latent's cells.
        offset: Frames that come before.
    Returns:
        Zeros follow the sound until a run's end; T is 0 where the sound ended runs before.
    """
    states = at_rate(torch.cat(layers), SPEECH_RATE)
    heard = states.shape[1]
    runs = int(heard / (frames * SPEECH_RATE / FRAME_RATE)) + 1
    places = torch.arange(runs * frames, dtype=torch.float64) * (SPEECH_RATE / FRAME_RATE)
    index = places.round().long()
    picked = states[:, index.clamp(max=heard - 1)]
    picked[:, index >= heard] = 0.0
    return picked.transpose(1, 2)[None, ..., offset : offset + frames]


@dataclass(frozen=True)
class SpeechVideo:
    """A part of a video that S2V makes: its size, and what came before."""

    width: int
    height: int
    length: int
    batch: int
    offset: int = 0
    motion: Tensor | None = None  # latent [1, 16, T, H, W]


def with_speech(
    pair: list[Conditioning],
    vae: Any,
    part: SpeechVideo,
    audio: dict[str, Any] | None,
    ref_image: Tensor | None,
    control_video: Tensor | None,
) -> io.NodeOutput:
    """Both conditionings and an empty latent."""
    width, height, length = part.width, part.height, part.length
    latent = empty(part.batch, width, height, length)
    cells, rows, columns = latent.shape[2:]
    if audio is not None:
        layers = audio["encoded_audio_all_layers"]
        states = speech_states(layers, cells * TIME, part.offset)
        if states.shape[3]:
            both = zip((states, torch.zeros_like(states)), pair)
            pair = [with_values({"audio_embed": heard}, one)[0] for heard, one in both]
    if ref_image is not None:
        shown = encoded_frames(vae, frames_at(ref_image, width, height, 1), CHANNELS)
        pair = appended({"reference_latents": [shown]}, *pair)
    nothing = neutral(CHANNELS, cells, rows, columns, part.batch)
    values = {"control_video": beginning_with(control_video, nothing, vae, width, height, length)}
    if part.motion is not None:
        values["reference_motion"] = part.motion[:, :, -MOTION_CELLS:]
    return io.NodeOutput(*with_values(values, *pair), {"samples": latent})


def motion_latent(vae: Any, frames: Tensor, width: int, height: int) -> Tensor:
    """The latent of the last frames, after grey ones where there are too few."""
    last = frames_at(frames[-MOTION_FRAMES:], width, height)
    video = torch.full((MOTION_FRAMES, height, width, 3), GREY)
    video[-last.shape[0] :] = last
    return encoded_frames(vae, video, CHANNELS)


class WanSoundImageToVideo(io.ComfyNode):
    """Asks the S2V model for a person who speaks or sings what is heard."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanSoundImageToVideo",
            category="conditioning/video_models",
            inputs=[
                *video_inputs(77),
                audio_input(),
                *(image_input(id) for id in ("ref_image", "control_video", "ref_motion")),
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
        ref_image: Tensor | None = None,
        audio_encoder_output: dict[str, Any] | None = None,
        control_video: Tensor | None = None,
        ref_motion: Tensor | None = None,
    ) -> io.NodeOutput:
        motion = None if ref_motion is None else motion_latent(vae, ref_motion, width, height)
        part = SpeechVideo(width, height, length, batch_size, motion=motion)
        pair = [positive, negative]
        return with_speech(pair, vae, part, audio_encoder_output, ref_image, control_video)


class WanSoundImageToVideoExtend(io.ComfyNode):
    """Asks the S2V model for what follows a video that it made."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanSoundImageToVideoExtend",
            category="conditioning/video_models",
            inputs=[
                *pair_inputs(),
                io.Vae.Input("vae"),
                frames_input(77),
                io.Latent.Input("video_latent"),
                audio_input(),
                image_input("ref_image"),
                image_input("control_video"),
            ],
            outputs=pair_and_latent_outputs(),
        )

    @classmethod
    def execute(
        cls,
        positive: Any,
        negative: Any,
        vae: Any,
        length: int,
        video_latent: Latent,
        ref_image: Tensor | None = None,
        audio_encoder_output: dict[str, Any] | None = None,
        control_video: Tensor | None = None,
    ) -> io.NodeOutput:
        before = samples_of(video_latent, "video_latent", VIDEO)
        batch, channels, cells, rows, columns = before.shape
        if channels != CHANNELS:
            raise ValueError(
                f"video_latent: expected the latent of a Wan video ({CHANNELS} channels), found "
                f"{channels} channels"
            )
        size = (columns * CELL, rows * CELL)
        part = SpeechVideo(*size, length, batch, offset=cells * TIME, motion=before)
        pair = [positive, negative]
        return with_speech(pair, vae, part, audio_encoder_output, ref_image, control_video)


def humo_states(audio: dict[str, Any]) -> Tensor:
    """States for the frames of HuMo's video [T, 5, D]: four means of eight layers, and the last.

    Raises:
        ValueError: They are of an encoder with other layers.
    """
    layers = audio["encoded_audio_all_layers"]
    width = layers[0].shape[-1]
    if (len(layers), width) != (HUMO_LAYERS, HUMO_WIDTH):
        raise ValueError(
            f"audio_encoder_output: expected {HUMO_LAYERS} layers of width {HUMO_WIDTH}, as "
            f"Whisper large has them, found {len(layers)} of width {width}"
        )
    frames = audio["audio_samples"] // HUMO_SAMPLES_A_FRAME
    states = torch.stack(layers, dim=2)[:, : frames * STATES_A_SECOND // HUMO_RATE]
    starts = range(0, HUMO_LAYERS - 1, HUMO_GROUP)
    parts = [states[:, :, start : start + HUMO_GROUP].mean(dim=2) for start in starts]
    parts.append(states[:, :, -1])
    return torch.stack([at_rate(one, HUMO_RATE) for one in parts], dim=2)[0]


def windows(states: Tensor, length: int) -> Tensor:
    """For each cell in time the states around its frames [T, 8, 5, D]; zeros where none are.

    The first cell holds one frame, and nothing is heard before it.
    """
    cells = cells_of(length, TIME)
    place = torch.arange(WINDOW)
    ends = torch.arange(cells) * TIME + MARGIN  # last state of each window
    index = ends[:, None] - (WINDOW - 1) + place
    heard = (index >= 0) & (index < states.shape[0])
    picked = states[index.clamp(0, states.shape[0] - 1)]
    return picked * heard[..., None, None].to(picked)


class WanHuMoImageToVideo(io.ComfyNode):
    """Asks the HuMo model for a person from a picture, who moves with what is heard."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanHuMoImageToVideo",
            category="conditioning/video_models",
            is_experimental=True,
            inputs=[*video_inputs(97), audio_input(), image_input("ref_image")],
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
        ref_image: Tensor | None = None,
        audio_encoder_output: dict[str, Any] | None = None,
    ) -> io.NodeOutput:
        latent = empty(batch_size, width, height, length)
        if ref_image is None:
            shown = blank(batch_size, CHANNELS, 1, height // CELL, width // CELL)
        else:
            shown = encoded_frames(vae, frames_at(ref_image, width, height, 1), CHANNELS)
        if audio_encoder_output is None:
            cells = latent.shape[2] + 1  # the reference has a cell too
            shape = (batch_size, cells, WINDOW, HUMO_LAYERS // HUMO_GROUP + 1, HUMO_WIDTH)
            heard = torch.zeros(shape, device=latent.device)
        else:
            heard = windows(humo_states(audio_encoder_output), length)[None]
        # What the network finds beside frames of which nothing is known.
        unknown = encoded_frames(vae, padded_frames(None, width, height, length), CHANNELS)
        pair = []
        for one, scale in ((positive, 1.0), (negative, 0.0)):
            (one,) = appended({"reference_latents": [shown * scale]}, one)
            values = {"audio_embed": heard * scale, "concat_latent_image": unknown}
            pair += with_values(values, one)
        return io.NodeOutput(*pair, {"samples": latent})
