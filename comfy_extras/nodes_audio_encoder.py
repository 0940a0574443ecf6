"""Networks that listen to sounds, for video models that move with them."""

from __future__ import annotations

from typing import Any

import folder_paths
from comfy.audio_encoders import audio_encoders
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of


class AudioEncoderLoader(io.ComfyNode):
    """Loads a network that listens to sounds."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AudioEncoderLoader",
            category="loaders",
            inputs=[
                io.Combo.Input(
                    "audio_encoder_name",
                    options=folder_paths.get_filename_list("audio_encoders"),
                ),
            ],
            outputs=[io.AudioEncoder.Output()],
        )

    @classmethod
    def execute(cls, audio_encoder_name: str) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise("audio_encoders", audio_encoder_name)
        return io.NodeOutput(audio_encoders.load(path))


class AudioEncoderEncode(io.ComfyNode):
    """Listens to a sound."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AudioEncoderEncode",
            category="conditioning",
            inputs=[io.AudioEncoder.Input("audio_encoder"), io.Audio.Input("audio")],
            outputs=[io.AudioEncoderOutput.Output()],
        )

    @classmethod
    def execute(cls, audio_encoder: Any, audio: dict[str, Any]) -> io.NodeOutput:
        heard = audio_encoder.encode_audio(audio["waveform"], audio["sample_rate"])
        return io.NodeOutput(heard)


comfy_entrypoint = entrypoint_of(AudioEncoderLoader, AudioEncoderEncode)
