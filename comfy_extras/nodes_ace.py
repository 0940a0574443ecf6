"""Text and latents of ACE-Step and ACE-Step 1.5, which make songs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

import folder_paths
import node_helpers
from comfy.devices import placement
from comfy.families.ace_step15 import SILENCE, SILENCE_WANTED
from comfy.text_encoders.ace15 import Song
from comfy.text_encoders.codes15 import CodeChoice
from comfy_api.latest import io
from comfy_extras.declarations import batch_input, text_input
from comfy_extras.extension import entrypoint_of
from comfy_nodes.latent_basics import empty_samples

# A latent is a small picture of the sound's spectrum.
CHANNELS, BANDS = 8, 16
CELLS_A_SECOND = 44100 / 512 / 8
# Of ACE-Step 1.5 it is a line of cells, 25 a second.
CHANNELS_15, RATE_15, SAMPLES_OF_CELL_15 = 64, 48000, 1920
SILENCE_FILE = f"{SILENCE}.pt"
TIME_SIGNATURES = ["2", "3", "4", "6"]
LANGUAGES = [
    "ar", "az", "bg", "bn", "ca", "cs", "da", "de", "el", "en", "es", "fa", "fi", "fr",
    "he", "hi", "hr", "ht", "hu", "id", "is", "it", "ja", "ko", "la", "lt", "ms", "ne",
    "nl", "no", "pa", "pl", "pt", "ro", "ru", "sa", "sk", "sr", "sv", "sw", "ta", "te",
    "th", "tl", "tr", "uk", "ur", "vi", "yue", "zh", "unknown",
]  # fmt: skip
NOTES = [
    "C", "C#", "Db", "D", "D#", "Eb", "E", "F", "F#", "Gb", "G", "G#", "Ab", "A", "A#", "Bb", "B",
]  # fmt: skip
KEYS = [f"{note} {mode}" for mode in ("major", "minor") for note in NOTES]


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


class TextEncodeAceStepAudio15(io.ComfyNode):
    """What a song of ACE-Step 1.5 is to be, to conditioning."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TextEncodeAceStepAudio1.5",
            category="conditioning",
            inputs=[
                io.Clip.Input("clip"),
                text_input("tags"),
                text_input("lyrics"),
                io.Int.Input("seed", default=0, min=0, max=2**64 - 1, control_after_generate=True),
                io.Int.Input("bpm", default=120, min=10, max=300),
                io.Float.Input("duration", default=120.0, min=0.0, max=2000.0, step=0.1),
                io.Combo.Input("timesignature", options=TIME_SIGNATURES),
                io.Combo.Input("language", options=LANGUAGES, default="en"),
                io.Combo.Input("keyscale", options=KEYS),
                io.Boolean.Input(
                    "generate_audio_codes",
                    default=True,
                    tooltip="Let the language model write codes of the music first: slower and "
                    "better. Off where the model is given music to go by.",
                ),
                io.Float.Input("cfg_scale", default=2.0, min=0.0, max=100.0, step=0.1),
                io.Float.Input("temperature", default=0.85, min=0.0, max=2.0, step=0.01),
                io.Float.Input("top_p", default=0.9, min=0.0, max=2000.0, step=0.01),
                io.Int.Input("top_k", default=0, min=0, max=100),
                io.Float.Input("min_p", default=0.0, min=0.0, max=1.0, step=0.001),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(
        cls, clip: Any, tags: str, lyrics: str, seed: int, bpm: int, duration: float,
        timesignature: str, language: str, keyscale: str, generate_audio_codes: bool,
        cfg_scale: float, temperature: float, top_p: float, top_k: int, min_p: float = 0.0,
    ) -> io.NodeOutput:  # fmt: skip
        song = Song(tags, lyrics, bpm, duration, timesignature, language, keyscale)
        choice = CodeChoice(cfg_scale, temperature, top_p, top_k, min_p, seed)
        tokens = clip.tokenize(tags, song=song, choice=choice if generate_audio_codes else None)
        values = {SILENCE: silence_latent()}  # before the codes, which take long
        conditioning = clip.encode_from_tokens_scheduled(tokens)
        return io.NodeOutput(node_helpers.conditioning_set_values(conditioning, values))


def silence_latent() -> torch.Tensor:
    """Latent of silence ``[1, 64, cells]`` of the first file of its name in the models' folders.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It holds something else.
    """
    for kind in ("diffusion_models", "vae", "text_encoders", "checkpoints"):
        for folder in folder_paths.get_folder_paths(kind):
            path = Path(folder) / SILENCE_FILE
            if path.is_file():
                return read_silence(path)
    raise FileNotFoundError(
        f"{SILENCE_FILE} was not found, and ACE-Step 1.5 needs silence where there is no music "
        f"yet; {SILENCE_WANTED}"
    )


def read_silence(path: Path) -> torch.Tensor:
    """The one tensor of a file.

    Raises:
        ValueError: The file holds something else.
    """
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {SILENCE_WANTED}") from error
    if not isinstance(held, torch.Tensor) or held.ndim != 3 or not held.numel():
        raise ValueError(f"{path} holds no latent of silence; {SILENCE_WANTED}")
    return held.float()


class EmptyAceStep15LatentAudio(io.ComfyNode):
    """An empty latent of ACE-Step 1.5."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EmptyAceStep1.5LatentAudio",
            display_name="Empty Ace Step 1.5 Latent Audio",
            category="latent/audio",
            inputs=[
                io.Float.Input("seconds", default=120.0, min=1.0, max=1000.0, step=0.01),
                batch_input(),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, seconds: float, batch_size: int) -> io.NodeOutput:
        cells = round(seconds * RATE_15 / SAMPLES_OF_CELL_15)
        shape = (batch_size, CHANNELS_15, cells)
        samples = empty_samples(shape, placement.intermediate_device())
        return io.NodeOutput({"samples": samples, "type": "audio"})


comfy_entrypoint = entrypoint_of(
    TextEncodeAceStepAudio,
    EmptyAceStepLatentAudio,
    TextEncodeAceStepAudio15,
    EmptyAceStep15LatentAudio,
)
