"""Sounds and videos are read, changed and written."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import folder_paths
from comfy_api.latest import InputImpl, Types
from comfy_api.latest.ui.audio import write_audio
from comfy_extras import nodes_ace, nodes_video
from comfy_extras.audio import editing, files, latents
from comfy_extras.audio.waveforms import load_audio, resample

RATE = 8000


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    """Output and input folder of this test."""
    before = folder_paths.get_output_directory(), folder_paths.get_input_directory()
    folder_paths.set_output_directory(str(tmp_path))
    folder_paths.set_input_directory(str(tmp_path))
    yield tmp_path
    folder_paths.set_output_directory(before[0])
    folder_paths.set_input_directory(before[1])


def tone(hertz: float, seconds: float, rate: int = RATE, channels: int = 1) -> dict[str, Any]:
    time = torch.arange(round(seconds * rate)) / rate
    wave = torch.sin(2 * math.pi * hertz * time) * 0.5
    return {"waveform": wave.repeat(1, channels, 1), "sample_rate": rate}


def test_silence_has_the_asked_length() -> None:
    made = editing.EmptyAudio.execute(0.5, RATE, 2)[0]
    assert made["waveform"].shape == (1, 2, 4000)
    assert made["sample_rate"] == RATE


def test_a_part_is_cut_out_from_either_end() -> None:
    sound = tone(100, 1.0)
    trim = editing.TrimAudioDuration.execute
    assert torch.equal(trim(sound, 0.25, 0.5)[0]["waveform"], sound["waveform"][..., 2000:6000])
    assert torch.equal(trim(sound, -0.25, 9.0)[0]["waveform"], sound["waveform"][..., 6000:])
    with pytest.raises(ValueError, match=r"the sound has 1\.00 s"):
        trim(sound, 2.0, 1.0)


def test_channels_are_taken_apart_and_joined() -> None:
    sound = {"waveform": torch.rand(1, 2, 10), "sample_rate": RATE}
    parts = editing.SplitAudioChannels.execute(sound)
    left, right = parts[0], parts[1]
    assert torch.equal(left["waveform"], sound["waveform"][:, :1])
    assert torch.equal(right["waveform"], sound["waveform"][:, 1:])
    with pytest.raises(ValueError, match="audio: expected a sound of 2 channels, found 1"):
        editing.SplitAudioChannels.execute(left)
    joined = editing.AudioConcat.execute(left, sound, "before")[0]["waveform"]
    assert torch.equal(joined[..., :10], sound["waveform"])
    assert torch.equal(joined[:, 1, 10:], left["waveform"][:, 0])


def test_mixing_keeps_the_first_length_and_never_clips() -> None:
    loud = {"waveform": torch.full((1, 1, 6), 0.8), "sample_rate": RATE}
    short = {"waveform": torch.full((1, 1, 3), 0.8), "sample_rate": RATE}
    added = editing.AudioMerge.execute(loud, short, "add")[0]["waveform"]
    assert torch.allclose(added, torch.tensor([1.0] * 3 + [0.5] * 3))
    assert torch.allclose(
        editing.AudioMerge.execute(loud, short, "mean")[0]["waveform"][0, 0, :3],
        torch.tensor(0.8),
    )
    assert editing.AudioMerge.execute(loud, loud, "subtract")[0]["waveform"].abs().max() == 0


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (
            (2, 2, 9),
            (3, 2, 9),
            r"audio2: expected one sound or as many as audio1 has \(2\), found 3",
        ),
        ((1, 2, 9), (1, 6, 9), r"audio2: expected one channel or as many as audio1 has \(2\), fou"),
    ],
)
def test_sounds_that_do_not_fit_together_are_named(
    first: tuple[int, ...], second: tuple[int, ...], told: str
) -> None:
    sounds = [{"waveform": torch.zeros(shape), "sample_rate": RATE} for shape in (first, second)]
    for join, how in ((editing.AudioConcat, "after"), (editing.AudioMerge, "add")):
        with pytest.raises(ValueError, match=told):
            join.execute(*sounds, how)


def test_one_sound_and_one_channel_serve_for_all() -> None:
    many, one = torch.rand(3, 6, 4), torch.rand(1, 1, 4)
    sounds = [{"waveform": waveform, "sample_rate": RATE} for waveform in (many, one)]
    joined = editing.AudioConcat.execute(*sounds, "after")[0]["waveform"]
    assert torch.equal(joined, torch.cat([many, one.expand(3, 6, 4)], dim=-1))


def test_volume_is_in_decibels() -> None:
    sound = tone(100, 0.1)
    softer = editing.AudioAdjustVolume.execute(sound, -20)[0]["waveform"]
    assert torch.allclose(softer, sound["waveform"] * 0.1)


@pytest.mark.parametrize(("rate", "wanted"), [(8000, 16000), (16000, 8000), (44100, 48000)])
def test_a_tone_keeps_its_pitch_at_another_rate(rate: int, wanted: int) -> None:
    given, expected = tone(440, 0.2, rate), tone(440, 0.2, wanted)
    made = resample(given["waveform"], rate, wanted)
    assert abs(made.shape[-1] - expected["waveform"].shape[-1]) <= 1
    middle = slice(500, min(made.shape[-1], expected["waveform"].shape[-1]) - 500)
    assert (made[..., middle] - expected["waveform"][..., middle]).abs().max() < 2e-3


def test_rates_are_matched_before_sounds_meet() -> None:
    joined = editing.AudioConcat.execute(tone(100, 0.5), tone(100, 0.5, 16000), "after")[0]
    assert joined["sample_rate"] == 16000
    assert joined["waveform"].shape == (1, 2, 16000)


def test_a_saved_sound_is_loaded_again(output: Path) -> None:
    sound = tone(440, 0.25, 48000, 2)
    for node, suffix in (
        (files.SaveAudio, "flac"),
        (files.SaveAudioMP3, "mp3"),
        (files.SaveAudioOpus, "opus"),
    ):
        shown = node.execute(sound, "sound").ui.as_dict()["audio"][0]
        assert shown["filename"].endswith(suffix)
        back = load_audio(str(output / shown["filename"]))
        assert back["sample_rate"] == 48000
        seconds = back["waveform"].shape[-1] / 48000
        assert seconds == pytest.approx(0.25, abs=0.1)
        if suffix == "flac":
            assert (back["waveform"] - sound["waveform"]).abs().max() < 1e-3
            assert files.LoadAudio.execute(shown["filename"])[0]["waveform"].shape[1] == 2
            assert files.input_sounds() == [shown["filename"]]
    assert files.LoadAudio.validate_inputs("absent.flac") == "Invalid audio file: absent.flac"
    (output / "text.flac").write_text("no sound at all", encoding="utf-8")
    with pytest.raises(ValueError, match=r"text\.flac"):
        load_audio(str(output / "text.flac"))


class SoundVAE:
    """Every fourth sample."""

    audio_sample_rate = RATE

    def encode(self, pixels: Tensor) -> Tensor:
        return pixels.movedim(-1, 1)[..., ::4]

    def decode(self, latent: Tensor) -> Tensor:
        return (latent.repeat_interleave(4, dim=-1) * 100).movedim(1, -1)


def test_sounds_become_latents_and_are_kept_in_range() -> None:
    latent = latents.VAEEncodeAudio.execute(SoundVAE(), tone(100, 0.5, 16000))[0]
    assert latent["samples"].shape == (1, 1, 1000)
    made = latents.VAEDecodeAudio.execute(SoundVAE(), latent)[0]
    assert made["sample_rate"] == RATE
    assert made["waveform"].abs().max() < 1.0
    assert made["waveform"].std() == pytest.approx(0.2, abs=1e-3)


def test_models_are_told_length_and_lyrics() -> None:
    cond = [[torch.zeros(1), {}]]
    made = latents.ConditioningStableAudio.execute(cond, cond, 1.0, 9.0)
    assert made[0][0][1] == {"seconds_start": 1.0, "seconds_total": 9.0} == made[1][0][1]
    clip = SimpleNamespace(
        tokenize=lambda tags, lyrics: (tags, lyrics),
        encode_from_tokens_scheduled=lambda tokens: [[tokens, {}]],
    )
    song = nodes_ace.TextEncodeAceStepAudio.execute(clip, "rock", "la la", 0.5)[0]
    assert song == [[("rock", "la la"), {"lyrics_strength": 0.5}]]


# -- videos --------------------------------------------------------------------------------------


def frames(count: int = 4) -> Tensor:
    levels = torch.linspace(0.2, 0.8, count)
    return levels.reshape(-1, 1, 1, 1).expand(count, 32, 48, 3).contiguous()


def test_a_video_is_made_saved_loaded_and_taken_apart(output: Path) -> None:
    video = nodes_video.CreateVideo.execute(frames(), 12.0)[0]
    shown = nodes_video.SaveVideo.execute(video, "clip", "auto", "auto").ui.as_dict()
    name = shown["images"][0]["filename"]
    assert name.endswith(".mp4")
    assert shown["animated"] == [True]
    assert nodes_video.LoadVideo.validate_inputs(name) is True
    loaded = nodes_video.LoadVideo.execute(name)[0]
    images, audio, rate = (nodes_video.GetVideoComponents.execute(loaded)[n] for n in range(3))
    assert rate == 12.0
    assert audio is None
    assert (images - frames()).abs().max() < 0.05
    assert "Invalid video file" in str(nodes_video.LoadVideo.validate_inputs("absent.mp4"))
    del output


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="threads have no such priority")
def test_no_encoder_makes_the_worker_a_real_time_thread(output: Path) -> None:
    """SVT-AV1 does so as root: the machine would answer nobody else for as long as we compute."""
    before = os.sched_getscheduler(0)
    nodes_video.SaveWEBM.execute(frames(), "av1", 8.0, "web", 20.0)
    with pytest.raises(ValueError, match="take larger pictures"):
        nodes_video.SaveWEBM.execute(frames()[:, :1, :1], "av1", 8.0, "web", 20.0)
    assert os.sched_getscheduler(0) == before


@pytest.mark.parametrize("codec", ["vp9", "av1"])
def test_webm_keeps_pictures_and_rate(codec: str, output: Path) -> None:
    shown = nodes_video.SaveWEBM.execute(frames(), codec, 8.0, "web", 20.0).ui.as_dict()
    path = output / shown["images"][0]["filename"]
    parts = InputImpl.VideoFromFile(str(path)).get_components()
    assert parts.frame_rate == Fraction(8)
    assert parts.images.shape == (4, 32, 48, 3)
    assert (parts.images - frames()).abs().max() < 0.1


def test_the_sound_of_a_video_comes_along() -> None:
    video = nodes_video.CreateVideo.execute(frames(8), 8.0, tone(200, 1.0, 44100, 2))[0]
    parts = video.get_components()
    assert isinstance(parts, Types.VideoComponents)
    assert parts.audio is not None


def test_rates_without_a_common_divisor_take_little_memory() -> None:
    """191999 and 44100 Hz share no divisor: a filter for every phase would take 67 GB."""
    made = resample(tone(500, 0.05, 191999)["waveform"], 191999, 44100)
    expected = tone(500, 0.05, 44100)["waveform"]
    assert abs(made.shape[-1] - expected.shape[-1]) <= 1
    assert (made[..., 300:1900] - expected[..., 300:1900]).abs().max() < 2e-3


def test_a_sound_of_no_length_is_not_saved(output: Path) -> None:
    silence: Any = {"waveform": torch.zeros(1, 2, 0), "sample_rate": RATE}
    with pytest.raises(ValueError, match="audio: expected a sound"):
        files.SaveAudio.execute(silence, "none")


def test_a_picture_too_small_for_its_codec_is_named(output: Path) -> None:
    with pytest.raises(ValueError, match="images, codec: av1 does not encode pictures of 1 x 1"):
        nodes_video.SaveWEBM.execute(torch.zeros(1, 1, 1, 3), "av1", 24.0, "tiny", 32.0)
    assert not list(output.rglob("*"))


def test_nothing_is_left_of_a_sound_that_cannot_be_written(output: Path) -> None:
    with pytest.raises(ValueError, match="unknown mp3 quality"):
        write_audio(str(output / "a.mp3"), torch.zeros(1, 8000), 8000, "mp3", "9k", {})
    assert not list(output.rglob("*"))


def test_a_file_that_cannot_be_opened_is_no_sound(output: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .* as sound"):
        load_audio(str(output))


def test_a_recording_that_was_not_made_is_named() -> None:
    with pytest.raises(ValueError, match="nothing was recorded"):
        files.RecordAudio.execute("")


def test_a_damaged_picture_is_no_video_and_named(tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    path.write_text("<html>no picture</html>")
    with pytest.raises(ValueError, match=r"page\.png as a video"):
        InputImpl.VideoFromFile(str(path)).get_components()
