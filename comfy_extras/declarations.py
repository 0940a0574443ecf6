"""Inputs and outputs that nodes of many families declare alike."""

from __future__ import annotations

from comfy_api.latest import io
from comfy_nodes.limits import MAX_RESOLUTION


def text_input(id: str) -> io.String.Input:
    """A text of several lines."""
    return io.String.Input(id, multiline=True, dynamic_prompts=True)


def pixels_input(id: str, default: int, least: int = 16, step: int = 16) -> io.Int.Input:
    """A side of a picture in pixels."""
    return io.Int.Input(id, default=default, min=least, max=MAX_RESOLUTION, step=step)


def frames_input(default: int, step: int = 4, least: int = 1) -> io.Int.Input:
    """A number of frames."""
    return io.Int.Input("length", default=default, min=least, max=MAX_RESOLUTION, step=step)


def batch_input() -> io.Int.Input:
    """A number of latents made at once."""
    return io.Int.Input("batch_size", default=1, min=1, max=4096)


def pair_inputs() -> list[io.Input]:
    """The conditioning to follow and the one to avoid."""
    return [io.Conditioning.Input("positive"), io.Conditioning.Input("negative")]


def pair_outputs() -> list[io.Output]:
    """The two conditionings, by name."""
    return [
        io.Conditioning.Output(display_name="positive"),
        io.Conditioning.Output(display_name="negative"),
    ]


def pair_and_latent_outputs() -> list[io.Output]:
    """The two conditionings and the latent to sample."""
    return [*pair_outputs(), io.Latent.Output(display_name="latent")]
