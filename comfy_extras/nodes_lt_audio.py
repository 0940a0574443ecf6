"""Latents of the sound that LTX video makes with its pictures."""

from __future__ import annotations

from typing import Any

from comfy.devices import placement
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of
from comfy_nodes.latent_basics import empty_samples

NEEDED = ("latent_channels", "latent_frequency_bins", "num_of_latents_from_frames")


class LTXVEmptyLatentAudio(io.ComfyNode):
    """An empty latent of sound that lasts as long as some frames."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def count(id: str, default: int, most: int, step: int | None = 1) -> io.Int.Input:
            display = io.NumberDisplay.number
            return io.Int.Input(
                id, default=default, min=1, max=most, step=step, display_mode=display
            )

        return io.Schema(
            node_id="LTXVEmptyLatentAudio",
            display_name="LTXV Empty Latent Audio",
            category="latent/audio",
            inputs=[
                count("frames_number", 97, 1000),
                count("frame_rate", 25, 1000),
                count("batch_size", 1, 4096, None),
                io.Vae.Input("audio_vae", display_name="Audio VAE"),
            ],
            outputs=[io.Latent.Output(display_name="Latent")],
        )

    @classmethod
    def execute(
        cls, frames_number: int, frame_rate: int, batch_size: int, audio_vae: Any
    ) -> io.NodeOutput:
        if any(not hasattr(audio_vae, name) for name in NEEDED):
            raise ValueError(
                "audio_vae: expected the sound autoencoder of LTX video, found another autoencoder "
                f"({type(audio_vae).__name__}), which does not say how long its latents are"
            )
        length = audio_vae.num_of_latents_from_frames(frames_number, frame_rate)
        shape = (batch_size, audio_vae.latent_channels, length, audio_vae.latent_frequency_bins)
        made = {"samples": empty_samples(shape, placement.intermediate_device()), "type": "audio"}
        rate = getattr(audio_vae, "sample_rate", None)
        if rate is not None:
            made["sample_rate"] = int(rate)
        return io.NodeOutput(made)


comfy_entrypoint = entrypoint_of(LTXVEmptyLatentAudio)
