"""Audio encoders from files in the published layouts, against the papers' formulas in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from comfy.audio_encoders import audio_encoders, wav2vec2, whisper
from comfy.devices import residency
from comfy.weights.errors import WeightFileError

WIDTH, INNER, LAYERS, CHANNELS, REACH, GROUPS = 128, 48, 3, 12, 8, 4
KERNELS, STRIDES = (10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2)
BANDS, PLACES = 20, 50
Weights = dict[str, Tensor]


class Made:
    """Random weights by key."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.sd: Weights = {}

    def add(self, name: str, *shape: int, bias: bool = True, centre: float = 0.0) -> None:
        fan = math.prod(shape[1:]) if len(shape) > 1 else 16
        spread = torch.randn(shape, generator=self.generator) / math.sqrt(fan)
        self.sd[f"{name}.weight"] = spread + centre
        if bias:
            self.sd[f"{name}.bias"] = torch.randn(shape[0], generator=self.generator) * 0.1

    def norm(self, name: str, width: int) -> None:
        self.add(name, width, centre=1.0)


def wav2vec2_weights(stable: bool, seed: int = 0) -> Weights:
    """Weights of a small network: large kind (layer norms) or base kind (one group norm)."""
    made = Made(seed)
    for number, kernel in enumerate(KERNELS):
        name = f"feature_extractor.conv_layers.{number}"
        made.add(f"{name}.conv", CHANNELS, CHANNELS if number else 1, kernel, bias=stable)
        if stable or number == 0:
            made.norm(f"{name}.layer_norm", CHANNELS)
    made.norm("feature_projection.layer_norm", CHANNELS)
    made.add("feature_projection.projection", WIDTH, CHANNELS)
    made.add("encoder.pos_conv_embed.conv", WIDTH, WIDTH // GROUPS, REACH)
    direction = made.sd.pop("encoder.pos_conv_embed.conv.weight")
    made.sd["encoder.pos_conv_embed.conv.weight_v"] = direction
    made.sd["encoder.pos_conv_embed.conv.weight_g"] = torch.rand(1, 1, REACH) * 4 + 4
    made.norm("encoder.layer_norm", WIDTH)
    for number in range(LAYERS):
        name = f"encoder.layers.{number}"
        for part in "qkv":
            made.add(f"{name}.attention.{part}_proj", WIDTH, WIDTH)
        made.add(f"{name}.attention.out_proj", WIDTH, WIDTH)
        made.norm(f"{name}.layer_norm", WIDTH)
        made.add(f"{name}.feed_forward.intermediate_dense", INNER, WIDTH)
        made.add(f"{name}.feed_forward.output_dense", WIDTH, INNER)
        made.norm(f"{name}.final_layer_norm", WIDTH)
    made.sd["masked_spec_embed"] = torch.zeros(WIDTH)  # for training; no place here
    return made.sd


def whisper_weights(seed: int = 0) -> Weights:
    """Weights of a small encoder with a window of one second."""
    made = Made(seed)
    made.add("conv1", WIDTH, BANDS, 3)
    made.add("conv2", WIDTH, WIDTH, 3)
    made.add("embed_positions", PLACES, WIDTH, bias=False)
    for number in range(LAYERS):
        name = f"layers.{number}"
        for part in ("q", "k", "v", "out"):
            made.add(f"{name}.self_attn.{part}_proj", WIDTH, WIDTH, bias=part != "k")
        made.norm(f"{name}.self_attn_layer_norm", WIDTH)
        made.add(f"{name}.fc1", INNER, WIDTH)
        made.add(f"{name}.fc2", WIDTH, INNER)
        made.norm(f"{name}.final_layer_norm", WIDTH)
    made.norm("layer_norm", WIDTH)
    return {f"model.encoder.{key}": value for key, value in made.sd.items()}


class Reference:
    """The formulas, one sound at a time, in float64."""

    def __init__(self, sd: Weights, prefix: str = "") -> None:
        own = {key: value.double() for key, value in sd.items() if key.startswith(prefix)}
        self.sd = {key[len(prefix) :]: value for key, value in own.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.sd[f"{name}.weight"].T + self.sd.get(f"{name}.bias", torch.zeros(1))

    def norm(self, name: str, x: Tensor, axis: int = -1) -> Tensor:
        centred = x - x.mean(axis, keepdim=True)
        unit = centred / (centred.square().mean(axis, keepdim=True) + 1e-5).sqrt()
        scale, shift = self.sd[f"{name}.weight"], self.sd[f"{name}.bias"]
        return unit * scale + shift if axis == -1 else unit * scale[:, None] + shift[:, None]

    def attend(self, name: str, x: Tensor) -> Tensor:
        parts = []
        q, k, v = (self.linear(f"{name}.{part}_proj", x) for part in "qkv")
        for start in range(0, WIDTH, 64):
            head = slice(start, start + 64)
            parts.append(((q[:, head] @ k[:, head].T) / 8).softmax(-1) @ v[:, head])
        return self.linear(f"{name}.out_proj", torch.cat(parts, dim=1))

    def convolve(self, name: str, x: Tensor, stride: int) -> Tensor:
        """By windows: [channels, L] -> [channels, L']."""
        weight = self.sd[f"{name}.weight"]
        seen = x.unfold(1, weight.shape[2], stride)
        made = torch.einsum("clk,ock->ol", seen, weight)
        return made + self.sd.get(f"{name}.bias", torch.zeros(1))[:, None]

    def wav2vec2(self, sound: Tensor, stable: bool) -> list[Tensor]:
        x = sound.double()
        if stable:
            x = (x - x.mean()) / (x.var(correction=0) + 1e-7).sqrt()
        x = x[None]
        for number, stride in enumerate(STRIDES):
            name = f"feature_extractor.conv_layers.{number}"
            x = self.convolve(f"{name}.conv", x, stride)
            if stable:
                x = self.norm(f"{name}.layer_norm", x.T).T
            elif number == 0:
                x = self.norm(f"{name}.layer_norm", x, axis=1)
            x = F.gelu(x)
        x = self.linear(
            "feature_projection.projection", self.norm("feature_projection.layer_norm", x.T)
        )
        x = x + F.gelu(self.near(x))
        states = [x if stable else self.norm("encoder.layer_norm", x)]
        for number in range(LAYERS):
            states.append(self.wav2vec2_layer(f"encoder.layers.{number}", states[-1], stable))
        if stable:
            states[-1] = self.norm("encoder.layer_norm", states[-1])
        return states

    def near(self, x: Tensor) -> Tensor:
        """The convolution that tells places: each state from REACH around it."""
        name = "encoder.pos_conv_embed.conv"
        direction = self.sd[f"{name}.weight_v"]
        weight = torch.empty_like(direction)
        for place in range(REACH):
            one = direction[:, :, place]
            weight[:, :, place] = self.sd[f"{name}.weight_g"][0, 0, place] * one / one.norm()
        half, size = REACH // 2, WIDTH // GROUPS
        padded = F.pad(x.T, (half, half - 1))
        groups = []
        for start in range(0, WIDTH, size):
            seen = padded[start : start + size].unfold(1, REACH, 1)
            groups.append(torch.einsum("clk,ock->lo", seen, weight[start : start + size]))
        return torch.cat(groups, dim=1) + self.sd[f"{name}.bias"]

    def wav2vec2_layer(self, name: str, x: Tensor, stable: bool) -> Tensor:
        def dense(x: Tensor) -> Tensor:
            inner = F.gelu(self.linear(f"{name}.feed_forward.intermediate_dense", x))
            return self.linear(f"{name}.feed_forward.output_dense", inner)

        first, second = f"{name}.layer_norm", f"{name}.final_layer_norm"
        if stable:
            x = x + self.attend(f"{name}.attention", self.norm(first, x))
            return x + dense(self.norm(second, x))
        x = self.norm(first, x + self.attend(f"{name}.attention", x))
        return self.norm(second, x + dense(x))

    def whisper(self, sound: Tensor) -> list[Tensor]:
        x = F.pad(spectrogram(sound.double(), BANDS), (1, 1))
        x = F.pad(F.gelu(self.convolve("conv1", x, 1)), (1, 1))
        x = F.gelu(self.convolve("conv2", x, 2)).T + self.sd["embed_positions.weight"]
        states = [x]
        for number in range(LAYERS):
            name = f"layers.{number}"
            normed = self.norm(f"{name}.self_attn_layer_norm", x)
            x = x + self.attend(f"{name}.self_attn", normed)
            inner = F.gelu(self.linear(f"{name}.fc1", self.norm(f"{name}.final_layer_norm", x)))
            x = x + self.linear(f"{name}.fc2", inner)
            states.append(x)
        states[-1] = self.norm("layer_norm", states[-1])
        return states


def hertz_of(mel: float) -> float:
    return mel * 200 / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)


def spectrogram(sound: Tensor, bands: int) -> Tensor:
    """Decades of power of 25 ms every 10 ms, from the Fourier sum itself."""
    top = 15 + 27 * math.log(8) / math.log(6.4)
    corners = [hertz_of(top * n / (bands + 1)) for n in range(bands + 2)]
    padded = F.pad(sound[None, None], (200, 200), mode="reflect")[0, 0]
    time = torch.arange(400, dtype=torch.float64)
    pieces = padded.unfold(0, 400, 160)[:-1] * torch.sin(math.pi * time / 400) ** 2
    wave = torch.exp(-2j * math.pi * time[:, None] * torch.arange(201) / 400)
    power = (pieces.to(wave.dtype) @ wave).abs() ** 2
    filters = torch.zeros(201, bands, dtype=torch.float64)
    for band, (low, centre, high) in enumerate(zip(corners, corners[1:], corners[2:])):
        for place in range(201):
            hertz = place * 40.0
            if low < hertz <= centre:
                height = (hertz - low) / (centre - low)
            elif centre < hertz < high:
                height = (high - hertz) / (high - centre)
            else:
                continue
            filters[place, band] = height * 2 / (high - low)
    decades = (power @ filters).clamp(min=1e-10).log10().T
    return (decades.clamp(min=decades.max() - 8) + 4) / 4


def sounds(samples: int, batch: int = 2, channels: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(batch, channels, samples, generator=generator)
    return noise * torch.linspace(0.3, 0.001, samples) + 0.05


def saved(sd: Weights, folder: Path) -> str:
    path = folder / "encoder.safetensors"
    save_file({key: value.contiguous() for key, value in sd.items()}, path)
    return str(path)


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("prefix", ["", "wav2vec2."])
def test_wav2vec2_gives_the_states_of_all_layers(stable: bool, prefix: str, tmp_path: Path) -> None:
    sd = wav2vec2_weights(stable)
    path = saved({prefix + key: value for key, value in sd.items()}, tmp_path)
    sound = sounds(4000)
    heard = audio_encoders.load(path).encode_audio(sound, 16000)
    assert heard["audio_samples"] == 4000
    layers = heard["encoded_audio_all_layers"]
    assert torch.equal(layers[-1], heard["encoded_audio"])
    for item in range(2):
        wanted = Reference(sd).wav2vec2(sound[item, 0], stable)
        assert len(layers) == len(wanted) == LAYERS + 1
        for made, right in zip(layers, wanted):
            torch.testing.assert_close(made[item].double(), right, atol=2e-4, rtol=2e-4)


def test_newer_names_of_the_weight_norm_and_halves_are_read() -> None:
    sd = wav2vec2_weights(True)
    whole = audio_encoders.load_audio_encoder_from_sd(sd)
    name = "encoder.pos_conv_embed.conv."
    renamed = dict(sd)
    for old, new in (("weight_g", "original0"), ("weight_v", "original1")):
        renamed[f"{name}parametrizations.weight.{new}"] = renamed.pop(name + old)
    again = audio_encoders.load_audio_encoder_from_sd(renamed)
    halved = audio_encoders.load_audio_encoder_from_sd({k: v.half() for k, v in sd.items()})
    sound = sounds(2000)
    first = whole.encode_audio(sound, 16000)["encoded_audio"]
    assert torch.equal(again.encode_audio(sound, 16000)["encoded_audio"], first)
    rough = halved.encode_audio(sound, 16000)["encoded_audio"]
    assert rough.dtype == torch.float32
    assert (rough - first).abs().max() < 0.02


def test_published_sizes_are_told_by_the_weights() -> None:
    for width, heads in ((768, 12), (1024, 16), (1280, 16), (1920, 16)):
        sd = {
            f"feature_extractor.conv_layers.{n}.conv.weight": torch.empty(
                512, 512 if n else 1, kernel, device="meta"
            )
            for n, kernel in enumerate(KERNELS)
        }
        sd["encoder.pos_conv_embed.conv.weight"] = torch.empty(
            width, width // 16, 128, device="meta"
        )
        sd["encoder.layer_norm.weight"] = torch.empty(width, device="meta")
        sd["encoder.layers.0.feed_forward.intermediate_dense.weight"] = torch.empty(
            4 * width, width, device="meta"
        )
        config = wav2vec2.config_of(sd)
        assert (config.heads, config.groups, config.reach, config.layers) == (heads, 16, 128, 1)
        assert wav2vec2.Wav2Vec2Model(config, device="meta").least_samples == 400


def test_whisper_gives_the_states_of_all_layers_window_by_window(tmp_path: Path) -> None:
    sd = whisper_weights()
    sd["model.decoder.layer_norm.weight"] = torch.ones(WIDTH)  # of the part that writes
    encoder = audio_encoders.load(saved(sd, tmp_path))
    sound = sounds(16000 + 4000)
    heard = encoder.encode_audio(sound, 16000)
    assert heard["audio_samples"] == 20000
    layers = heard["encoded_audio_all_layers"]
    assert [tuple(one.shape) for one in layers] == [(2, 2 * PLACES, WIDTH)] * (LAYERS + 1)
    reference = Reference(sd, "model.encoder.")
    windows = F.pad(sound[:, 0], (0, 12000)).unflatten(1, (2, 16000))
    for item in range(2):
        for number in range(2):
            wanted = reference.whisper(windows[item, number])
            span = slice(number * PLACES, (number + 1) * PLACES)
            for made, right in zip(layers, wanted):
                torch.testing.assert_close(made[item, span].double(), right, atol=5e-4, rtol=5e-4)


def test_the_spectrogram_is_the_fourier_sum() -> None:
    sound = sounds(16000)[:, 0].double()
    made = whisper.log_mel(sound, 128)
    assert made.shape == (2, 128, 100)
    for item in range(2):
        wanted = spectrogram(sound[item], 128)
        torch.testing.assert_close(made[item], wanted, atol=1e-9, rtol=0)


def test_channels_are_averaged_and_the_rate_is_brought_to_the_networks() -> None:
    encoder = audio_encoders.load_audio_encoder_from_sd(wav2vec2_weights(True))
    sound = sounds(4000, 1, 2)
    heard = encoder.encode_audio(sound, 16000)["encoded_audio"]
    mono = encoder.encode_audio(sound.mean(1, keepdim=True), 16000)["encoded_audio"]
    torch.testing.assert_close(heard, mono, atol=1e-5, rtol=1e-5)
    assert encoder.encode_audio(sounds(8000), 32000)["audio_samples"] == 4000


def test_sounds_without_a_state_are_refused() -> None:
    encoder = audio_encoders.load_audio_encoder_from_sd(wav2vec2_weights(False))
    assert encoder.encode_audio(sounds(400), 16000)["encoded_audio"].shape[1] == 1
    with pytest.raises(ValueError, match=r"at least 400 samples.*found 399"):
        encoder.encode_audio(sounds(399), 16000)
    for shape in ((1, 0), (1, 1, 0), (0, 1, 8)):
        with pytest.raises(ValueError, match=r"audio: expected waveforms \[batch"):
            encoder.encode_audio(torch.zeros(shape), 16000)


@pytest.mark.parametrize("weights", [wav2vec2_weights(True), whisper_weights()])
def test_a_device_without_room_for_all_weights_hears_the_same(
    weights: Weights, accelerator: Any
) -> None:
    sound = sounds(4000)
    encoder = audio_encoders.load_audio_encoder_from_sd(weights)
    assert encoder.load_device.type == accelerator.NAME
    whole = encoder.encode_audio(sound, 16000)["encoded_audio_all_layers"]
    assert encoder.patcher.loaded_size() == encoder.patcher.model_size()
    residency.unload_all_models()
    activations = sound.numel() * audio_encoders.SAMPLE_BYTES
    accelerator.set_capacity(int(encoder.patcher.model_size() * 0.75 + activations))
    streamed = encoder.encode_audio(sound, 16000)["encoded_audio_all_layers"]
    assert encoder.patcher.loaded_size() < encoder.patcher.model_size()
    for first, second in zip(whole, streamed):
        assert second.device.type == "cpu"
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


def without(sd: Weights, key: str) -> Weights:
    return {name: value for name, value in sd.items() if name != key}


@pytest.mark.parametrize(
    ("sd", "words"),
    [
        ({"a.lora_up.weight": torch.zeros(1)}, "no known audio encoder.*a LoRA"),
        (without(wav2vec2_weights(True), "encoder.layer_norm.weight"), "lacks 'encoder.layer_norm"),
        (
            without(wav2vec2_weights(True), "encoder.layers.1.attention.v_proj.bias"),
            "lacks .*layers.1.attention.v_proj.bias",
        ),
        (
            without(wav2vec2_weights(True), "feature_extractor.conv_layers.6.conv.weight"),
            "7 convolutions, found 6",
        ),
        (without(whisper_weights(), "model.encoder.layers.0.fc1.weight"), "lacks 'layers.0.fc1"),
        (without(whisper_weights(), "model.encoder.layer_norm.bias"), "lacks .*layer_norm.bias"),
    ],
)
def test_other_files_are_refused_with_what_is_wanted(
    sd: Weights, words: str, tmp_path: Path
) -> None:
    path = saved(sd, tmp_path)
    with pytest.raises(WeightFileError, match=rf"encoder\.safetensors.*{words}.*Whisper"):
        audio_encoders.load(path)
