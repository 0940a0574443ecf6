"""Nodes between sounds and latents, and their conditioning."""

from __future__ import annotations

from typing import Any

import node_helpers
from comfy.devices import placement
from comfy_api.latest import io
from comfy_extras.audio.waveforms import Audio, resample
from comfy_extras.declarations import batch_input, pair_inputs, pair_outputs
from comfy_nodes.latent_basics import empty_samples

Latent = dict[str, Any]
RATE = 44100  # hertz, of autoencoders that do not say
CHANNELS, SAMPLES_A_CELL = 64, 2048  # of Stable Audio's latents
COLOURS = 3  # channels of pictures; sounds have one or two
LOUDEST = 5.0  # standard deviations that are let through unchanged


class EmptyLatentAudio(io.ComfyNode):
    """An empty latent of Stable Audio."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EmptyLatentAudio",
            display_name="Empty Latent Audio",
            category="latent/audio",
            inputs=[
                io.Float.Input("seconds", default=47.6, min=1.0, max=1000.0, step=0.1),
                batch_input(),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, seconds: float, batch_size: int) -> io.NodeOutput:
        length = round(seconds * RATE / SAMPLES_A_CELL / 2) * 2
        device = placement.intermediate_device()
        samples = empty_samples((batch_size, CHANNELS, length), device)
        return io.NodeOutput({"samples": samples, "type": "audio"})

    generate = execute


class ConditioningStableAudio(io.ComfyNode):
    """Tells the model which part of how long a sound it makes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def seconds(id: str, default: float) -> io.Float.Input:
            return io.Float.Input(id, default=default, min=0.0, max=1000.0, step=0.1)

        return io.Schema(
            node_id="ConditioningStableAudio",
            category="conditioning",
            inputs=[*pair_inputs(), seconds("seconds_start", 0.0), seconds("seconds_total", 47.0)],
            outputs=pair_outputs(),
        )

    @classmethod
    def execute(
        cls, positive: Any, negative: Any, seconds_start: float, seconds_total: float
    ) -> io.NodeOutput:
        values = {"seconds_start": seconds_start, "seconds_total": seconds_total}
        return io.NodeOutput(
            node_helpers.conditioning_set_values(positive, values),
            node_helpers.conditioning_set_values(negative, values),
        )

    append = execute


def check_sound(vae: Any) -> None:
    """Refuse autoencoders of pictures, and that of LTX-2, whose latents have two axes.

    Raises:
        ValueError: It is one.
    """
    if hasattr(vae, "latent_frequency_bins"):
        raise ValueError(
            "vae: found the sound autoencoder of LTX-2, which has nodes of its own; use "
            "LTXVAudioVAEEncode and LTXVAudioVAEDecode"
        )
    if getattr(vae, "output_channels", None) == COLOURS:
        raise ValueError(
            "vae: expected an autoencoder of sound, found one of pictures; connect that of the "
            "sound model"
        )


class VAEEncodeAudio(io.ComfyNode):
    """A sound as a latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VAEEncodeAudio",
            display_name="VAE Encode Audio",
            category="latent/audio",
            inputs=[io.Audio.Input("audio"), io.Vae.Input("vae")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, vae: Any, audio: Audio) -> io.NodeOutput:
        check_sound(vae)
        rate = getattr(vae, "audio_sample_rate", RATE)
        waveform = resample(audio["waveform"], audio["sample_rate"], rate)
        return io.NodeOutput({"samples": vae.encode(waveform.movedim(1, -1))})

    encode = execute


class VAEDecodeAudio(io.ComfyNode):
    """A latent as a sound, no louder than a few standard deviations."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VAEDecodeAudio",
            display_name="VAE Decode Audio",
            category="latent/audio",
            inputs=[io.Latent.Input("samples"), io.Vae.Input("vae")],
            outputs=[io.Audio.Output()],
        )

    @classmethod
    def execute(cls, vae: Any, samples: Latent) -> io.NodeOutput:
        check_sound(vae)
        waveform = vae.decode(samples["samples"]).movedim(-1, 1)
        spread = waveform.std(dim=(1, 2), keepdim=True) * LOUDEST
        rate = getattr(vae, "audio_sample_rate", RATE)
        return io.NodeOutput({"waveform": waveform / spread.clamp(min=1.0), "sample_rate": rate})

    decode = execute


NODES: tuple[type[io.ComfyNode], ...] = (
    EmptyLatentAudio,
    ConditioningStableAudio,
    VAEEncodeAudio,
    VAEDecodeAudio,
)
