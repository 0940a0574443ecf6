"""Stable Audio: the recorded network and autoencoder, and a small checkpoint from text to sound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from comfy import loading, text_loading
from comfy.families.family import BrokenModelError
from comfy.families.stable_audio import (
    BIAS,
    CONDITIONERS,
    NUMBERS,
    PROJECTION,
    WAVES,
    NumberConditioner,
    read_stable_audio_config,
)
from comfy.ldm.audio.autoencoder import AudioOobleckVAE
from comfy.ldm.audio.dit import AudioDiffusionTransformer
from comfy.ldm.t5.model import T5
from comfy.ops import manual_cast
from comfy.saving import save_checkpoint
from comfy.vae.vae import VAE
from comfy.weights.weight_norm import joined, parted
from comfy_extras.audio.latents import ConditioningStableAudio, VAEDecodeAudio, VAEEncodeAudio
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families.test_transformers import pieces, random_like
from tests.support.golden_nets import assert_close_to_golden, read_golden_net

TEXT = 768  # of T5 base, which its width tells
SIZES: dict[str, Any] = {
    "io_channels": 64, "embed_dim": 768, "cond_token_dim": TEXT, "global_cond_dim": 2 * TEXT,
    "depth": 2, "num_heads": 12, "ff_dim": 48,
}  # fmt: skip
VAE_SIZES: dict[str, Any] = {"channels": 4, "c_mults": (1, 2, 3), "strides": (2, 4, 8)}
RATIO = 64
PREFIX = "model.model."


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def network() -> dict[str, Tensor]:
    weights = random_like(AudioDiffusionTransformer(**SIZES), 4)
    weights["transformer.rotary_pos_emb.inv_freq"] = 1.0 / 10000 ** (torch.arange(16) / 16)
    return weights


def autoencoder() -> dict[str, Tensor]:
    return parted(random_like(AudioOobleckVAE(**VAE_SIZES), 5))


def numbers() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(6)
    shapes = {WAVES: (8,), PROJECTION: (TEXT, 17), BIAS: (TEXT,)}
    return {
        f"{CONDITIONERS}{name}.{key}": torch.randn(shape, generator=generator)
        for name in NUMBERS
        for key, shape in shapes.items()
    }


def text_encoder() -> dict[str, Tensor]:
    sizes = {
        "d_model": TEXT, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": 2, "vocab_size": 40,
        "is_gated_act": False, "dense_act_fn": "relu",
    }  # fmt: skip
    return random_like(T5(sizes, None, "cpu", manual_cast), 7)


def write(tensors: dict[str, Tensor], path: Path) -> str:
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return str(path)


def checkpoint(folder: Path, **others: Tensor) -> str:
    tensors = {PREFIX + key: value for key, value in network().items()}
    tensors |= {f"pretransform.model.{key}": value for key, value in autoencoder().items()}
    return write(tensors | numbers() | others, folder / "audio.safetensors")


def clip_of(folder: Path) -> Any:
    pieces(folder)
    path = write(text_encoder(), folder / "t5.safetensors")
    return text_loading.load_clip([path], clip_type=text_loading.CLIPType.STABLE_AUDIO)


def sampled(model: Any, clip: Any, start: float | None = None, total: float = 20.0) -> Tensor:
    positive = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
    negative = clip.encode_from_tokens_scheduled(clip.tokenize(""))
    if start is not None:
        told = ConditioningStableAudio.execute(positive, negative, start, total)
        positive, negative = told[0], told[1]
    latent = {"samples": torch.zeros(2, 64, 11)}
    made = common_ksampler(model, 3, 2, 2.0, "euler", "simple", positive, negative, latent)
    samples: Tensor = made[0]["samples"]
    return samples


def test_the_network_agrees_with_the_reference(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/stable_audio_dit.safetensors")
    model = AudioDiffusionTransformer(**net.constructor).eval()
    model.load_state_dict(net.weights)
    given = net.calls()["a"]
    assert_close_to_golden(model(given.pop("x"), given.pop("t"), **given), net.outputs["a"])


def test_the_autoencoder_agrees_with_the_reference_at_the_door(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/oobleck_vae.safetensors")
    vae = VAE(sd=net.weights, dtype=torch.float32)
    assert (vae.latent_channels, vae.latent_dim, vae.downscale_ratio) == (4, 1, 8)
    decoded = vae.decode(net.inputs["z"]).movedim(-1, 1)
    assert_close_to_golden(decoded, net.outputs["decode"])
    torch.manual_seed(5)
    assert_close_to_golden(
        vae.encode(net.inputs["audio"].movedim(1, -1)), net.outputs["encode_seed5"]
    )


def test_sizes_are_read_from_the_weights_and_a_hole_is_named() -> None:
    weights = network()
    config = read_stable_audio_config(weights)
    assert config is not None
    usual = {"io_channels": 64, "cond_token_dim": TEXT, "global_cond_dim": 1536}
    assert {**usual, **config} == {"audio_model": "dit1.0", **SIZES}
    del weights["to_global_embed.0.weight"]
    with pytest.raises(BrokenModelError, match="layout of Stable Audio, but to_global_embed"):
        read_stable_audio_config(weights)


def test_a_number_is_its_share_its_waves_and_a_projection() -> None:
    weights = {key.partition("seconds_start.")[2]: v for key, v in numbers().items()}
    embedder = NumberConditioner({key: weights[key] for key in (WAVES, PROJECTION, BIAS)})
    share = torch.tensor([30.0 / 512.0])
    angles = share * weights[WAVES] * 2 * torch.pi
    told = torch.cat([share, angles.sin(), angles.cos()])
    expected = weights[PROJECTION] @ told + weights[BIAS]
    torch.testing.assert_close(embedder(30.0, "cpu"), expected)
    assert torch.equal(embedder(9999, "cpu"), embedder(512, "cpu"))
    assert torch.equal(embedder(-1, "cpu"), embedder(0, "cpu"))


def test_text_becomes_a_sound_and_survives_saving(tmp_path: Path) -> None:
    beta = {f"{PREFIX}transformer.layers.0.ff_norm.beta": torch.zeros(768)}
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path, **beta))
    clip = clip_of(tmp_path)
    assert found.clip is None
    assert type(found.model.model.model_config).__name__ == "StableAudio"
    latent = sampled(found.model, clip)
    assert latent.isfinite().all()
    assert not torch.equal(sampled(found.model, clip, 3.0), latent)
    assert torch.equal(sampled(found.model, clip, 0.0, int(11 / 21.53)), latent)
    sound = VAEDecodeAudio.execute(found.vae, {"samples": latent})[0]
    assert sound["sample_rate"] == 44100
    assert sound["waveform"].shape == (2, 2, 11 * RATIO)
    again_path = str(tmp_path / "again.safetensors")
    save_checkpoint(again_path, found.model, None, found.vae)
    again: Any = loading.load_checkpoint_guess_config(again_path)
    assert torch.equal(sampled(again.model, clip, 3.0), sampled(found.model, clip, 3.0))
    assert torch.allclose(again.vae.decode(latent), found.vae.decode(latent), atol=1e-5)
    keys = set(load_file(checkpoint(tmp_path)))
    assert set(load_file(again_path)) == keys


def test_text_has_128_tokens_of_which_padding_is_zero_and_both_numbers_stand_behind(
    tmp_path: Path,
) -> None:
    clip = clip_of(tmp_path)
    [[cond, told]] = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
    assert cond.shape == (1, 128, TEXT)
    assert not cond[:, 8:].any()
    assert "attention_mask" not in told
    model = loading.load_checkpoint_guess_config(checkpoint(tmp_path)).model
    noise = torch.zeros(1, 64, 43)
    assert model is not None
    made = model.model.extra_conds(noise=noise, device="cpu", cross_attn=cond, seconds_start=2)
    text, whole = made["c_crossattn"].cond, made["global_embed"].cond
    assert text.shape == (1, 130, TEXT)
    assert torch.equal(text[0, 128:].flatten(), whole[0])
    assert torch.equal(text[0, 129], model.model.seconds_total_embedder(1, "cpu"))  # 43 cells


def test_the_network_alone_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    path = write(network(), tmp_path / "network.safetensors")
    with pytest.raises(loading.BrokenCheckpointError, match=r"seconds_start.*the whole checkpoint"):
        loading.load_diffusion_model(path)
    path = checkpoint(tmp_path)
    assert sampled(loading.load_diffusion_model(path), clip_of(tmp_path)).isfinite().all()


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_sounds_of_any_number_of_channels_are_encoded(channels: int) -> None:
    vae = VAE(sd=autoencoder(), dtype=torch.float32)
    waveform = torch.rand(1, channels, 5 * RATIO + 7)
    torch.manual_seed(1)
    latent = VAEEncodeAudio.execute(vae, {"waveform": waveform, "sample_rate": 44100})[0]
    assert latent["samples"].shape == (1, 64, 5)
    if channels == 1:
        torch.manual_seed(1)
        both = {"waveform": waveform.expand(1, 2, -1), "sample_rate": 44100}
        assert torch.equal(VAEEncodeAudio.execute(vae, both)[0]["samples"], latent["samples"])


def test_sounds_of_ace_step_15_have_a_rate_of_their_own() -> None:
    sizes = {"channels": 4, "c_mults": (1, 1, 1, 1, 1), "strides": (2, 4, 4, 6, 10)}
    vae = VAE(sd=parted(random_like(AudioOobleckVAE(**sizes), 5)), dtype=torch.float32)
    assert vae.audio_sample_rate == 48000
    sound = VAEDecodeAudio.execute(vae, {"samples": torch.randn(1, 64, 3)})[0]
    assert sound["sample_rate"] == 48000
    assert sound["waveform"].shape == (1, 2, 3 * 1920)
    heard = {"waveform": torch.rand(1, 2, 44100), "sample_rate": 44100}
    assert VAEEncodeAudio.execute(vae, heard)[0]["samples"].shape == (1, 64, 25)
    assert VAE(sd=autoencoder(), dtype=torch.float32).audio_sample_rate == 44100


def test_long_sounds_are_decoded_in_tiles_and_pictures_refused() -> None:
    vae = VAE(sd=autoencoder(), dtype=torch.float32)
    latent = torch.randn(1, 64, 90, generator=torch.Generator().manual_seed(2))
    whole, tiled = vae.decode(latent), vae.decode_tiled(latent, tile_x=64, overlap=32)
    middle = slice(0, 20 * RATIO)
    torch.testing.assert_close(tiled[:, middle], whole[:, middle], rtol=1e-3, atol=1.0)
    with pytest.raises(ValueError, match="Stable Audio encodes sound"):
        vae.encode(torch.rand(1, 8, 8, 3))


def test_weights_in_two_parts_are_joined_in_both_spellings() -> None:
    generator = torch.Generator().manual_seed(1)
    direction, length = (torch.randn(s, generator=generator) for s in ((3, 2, 5), (3, 1, 1)))
    whole = direction / direction.square().sum((1, 2), keepdim=True).sqrt() * length
    for spelling in ("parametrizations.weight.original{}", "weight_{}"):
        ends = "01" if "original" in spelling else "gv"
        names = [f"a.{spelling.format(end)}" for end in ends]
        found = joined(dict(zip(names, (length, direction))) | {"a.bias": length})
        assert found.keys() == {"a.weight", "a.bias"}
        torch.testing.assert_close(found["a.weight"], whole)
    torch.testing.assert_close(joined(parted({"a.weight": whole}))["a.weight"], whole)
