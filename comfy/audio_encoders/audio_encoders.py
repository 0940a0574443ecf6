"""Audio encoders as nodes use them: from a file to the states that describe a sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from comfy.audio_encoders import wav2vec2, whisper
from comfy.audio_encoders.resampling import resample
from comfy.devices import placement, precision, residency
from comfy.patching.patcher import ModelPatcher
from comfy.weights.contents import contents_in_words
from comfy.weights.errors import WeightFileError
from comfy.weights.fill import IncompleteWeightsError, fill
from comfy.weights.state_dict import load_torch_file

WAV2VEC2_PREFIX, WHISPER_PREFIXES = "wav2vec2.", ("model.encoder.", "encoder.", "")
WAV2VEC2_MARK, WHISPER_MARK = "feature_projection.projection.weight", "embed_positions.weight"
# Activations for each sample: the first convolution of wav2vec 2.0 makes 512 channels of every five
# samples in float32, and three such are held at once.
SAMPLE_BYTES = 3 * 512 * 4 / 5
CHOICE = "choose wav2vec 2.0 (base or large) or Whisper, in the layout of the transformers library"


class AudioEncoderModel:
    """An audio encoder.

    Attributes:
        model: The network.
        patcher: The patcher around it.
        model_sample_rate: Samples a second of the sounds it takes.
        load_device, dtype: Where it runs, and the type that text encoders are kept in.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()
        self.model_sample_rate = whisper.RATE  # of wav2vec 2.0, too
        self.load_device = placement.text_encoder_device()
        self.dtype = precision.text_encoder_dtype(self.load_device)
        self.patcher: Any = ModelPatcher(
            self.model,
            load_device=self.load_device,
            offload_device=placement.text_encoder_offload_device(),
        )

    def load_sd(self, sd: dict[str, Tensor]) -> None:
        """Other weights for the network, by its keys.

        Raises:
            IncompleteWeightsError: Weights are missing or of other shapes.
        """
        fill(self.model, sd, "audio encoder")

    def get_sd(self) -> dict[str, Tensor]:
        """Weights by key."""
        return self.model.state_dict()

    def encode_audio(self, audio: Tensor, sample_rate: int) -> dict[str, Any]:
        """What is heard in sounds.

        Args:
            audio: Waveforms [B, C, samples]; channels are averaged.
            sample_rate: Their samples a second.
        Returns:
            ``encoded_audio``, the final states [B, T, D], 50 a second;
            ``encoded_audio_all_layers``, those before each layer and the final ones;
            ``audio_samples``, the length of the sounds at ``model_sample_rate``.
        Raises:
            ValueError: The sounds are of another form, or too short.
        """
        if audio.ndim != 3 or not audio.numel():
            raise ValueError(
                "audio: expected waveforms [batch, channels, samples], none of them 0, found "
                f"{list(audio.shape)}"
            )
        sound = resample(audio.float(), sample_rate, self.model_sample_rate)
        needed = sound.shape[0] * sound.shape[2] * SAMPLE_BYTES
        residency.load_models_gpu([self.patcher], memory_required=needed)

        def run() -> list[Tensor]:
            with torch.no_grad():
                return self.model(sound.to(self.load_device).mean(dim=1))

        resting = placement.intermediate_device()
        states = [one.to(resting) for one in residency.run_or_make_room(self.patcher, run)]
        return {
            "encoded_audio": states[-1],
            "encoded_audio_all_layers": states,
            "audio_samples": sound.shape[2],
        }


def wav2vec2_model(sd: Mapping[str, Tensor]) -> nn.Module | None:
    """A wav2vec 2.0 network, filled; None for other weights."""
    prefix = WAV2VEC2_PREFIX if WAV2VEC2_PREFIX + WAV2VEC2_MARK in sd else ""
    if prefix + WAV2VEC2_MARK not in sd:
        return None
    own = {key[len(prefix) :]: value for key, value in sd.items() if key.startswith(prefix)}
    weights = wav2vec2.merged_position_weight(own)
    model = wav2vec2.Wav2Vec2Model(wav2vec2.config_of(weights), device="meta")
    fill(model, weights, "wav2vec 2.0 encoder")
    return model


def whisper_model(sd: Mapping[str, Tensor]) -> nn.Module | None:
    """The encoder of a Whisper network, filled; None for other weights."""
    prefix = next((one for one in WHISPER_PREFIXES if one + WHISPER_MARK in sd), None)
    if prefix is None or prefix + "conv1.weight" not in sd:
        return None
    weights = {key[len(prefix) :]: value for key, value in sd.items() if key.startswith(prefix)}
    model = whisper.WhisperEncoder(whisper.config_of(weights), device="meta")
    fill(model, weights, "Whisper encoder")
    return model


def load_audio_encoder_from_sd(sd: Mapping[str, Tensor], prefix: str = "") -> AudioEncoderModel:
    """An audio encoder from tensors.

    Args:
        prefix: What its keys start with.
    Raises:
        IncompleteWeightsError: They are of no known audio encoder, or some are missing.
    """
    own = {key[len(prefix) :]: value for key, value in sd.items() if key.startswith(prefix)}
    try:
        model = wav2vec2_model(own) or whisper_model(own)
    except KeyError as error:
        raise IncompleteWeightsError(
            f"the audio encoder lacks {error}; fetch the file again"
        ) from error
    if model is None:
        raise IncompleteWeightsError(f"no known audio encoder: {contents_in_words(sorted(sd))}")
    return AudioEncoderModel(model)


def load(path: str) -> AudioEncoderModel:
    """An audio encoder from a file.

    Raises:
        WeightFileError: The file cannot be read or holds no such network.
    """
    try:
        return load_audio_encoder_from_sd(load_torch_file(path, safe_load=True))
    except (IncompleteWeightsError, ValueError) as error:
        raise WeightFileError(path, str(error), CHOICE) from error
