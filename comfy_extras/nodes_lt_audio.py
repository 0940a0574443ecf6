"""The sound that LTX-2 makes with its pictures: its autoencoder and latents."""

from __future__ import annotations

from typing import Any

import folder_paths
from comfy.devices import placement
from comfy.vae import ltx_audio
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of
from comfy_nodes.latent_basics import empty_samples
from comfy_nodes.loaders import load_text_encoders

Latent = dict[str, Any]
NEEDED = ("latent_channels", "latent_frequency_bins", "num_of_latents_from_frames")


def check_sound_of_ltx(audio_vae: Any) -> None:
    """Refuse other autoencoders.

    Raises:
        ValueError: It is one.
    """
    if any(not hasattr(audio_vae, name) for name in NEEDED):
        raise ValueError(
            "audio_vae: expected the sound autoencoder of LTX video, found another autoencoder "
            f"({type(audio_vae).__name__}), which does not say how long its latents are; load it "
            "with LTXVAudioVAELoader"
        )


def audio_vae_input() -> io.Vae.Input:
    """Declaration of the autoencoder."""
    return io.Vae.Input("audio_vae", display_name="Audio VAE")


class LTXVAudioVAELoader(io.ComfyNode):
    """Loads the sound autoencoder of a checkpoint."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXVAudioVAELoader",
            display_name="LTXV Audio VAE Loader",
            category="audio",
            inputs=[
                io.Combo.Input(
                    "ckpt_name",
                    options=folder_paths.get_filename_list("checkpoints"),
                    tooltip="A checkpoint of LTX-2.",
                )
            ],
            outputs=[io.Vae.Output(display_name="Audio VAE")],
        )

    @classmethod
    def execute(cls, ckpt_name: str) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise("checkpoints", ckpt_name)
        return io.NodeOutput(ltx_audio.load(path))


class LTXAVTextEncoderLoader(io.ComfyNode):
    """Loads Gemma 3 12B with the connectors of a checkpoint, which read its states."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXAVTextEncoderLoader",
            display_name="LTXV Audio Text Encoder Loader",
            category="advanced/loaders",
            description="Loads the text encoder of LTX-2: Gemma 3 12B, and what a checkpoint of "
            "LTX-2 has to read it with.",
            inputs=[
                io.Combo.Input(
                    "text_encoder", options=folder_paths.get_filename_list("text_encoders")
                ),
                io.Combo.Input("ckpt_name", options=folder_paths.get_filename_list("checkpoints")),
            ],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(cls, text_encoder: str, ckpt_name: str) -> io.NodeOutput:
        names = {"text_encoders": text_encoder, "checkpoints": ckpt_name}
        paths = [folder_paths.get_full_path_or_raise(*place) for place in names.items()]
        return io.NodeOutput(load_text_encoders(paths, "ltxv", "default"))


class LTXVAudioVAEEncode(io.ComfyNode):
    """A sound as a latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXVAudioVAEEncode",
            display_name="LTXV Audio VAE Encode",
            category="audio",
            inputs=[io.Audio.Input("audio"), audio_vae_input()],
            outputs=[io.Latent.Output(display_name="Audio Latent")],
        )

    @classmethod
    def execute(cls, audio: dict[str, Any], audio_vae: Any) -> io.NodeOutput:
        check_sound_of_ltx(audio_vae)
        made = {"samples": audio_vae.encode(audio), "type": "audio"}
        return io.NodeOutput({**made, "sample_rate": int(audio_vae.sample_rate)})


class LTXVAudioVAEDecode(io.ComfyNode):
    """A latent as a sound; of one with pictures, its sound."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXVAudioVAEDecode",
            display_name="LTXV Audio VAE Decode",
            category="audio",
            inputs=[io.Latent.Input("samples"), audio_vae_input()],
            outputs=[io.Audio.Output(display_name="Audio")],
        )

    @classmethod
    def execute(cls, samples: Latent, audio_vae: Any) -> io.NodeOutput:
        check_sound_of_ltx(audio_vae)
        latent = samples["samples"]
        if getattr(latent, "is_nested", False):
            latent = latent.unbind()[-1]
        rate = int(audio_vae.output_sample_rate)
        return io.NodeOutput({"waveform": audio_vae.decode(latent), "sample_rate": rate})


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
                audio_vae_input(),
            ],
            outputs=[io.Latent.Output(display_name="Latent")],
        )

    @classmethod
    def execute(
        cls, frames_number: int, frame_rate: int, batch_size: int, audio_vae: Any
    ) -> io.NodeOutput:
        check_sound_of_ltx(audio_vae)
        length = audio_vae.num_of_latents_from_frames(frames_number, frame_rate)
        shape = (batch_size, audio_vae.latent_channels, length, audio_vae.latent_frequency_bins)
        made = {"samples": empty_samples(shape, placement.intermediate_device()), "type": "audio"}
        rate = getattr(audio_vae, "sample_rate", None)
        if rate is not None:
            made["sample_rate"] = int(rate)
        return io.NodeOutput(made)


comfy_entrypoint = entrypoint_of(
    LTXVAudioVAELoader,
    LTXVAudioVAEEncode,
    LTXVAudioVAEDecode,
    LTXVEmptyLatentAudio,
    LTXAVTextEncoderLoader,
)
