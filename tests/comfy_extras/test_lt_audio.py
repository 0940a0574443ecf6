"""The sound of LTX-2 through its nodes: small files of the published layout, and another
implementation's numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import folder_paths
from comfy.devices import memory, residency
from comfy.ldm.lightricks.audio_vae import AudioAutoencoder, AudioVAEConfig
from comfy.ldm.lightricks.smooth_activation import at_rate
from comfy.ldm.lightricks.vocoder import Vocoder, VocoderConfig
from comfy.ldm.lightricks.wide_vocoder import WideVocoder, WideVocoderConfig
from comfy.nested_tensor import NestedTensor
from comfy.vae.ltx_audio import AudioVAE, SoundNetworks, Spectra
from comfy.weights.errors import WeightFileError
from comfy_extras import nodes_lt_audio as sound
from comfy_extras.audio.latents import VAEDecodeAudio
from comfy_nodes.vae import VAEDecode
from tests.comfy.families.test_transformers import autoencoder, random_like
from tests.support.accelerator import simulated_accelerator

SIZES = AudioVAEConfig(ch=8, num_res_blocks=1, z_channels=4, bands=16)
VOCODER = VocoderConfig(spectrum=32, width=64)
SMOOTH: dict[str, Any] = {
    "is_smooth": True,
    "last_bias": False,
    "block_kernels": (3,),
    "dilations": ((1, 3),),
}
WIDE = WideVocoderConfig(
    VocoderConfig(32, 16, rates=(5, 4, 8), kernels=(11, 8, 8), end="clamp", **SMOOTH),
    VocoderConfig(16, 8, rates=(15, 16), kernels=(15, 16), end="none", **SMOOTH),
    window=32, bands=8,
)  # fmt: skip
# Of a low pass to half the band, as published files hold it: a sinc under a Kaiser window.
TAPS = [0.002029, 0.009389, -0.025543, -0.057657, 0.128573, 0.44321]
CELL = 640  # samples of a cell at 16000 hertz


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def softened(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a vocoder whose sounds are not all as loud as can be."""
    return {k: v * (0.4 if v.ndim > 1 else 0.02) for k, v in weights.items()}


def weights() -> dict[str, Tensor]:
    made = random_like(SoundNetworks(SIZES, VOCODER), 5)
    made |= softened({k: v for k, v in made.items() if k.startswith("vocoder.")})
    generator = torch.Generator().manual_seed(6)
    for name in ("std-of-means", "mean-of-means"):
        made[f"audio_vae.per_channel_statistics.{name}"] = torch.rand(16, generator=generator) + 0.5
    return made


def wide_weights() -> dict[str, Tensor]:
    """The vocoder of LTX-2.3, with filters that are filters."""
    made = softened(random_like(WideVocoder(WIDE), 5))
    taps = torch.tensor([TAPS + TAPS[::-1]])[None]
    made = {k: taps.clone() if k.endswith("filter") else v for k, v in made.items()}
    return {key: 0.5 * value if "conv_post" in key else value for key, value in made.items()}


def wide_file() -> dict[str, Tensor | None]:
    """What a file of LTX-2.3 has, and has not, beside one of LTX-2."""
    gone = [key for key in weights() if key.startswith("vocoder.")]
    return {**dict.fromkeys(gone), **{f"vocoder.{k}": v for k, v in wide_weights().items()}}


def wide_told(**bwe: Any) -> dict[str, Any]:
    """The header of such a file, with other entries for the second vocoder."""
    told = {"upsample_rates": [15, 16], "resblock_dilation_sizes": [[1, 3]], **bwe}
    first = {"upsample_rates": [5, 4, 8], "resblock_dilation_sizes": [[1, 3]]}
    return {"vocoder": {"vocoder": {**first, "use_tanh_at_final": False}, "bwe": told}}


WIDE_HEADER = wide_told()


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    entry = ([str(tmp_path)], folder_paths.supported_pt_extensions)
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "checkpoints", entry)
    return tmp_path


def loaded(folder: Path, changes: dict[str, Tensor | None] | None = None, **header: Any) -> Any:
    """The file's autoencoder, by its node; a change of None leaves a weight out."""
    tensors = {**weights(), **(changes or {})}
    kept = {key: value.contiguous() for key, value in tensors.items() if value is not None}
    told = {"config": json.dumps(header)} if header else None
    save_file(kept, folder / "ltx2.safetensors", metadata=told)
    return sound.LTXVAudioVAELoader.execute("ltx2.safetensors")[0]


def test_a_sound_becomes_a_latent_and_a_sound(checkpoints: Path) -> None:
    vae = loaded(checkpoints)
    waveform = noise(2, 2, 11 * CELL)
    audio = {"waveform": waveform, "sample_rate": 16000}
    made = sound.LTXVAudioVAEEncode.execute(audio, vae)[0]
    assert made["samples"].shape == (2, 4, 12, 4)
    assert (made["type"], made["sample_rate"]) == ("audio", 16000)
    heard = sound.LTXVAudioVAEDecode.execute(made, vae)[0]
    assert heard["sample_rate"] == 24000
    assert heard["waveform"].shape == (2, 2, (4 * 12 - 3) * 240)
    assert heard["waveform"].abs().max() <= 1
    one = sound.LTXVAudioVAEEncode.execute({**audio, "waveform": waveform[1:]}, vae)[0]
    torch.testing.assert_close(one["samples"], made["samples"][1:])


def test_a_latent_is_made_of_spectra_as_the_formula_has_it(checkpoints: Path) -> None:
    vae = loaded(checkpoints)
    waveform = noise(1, 2, 4 * CELL)
    latent = vae.encode({"waveform": waveform, "sample_rate": 16000})
    spectrogram = Spectra().of(waveform, 16)
    file = weights()
    mean, spread = (
        file[f"audio_vae.per_channel_statistics.{name}"].reshape(4, 1, 4)
        for name in ("mean-of-means", "std-of-means")
    )
    networks = vae.first_stage_model
    expected = (networks.audio_vae.encoder(spectrogram)[:, :4] - mean) / spread
    torch.testing.assert_close(latent, expected)
    whole = networks.vocoder(networks.audio_vae.decoder(latent * spread + mean))
    torch.testing.assert_close(vae.decode(latent), whole)


def test_a_pure_tone_stands_in_the_band_of_its_pitch() -> None:
    seconds = torch.arange(16000) / 16000
    tones = torch.stack([torch.sin(2 * math.pi * pitch * seconds) for pitch in (400.0, 3000.0)])
    spectra = Spectra().of(tones[:, None], 64)
    assert spectra.shape == (2, 1, 101, 64)
    # Bands are 45.245 / 65 mel apart; up to 1000 hertz a mel is 200 / 3 hertz, then a logarithm.
    width = (15 + 27 * math.log(8) / math.log(6.4)) / 65
    mels = [400 * 3 / 200, 15 + 27 * math.log(3) / math.log(6.4)]
    for spectrum, mel in zip(spectra[:, 0, 50], mels):
        assert abs(int(spectrum.argmax()) + 1 - mel / width) < 1
        assert spectrum.max() - spectrum.median() > 4
    assert Spectra().of(torch.zeros(1, 1, 2000), 64).unique().tolist() == [
        pytest.approx(math.log(1e-5))
    ]


def test_another_rate_and_one_channel_are_heard_alike(checkpoints: Path) -> None:
    vae = loaded(checkpoints)
    seconds = torch.arange(48000) / 48000
    tone = torch.sin(2 * math.pi * 440 * seconds)[None, None]
    want = vae.encode({"waveform": tone[..., ::3].expand(1, 2, -1), "sample_rate": 16000})
    found = vae.encode({"waveform": tone, "sample_rate": 48000})
    inside = (found - want)[:, :, 2:-2]
    assert inside.std() < 0.1 * want.std()


def test_a_nested_latent_gives_its_sound_and_an_empty_one_fits(checkpoints: Path) -> None:
    vae = loaded(checkpoints)
    empty = sound.LTXVEmptyLatentAudio.execute(97, 24, 2, vae)[0]["samples"]
    assert empty.shape == (2, 4, 102, 4)
    latent = noise(1, 4, 5, 4)
    nested = NestedTensor([torch.zeros(1, 128, 2, 2, 2), latent])
    alone = sound.LTXVAudioVAEDecode.execute({"samples": latent}, vae)[0]["waveform"]
    both = sound.LTXVAudioVAEDecode.execute({"samples": nested}, vae)[0]["waveform"]
    assert torch.equal(both, alone)


def test_the_past_alone_is_heard(checkpoints: Path) -> None:
    networks = loaded(checkpoints).first_stage_model.audio_vae
    spectrogram = noise(1, 2, 21, 16)
    changed = spectrogram.clone()
    changed[:, :, 17:] += 1
    one, other = networks.encode(spectrogram), networks.encode(changed)
    assert torch.equal(one[:, :, :5], other[:, :, :5])
    assert not torch.equal(one[:, :, 5:], other[:, :, 5:])


def test_both_networks_give_what_another_implementation_gives() -> None:
    """The implementation of the diffusers library, on the same weights."""
    network = AudioAutoencoder(SIZES).eval()
    network.load_state_dict(random_like(network, 5))
    vocoder = Vocoder(VOCODER).eval()
    vocoder.load_state_dict(softened(random_like(vocoder, 3)))
    found = {
        "moments": network.encoder(noise(1, 2, 23, 16))[0, :3, 3, 2],
        "spectra": network.decoder(noise(1, 4, 6, 4))[0, :, 7, 5],
        "sound": vocoder(noise(1, 2, 9, 16))[0, :, 1000],
    }
    expected = {
        "moments": [-0.28717, 1.62448, 20.52433],
        "spectra": [1.16592, -1.03173],
        "sound": [-0.20269, -1.0],
    }
    for name, value in found.items():
        torch.testing.assert_close(value, torch.tensor(expected[name]), rtol=1e-4, atol=1e-4)


def test_the_wide_vocoder_gives_what_another_implementation_gives() -> None:
    """The implementation of the diffusers library, on the same weights."""
    vocoder = WideVocoder(WIDE)
    vocoder.load_state_dict(wide_weights())
    made = vocoder(noise(1, 2, 9, 16))
    assert made.shape == (1, 2, 9 * 480)
    found = torch.cat([made[0, :, 1000], made[0, 0, 4000:4003]])
    expected = torch.tensor([0.21521, 0.46478, 0.13717, 0.19991, -0.43287])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_tone_at_a_higher_rate_is_the_same_tone() -> None:
    places = torch.arange(600) / 3
    tone = (2 * math.pi * 0.11 * places).sin()
    made = at_rate(tone[::3].expand(2, 1, -1), 3)
    assert made.shape == (2, 1, 600)
    torch.testing.assert_close(made[1, 0, 60:-60], tone[60:-60], rtol=0, atol=1e-2)


def test_a_file_of_a_later_version_makes_sounds_of_a_higher_rate(checkpoints: Path) -> None:
    vae = loaded(checkpoints, wide_file(), **WIDE_HEADER)
    assert vae.first_stage_model.vocoder.config == WIDE
    # The second vocoder, at 48000 hertz: one of two channels, twice, for 480 samples a spectrum.
    assert (WIDE.first.values, WIDE.values) == (2 * 160 * 2, 2 * 2 * 480)
    latent = noise(1, 4, 3, 4)
    made = sound.LTXVAudioVAEDecode.execute({"samples": latent}, vae)[0]
    assert made["sample_rate"] == 48000
    assert made["waveform"].shape == (1, 2, (4 * 3 - 3) * 480)
    networks = vae.first_stage_model
    spectrogram = networks.audio_vae.decode(latent)
    torch.testing.assert_close(made["waveform"], networks.vocoder(spectrogram))
    open_end = {**WIDE_HEADER["vocoder"]["vocoder"], "apply_final_activation": False}
    header = {"vocoder": {**WIDE_HEADER["vocoder"], "vocoder": open_end}}
    ends = [loaded(checkpoints, wide_file(), **one) for one in (header, WIDE_HEADER)]
    assert [one.first_stage_model.vocoder.config.first.end for one in ends] == ["none", "clamp"]


def test_published_files_have_a_place_for_every_key() -> None:
    networks = SoundNetworks(AudioVAEConfig(), VocoderConfig(), device="meta")
    shapes = {key: tuple(value.shape) for key, value in networks.state_dict().items()}
    assert shapes["audio_vae.encoder.down.0.downsample.conv.weight"] == (128, 128, 3, 3)
    assert shapes["audio_vae.encoder.down.1.block.0.nin_shortcut.conv.weight"] == (256, 128, 1, 1)
    assert shapes["audio_vae.decoder.up.2.upsample.conv.conv.weight"] == (512, 512, 3, 3)
    assert shapes["audio_vae.decoder.up.0.block.2.conv2.conv.weight"] == (128, 128, 3, 3)
    assert shapes["audio_vae.per_channel_statistics.std-of-means"] == (128,)
    assert shapes["vocoder.ups.0.weight"] == (1024, 512, 16)
    assert shapes["vocoder.resblocks.14.convs1.2.weight"] == (32, 32, 11)
    assert len([key for key in shapes if key.startswith("audio_vae.")]) == 102


def test_a_small_device_and_a_saved_file_give_the_same(checkpoints: Path) -> None:
    latent = noise(1, 4, 3, 4)
    with simulated_accelerator() as accelerator:
        vae = loaded(checkpoints)
        want = vae.decode(latent)
        peak = torch.accelerator.max_memory_allocated(0)
        residency.unload_all_models()
        accelerator.set_capacity(int(peak - 0.3 * memory.module_size(vae.first_stage_model)), 0)
        torch.testing.assert_close(vae.decode(latent), want)
        again = AudioVAE(vae.get_sd())
        residency.unload_all_models()
        torch.testing.assert_close(again.decode(latent), want)


@pytest.mark.parametrize(
    ("change", "header", "message"),
    [
        ({"audio_vae.decoder.conv_in.conv.weight": None}, {}, "no sound autoencoder of LTX-2"),
        ({"vocoder.conv_pre.weight": None}, {}, "lacks 'vocoder.conv_pre.weight'"),
        ({"vocoder.conv_post.bias": None}, {}, "lacks 1 key .vocoder.conv_post.bias"),
        ({"vocoder.bwe_generator.a": torch.ones(1)}, {}, "lacks 'vocoder.mel_stft.mel_basis'"),
        (wide_file(), wide_told(hop_length=70), "240 samples of 70 cannot make"),
        (wide_file(), wide_told(upsample_rates=[15, 8, 2]), "2 levels is told 3 rates"),
        (
            {**wide_file(), "vocoder.mel_stft.mel_basis": torch.ones(4, 17)},
            WIDE_HEADER,
            "takes 16 bands, and is given 4 of each of 2",
        ),
        ({}, {"vocoder": {"upsample_rates": [2, 2]}}, "5 levels is told 2 rates"),
        (
            {},
            {"audio_vae": {"model": {"params": {"ddconfig": {"causality_axis": "width"}}}}},
            "look back along 'width'",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_told(
    change: Any, header: Any, message: str, checkpoints: Path
) -> None:
    with pytest.raises(WeightFileError, match=rf"ltx2.safetensors: .*{message}.*To mend it"):
        loaded(checkpoints, change, **header)


def test_the_header_tells_how_spectra_are_made(checkpoints: Path) -> None:
    header = {
        "audio_vae": {
            "preprocessing": {"audio": {"sampling_rate": 8000}, "stft": {"hop_length": 80}}
        }
    }
    vae = loaded(checkpoints, **header)
    assert (vae.sample_rate, vae.latents_per_second, vae.output_sample_rate) == (8000, 25, 24000)


def test_what_does_not_fit_is_told(checkpoints: Path) -> None:
    vae = loaded(checkpoints)
    with pytest.raises(ValueError, match="more than 512 samples at 16000 hertz, found 300"):
        vae.encode({"waveform": noise(1, 2, 300), "sample_rate": 16000})
    with pytest.raises(ValueError, match="expected 1 or 2 channels, found 3"):
        vae.encode({"waveform": noise(1, 3, 3000), "sample_rate": 16000})
    with pytest.raises(ValueError, match="LTXVAudioVAEEncode"):
        vae.encode(noise(1, 8, 8, 3))
    with pytest.raises(ValueError, match=r"\[batch, 4, length, 4\], found shape \[1, 8, 5, 16\]"):
        vae.decode(noise(1, 8, 5, 16))
    samples = {"samples": noise(1, 4, 5, 4)}
    with pytest.raises(ValueError, match="LTXVAudioVAEDecode"):
        VAEDecodeAudio.execute(vae, samples)
    with pytest.raises(ValueError, match="no pictures"):
        VAEDecode().decode(vae, samples)
    with pytest.raises(ValueError, match="another autoencoder"):
        sound.LTXVAudioVAEDecode.execute(samples, autoencoder())
