"""Nodes that read and write sound files."""

from __future__ import annotations

import os

import folder_paths
import node_helpers
from comfy_api.latest import io, ui
from comfy_api.latest._input import AudioInput
from comfy_extras.audio.waveforms import load_audio


def input_sounds() -> list[str]:
    """Names of the files with sound in the input folder, sorted."""
    folder = folder_paths.get_input_directory()
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(folder_paths.filter_files_content_types(names, ["audio", "video"]))


class LoadAudio(io.ComfyNode):
    """Reads a sound."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LoadAudio",
            display_name="Load Audio",
            category="audio",
            inputs=[
                io.Combo.Input("audio", upload=io.UploadType.audio, options=input_sounds()),
            ],
            outputs=[io.Audio.Output()],
        )

    @classmethod
    def execute(cls, audio: str) -> io.NodeOutput:
        return io.NodeOutput(load_audio(folder_paths.get_annotated_filepath(audio)))

    @classmethod
    def fingerprint_inputs(cls, audio: str) -> str:
        return node_helpers.file_digest(folder_paths.get_annotated_filepath(audio))

    @classmethod
    def validate_inputs(cls, audio: str) -> bool | str:
        if not folder_paths.exists_annotated_filepath(audio):
            return f"Invalid audio file: {audio}"
        return True

    load = execute


class RecordAudio(io.ComfyNode):
    """Reads a sound that the browser recorded and uploaded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="RecordAudio",
            display_name="Record Audio",
            category="audio",
            inputs=[io.Custom("AUDIO_RECORD").Input("audio")],
            outputs=[io.Audio.Output()],
        )

    @classmethod
    def execute(cls, audio: str) -> io.NodeOutput:
        if not audio:
            raise ValueError("nothing was recorded; record a sound on the node before running it")
        return io.NodeOutput(load_audio(folder_paths.get_annotated_filepath(audio)))

    load = execute


def prefix_input() -> io.String.Input:
    """Beginning of the file's name."""
    return io.String.Input("filename_prefix", default="audio/ComfyUI")


class SaveAudio(io.ComfyNode):
    """Writes a sound without loss."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveAudio",
            display_name="Save Audio (FLAC)",
            category="audio",
            is_output_node=True,
            inputs=[io.Audio.Input("audio"), prefix_input()],
            outputs=[],
        )

    @classmethod
    def execute(
        cls, audio: AudioInput, filename_prefix: str = "ComfyUI", format: str = "flac"
    ) -> io.NodeOutput:
        shown = ui.AudioSaveHelper.get_save_audio_ui(audio, filename_prefix, cls, format)
        return io.NodeOutput(ui=shown)

    save_flac = execute


class SaveAudioMP3(io.ComfyNode):
    """Writes a sound as MP3."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveAudioMP3",
            display_name="Save Audio (MP3)",
            category="audio",
            is_output_node=True,
            inputs=[
                io.Audio.Input("audio"),
                prefix_input(),
                io.Combo.Input("quality", options=["V0", "128k", "320k"], default="V0"),
            ],
            outputs=[],
        )

    @classmethod
    def execute(
        cls,
        audio: AudioInput,
        filename_prefix: str = "ComfyUI",
        format: str = "mp3",
        quality: str = "128k",
    ) -> io.NodeOutput:
        save = ui.AudioSaveHelper.get_save_audio_ui
        return io.NodeOutput(ui=save(audio, filename_prefix, cls, format, quality))

    save_mp3 = execute


class SaveAudioOpus(io.ComfyNode):
    """Writes a sound as Opus."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        rates = ["64k", "96k", "128k", "192k", "320k"]
        return io.Schema(
            node_id="SaveAudioOpus",
            display_name="Save Audio (Opus)",
            category="audio",
            is_output_node=True,
            inputs=[
                io.Audio.Input("audio"),
                prefix_input(),
                io.Combo.Input("quality", options=rates, default="128k"),
            ],
            outputs=[],
        )

    @classmethod
    def execute(
        cls,
        audio: AudioInput,
        filename_prefix: str = "ComfyUI",
        format: str = "opus",
        quality: str = "128k",
    ) -> io.NodeOutput:
        save = ui.AudioSaveHelper.get_save_audio_ui
        return io.NodeOutput(ui=save(audio, filename_prefix, cls, format, quality))

    save_opus = execute


class SaveAudioAdvanced(io.ComfyNode):
    """Writes a sound in the form that is chosen, and hands it on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        rates = ["64k", "96k", "128k", "192k", "320k"]
        qualities = {"flac": [], "mp3": ["V0", "128k", "320k"], "opus": rates}
        defaults = {"mp3": "V0", "opus": "128k"}
        formats = [
            io.DynamicCombo.Option(
                name,
                [io.Combo.Input("quality", options=known, default=defaults[name])] if known else [],
            )
            for name, known in qualities.items()
        ]
        return io.Schema(
            node_id="SaveAudioAdvanced",
            display_name="Save Audio (Advanced)",
            category="audio",
            description="Saves a sound to the output folder, with its workflow inside.",
            is_output_node=True,
            inputs=[
                io.Audio.Input("audio"),
                prefix_input(),
                io.DynamicCombo.Input("format", options=formats),
            ],
            outputs=[io.Audio.Output(display_name="audio")],
        )

    @classmethod
    def execute(
        cls, audio: AudioInput, filename_prefix: str, format: dict[str, str]
    ) -> io.NodeOutput:
        quality = format.get("quality", "128k")
        save = ui.AudioSaveHelper.get_save_audio_ui
        return io.NodeOutput(audio, ui=save(audio, filename_prefix, cls, format["format"], quality))


class PreviewAudio(io.ComfyNode):
    """Plays a sound on the node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="PreviewAudio",
            display_name="Preview Audio",
            category="audio",
            is_output_node=True,
            inputs=[io.Audio.Input("audio")],
            outputs=[],
        )

    @classmethod
    def execute(cls, audio: AudioInput) -> io.NodeOutput:
        return io.NodeOutput(ui=ui.PreviewAudio(audio, cls=cls))

    save_flac = execute


NODES: tuple[type[io.ComfyNode], ...] = (
    LoadAudio,
    RecordAudio,
    SaveAudio,
    SaveAudioMP3,
    SaveAudioOpus,
    SaveAudioAdvanced,
    PreviewAudio,
)
