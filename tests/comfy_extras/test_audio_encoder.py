"""Audio encoders through their nodes, as far as what Wan's nodes make of what they heard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import folder_paths
from comfy_extras.nodes_audio_encoder import AudioEncoderEncode, AudioEncoderLoader
from comfy_extras.wan.sound import WanSoundImageToVideo, humo_states
from tests.comfy.audio_encoders.test_audio_encoders import (
    LAYERS,
    WIDTH,
    sounds,
    wav2vec2_weights,
    whisper_weights,
)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    places = dict(folder_paths.folder_names_and_paths)
    places["audio_encoders"] = ([str(tmp_path)], {".safetensors"})
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", places)
    save_file(wav2vec2_weights(True), tmp_path / "wav2vec2.safetensors")
    save_file(whisper_weights(), tmp_path / "whisper.safetensors")
    return tmp_path


def test_a_speaking_person_moves_with_what_wav2vec2_heard(files: Path) -> None:
    encoder = AudioEncoderLoader.execute("wav2vec2.safetensors")[0]
    audio = {"waveform": sounds(96000, 1, 2), "sample_rate": 32000}
    heard = AudioEncoderEncode.execute(encoder, audio)[0]
    assert heard["audio_samples"] == 48000
    assert heard["encoded_audio"].shape == (1, 149, WIDTH)
    text = [[torch.zeros(1, 1, 4), {}]]
    made = WanSoundImageToVideo.execute(text, text, None, 32, 32, 13, 1, audio_encoder_output=heard)
    assert made[0][0][1]["audio_embed"].shape == (1, LAYERS + 1, WIDTH, 16)


def test_humo_wants_the_large_whisper(files: Path) -> None:
    encoder = AudioEncoderLoader.execute("whisper.safetensors")[0]
    audio = {"waveform": sounds(8000, 1), "sample_rate": 16000}
    heard = AudioEncoderEncode.execute(encoder, audio)[0]
    with pytest.raises(ValueError, match=f"Whisper large has them, found {LAYERS + 1} of width"):
        humo_states(heard)
    large = {
        "encoded_audio_all_layers": [torch.ones(1, 50, 1280)] * 33,
        "audio_samples": heard["audio_samples"],
    }
    assert humo_states(large).shape == (12, 5, 1280)
