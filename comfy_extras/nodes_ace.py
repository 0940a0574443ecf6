"""Text and latents of ACE-Step, which makes songs."""

from __future__ import annotations

from typing import Any

import node_helpers
from comfy.devices import placement
from comfy_api.latest import io
from comfy_extras.declarations import batch_input, text_input
from comfy_extras.extension import entrypoint_of
from comfy_nodes.latent_basics import empty_samples

# A latent is a small picture of the sound's spectrum.
CHANNELS, BANDS = 8, 16
CELLS_A_SECOND = 44100 / 512 / 8


class TextEncodeAceStepAudio(io.ComfyNode):
    """Style and lyrics to conditioning."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TextEncodeAceStepAudio",
            category="conditioning",
            inputs=[
                io.Clip.Input("clip"),
                text_input("tags"),
                text_input("lyrics"),
                io.Float.Input("lyrics_strength", default=1.0, min=0.0, max=10.0, step=0.01),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, clip: Any, tags: str, lyrics: str, lyrics_strength: float) -> io.NodeOutput:
        tokens = clip.tokenize(tags, lyrics=lyrics)
        conditioning = clip.encode_from_tokens_scheduled(tokens)
        values = {"lyrics_strength": lyrics_strength}
        return io.NodeOutput(node_helpers.conditioning_set_values(conditioning, values))


class EmptyAceStepLatentAudio(io.ComfyNode):
    """An empty latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EmptyAceStepLatentAudio",
            category="latent/audio",
            inputs=[
                io.Float.Input("seconds", default=120.0, min=1.0, max=1000.0, step=0.1),
                batch_input(),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, seconds: float, batch_size: int) -> io.NodeOutput:
        shape = (batch_size, CHANNELS, BANDS, int(seconds * CELLS_A_SECOND))
        samples = empty_samples(shape, placement.intermediate_device())
        return io.NodeOutput({"samples": samples, "type": "audio"})


comfy_entrypoint = entrypoint_of(TextEncodeAceStepAudio, EmptyAceStepLatentAudio)
