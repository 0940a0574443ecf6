"""LTX video: the recorded network, its autoencoder in three versions, and small files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy import loading, text_loading
from comfy.families.family import BrokenModelError
from comfy.families.ltxv import LTXV, read_ltxv_config
from comfy.ldm.lightricks.model import LTXVModel
from comfy.ldm.lightricks.vae.causal_video_autoencoder import BlockSizes, LTXVConfig, LTXVideoVAE
from comfy.saving import save_checkpoint
from comfy.vae.kinds import detect_autoencoder
from comfy.vae.vae import VAE
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families import key_shapes
from tests.comfy.families.test_transformers import pieces, random_like, text_encoders
from tests.support.golden_nets import assert_close_to_golden, read_golden_net

TEXT = 24
SIZES: dict[str, Any] = {
    "in_channels": 8, "cross_attention_dim": 64, "attention_head_dim": 2,
    "num_attention_heads": 32, "caption_channels": TEXT, "num_layers": 2,
}  # fmt: skip
PREFIX = "model.diffusion_model."
ALL, SPACE, TIME = (2, 2, 2), (1, 2, 2), (2, 1, 1)


def block(kind: str, width: int, out: int, layers: int = 1, **others: Any) -> BlockSizes:
    return BlockSizes(kind, width, out, layers, **others)


FIRST = LTXVConfig(
    (
        block("res", 8, 8, 2), block("stride", 8, 8, strides=ALL), block("widen", 8, 12),
        block("res", 12, 12), block("stride", 12, 12, strides=ALL), block("res", 12, 12),
        block("stride", 12, 12, strides=ALL), block("res", 12, 12),
    ),
    (
        block("res", 12, 12, 2), block("unpack", 12, 12, strides=ALL), block("res", 12, 12),
        block("unpack", 12, 12, strides=ALL), block("widen", 12, 8), block("res", 8, 8),
        block("unpack", 8, 8, strides=ALL), block("res", 8, 8),
    ),
    8,
)  # fmt: skip
TIMED = {"has_time": True}
FEWER: dict[str, Any] = {"reduction": 2, "keeps": True}
SECOND = LTXVConfig(
    FIRST.encoder,
    (
        block("res", 64, 64, **TIMED), block("unpack", 64, 32, strides=ALL, **FEWER),
        block("res", 32, 32, has_noise=True, **TIMED),
        block("unpack", 32, 16, strides=ALL, **FEWER), block("res", 16, 16, **TIMED),
        block("unpack", 16, 8, strides=ALL, **FEWER), block("res", 8, 8, **TIMED),
    ),
    8,
    True,
)  # fmt: skip
THIRD = LTXVConfig(
    (
        block("res", 8, 8), block("pack", 8, 16, strides=SPACE), block("res", 16, 16),
        block("pack", 16, 32, strides=TIME), block("res", 32, 32),
        block("pack", 32, 32, strides=ALL), block("res", 32, 32),
        block("pack", 32, 32, strides=ALL), block("res", 32, 32),
    ),
    SECOND.decoder,
    8,
    True,
)  # fmt: skip
SECOND_GENERATION = LTXVConfig(
    (
        block("res", 8, 8), block("pack", 8, 16, strides=SPACE), block("res", 16, 16),
        block("pack", 16, 32, strides=TIME), block("res", 32, 32),
        block("pack", 32, 64, strides=ALL), block("res", 64, 64),
        block("pack", 64, 64, strides=ALL), block("res", 64, 64),
    ),
    (
        block("res", 64, 64), block("unpack", 64, 32, strides=ALL, **FEWER),
        block("res", 32, 32), block("unpack", 32, 16, strides=ALL, **FEWER),
        block("res", 16, 16), block("unpack", 16, 8, strides=ALL, **FEWER), block("res", 8, 8),
    ),
    8,
    decoder_border="reflect",
)  # fmt: skip
LATER = LTXVConfig(
    SECOND_GENERATION.encoder,
    (
        block("res", 64, 64), block("unpack", 64, 32, strides=ALL, reduction=2),
        block("res", 32, 32), block("unpack", 32, 32, strides=ALL),
        block("res", 32, 32), block("unpack", 32, 16, strides=TIME, reduction=2),
        block("res", 16, 16), block("unpack", 16, 8, strides=SPACE, reduction=2),
        block("res", 8, 8),
    ),
    8,
)  # fmt: skip
VERSIONS = {
    "0.9": FIRST, "0.9.1": SECOND, "0.9.5": THIRD, "2": SECOND_GENERATION, "2.3": LATER,
}  # fmt: skip


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def autoencoder(config: LTXVConfig = FIRST) -> dict[str, Tensor]:
    weights = random_like(LTXVideoVAE(config), 5)
    generator = torch.Generator().manual_seed(6)
    for name in ("std-of-means", "mean-of-means"):
        weights[f"per_channel_statistics.{name}"] = torch.rand(8, generator=generator) + 0.5
    if config.has_time:
        weights["decoder.timestep_scale_multiplier"] = torch.tensor(1000.0)
    return weights


def write_model(folder: Path, **header: str) -> str:
    path = folder / "ltxv.safetensors"
    tensors = {PREFIX + key: value for key, value in random_like(LTXVModel(**SIZES), 4).items()}
    tensors |= {f"vae.{key}": value for key, value in autoencoder().items()}
    whole = {key: value.contiguous() for key, value in tensors.items()}
    save_file(whole, path, metadata=header or None)
    return str(path)


def text_encoder(folder: Path) -> Any:
    pieces(folder)
    path = folder / "t5.safetensors"
    save_file({k: v.contiguous() for k, v in text_encoders(TEXT)["t5xxl"].items()}, path)
    return text_loading.load_clip([str(path)], clip_type=text_loading.CLIPType.LTXV)


def sampled(model: Any, clip: Any, mask: Tensor | None = None, **options: Any) -> Tensor:
    [[cond, told]] = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
    positive = [[cond, {**told, **options}]]
    model.model.latent_format.latent_channels = 8  # as this small network has
    latent = {"samples": torch.ones(1, 8, 3, 2, 3)}
    if mask is not None:
        latent["noise_mask"] = mask
    made = common_ksampler(model, 3, 2, 1.0, "euler", "simple", positive, positive, latent)
    samples: Tensor = made[0]["samples"]
    return samples


def test_the_network_agrees_with_the_reference(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/ltxv.safetensors")
    model = LTXVModel(**net.constructor).eval()
    model.load_state_dict(net.weights)
    for call, args in net.calls().items():
        given: dict[str, Any] = dict(args)
        if call == "nomask_fps30":
            given["frame_rate"] = 30
        out = model(given.pop("x"), given.pop("t"), **given)
        assert_close_to_golden(out, net.outputs[call])


def test_sizes_are_read_from_the_weights_and_a_hole_is_named() -> None:
    weights = random_like(LTXVModel(**SIZES), 4)
    config = read_ltxv_config(weights)
    assert config is not None
    assert {"num_attention_heads": 32, **config} == {"image_model": "ltxv", **SIZES}
    del weights["patchify_proj.weight"]
    with pytest.raises(BrokenModelError, match="layout of LTX video, but patchify_proj"):
        read_ltxv_config(weights)


def test_text_becomes_a_video_and_survives_saving(tmp_path: Path) -> None:
    told = {"transformer": {"causal_temporal_positioning": True, "num_layers": 9}}
    path = write_model(tmp_path, config=json.dumps(told))
    found: Any = loading.load_checkpoint_guess_config(path)
    clip = text_encoder(tmp_path)
    assert type(found.model.model.model_config).__name__ == "LTXV"
    latent = sampled(found.model, clip)
    assert latent.isfinite().all()
    assert not torch.equal(sampled(found.model, clip, frame_rate=5), latent)
    plain: Any = loading.load_checkpoint_guess_config(write_model(tmp_path))
    assert not torch.equal(sampled(plain.model, clip), latent)  # places count otherwise
    assert found.vae.decode(latent).shape == (1, 17, 64, 96, 3)
    again_path = str(tmp_path / "again.safetensors")
    save_checkpoint(again_path, found.model, None, found.vae)
    again: Any = loading.load_checkpoint_guess_config(again_path)
    assert torch.equal(sampled(again.model, clip), latent)


@pytest.mark.parametrize("text", ["{", "[]", '"x"', '{"transformer": 3}'])
def test_a_header_that_tells_nothing_is_ignored(text: str) -> None:
    family = LTXV({"image_model": "ltxv"})
    family.read_header({"config": text})
    assert "causal_temporal_positioning" not in family.unet_config
    assert family.header() == {}


def test_a_given_frame_stays_as_it_is_and_guides_have_their_places(tmp_path: Path) -> None:
    found: Any = loading.load_checkpoint_guess_config(write_model(tmp_path))
    clip = text_encoder(tmp_path)
    mask = torch.ones(1, 1, 3, 2, 3)
    mask[:, :, 0] = 0
    latent = sampled(found.model, clip, mask)
    torch.testing.assert_close(latent[:, :, 0], torch.ones(1, 8, 2, 3))
    assert not torch.allclose(latent[:, :, 1], torch.ones(1, 8, 2, 3))
    in_part = sampled(found.model, clip, mask, area=(2, 2, 2, 0, 0, 1))
    torch.testing.assert_close(in_part[:, :, 0], torch.ones(1, 8, 2, 3))
    places = torch.zeros(1, 3, 6, 2)
    assert not torch.equal(
        sampled(found.model, clip, keyframe_idxs=places), sampled(found.model, clip)
    )


def test_text_is_at_least_128_tokens_of_which_padding_is_hidden(tmp_path: Path) -> None:
    clip = text_encoder(tmp_path)
    [[cond, told]] = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
    assert cond.shape == (1, 128, TEXT)
    assert 1 < told["attention_mask"].sum() < 16


@pytest.mark.parametrize("version", VERSIONS)
def test_an_autoencoder_is_built_from_its_keys(version: str) -> None:
    weights = autoencoder(VERSIONS[version])
    spec = detect_autoencoder(weights)
    assert spec is not None
    network = spec.build()
    assert network.config == VERSIONS[version]
    vae = VAE(sd=weights, dtype=torch.float32)
    frames = torch.rand(12, 64, 96, 3, generator=torch.Generator().manual_seed(1))
    latent = vae.encode(frames)
    assert latent.shape == (1, 8, 2, 2, 3)
    assert torch.equal(vae.encode(frames[:9]), latent)
    video = vae.decode(latent)
    assert video.shape == (1, 9, 64, 96, 3)
    assert torch.equal(vae.decode(latent), video)  # whatever is random about it


@pytest.mark.parametrize(
    "name", ["LTXV 0.9 (version 0)", "LTXV 0.9.1 (version 1)", "LTXV 0.9.5 (version 2)"]
)
def test_published_autoencoders_have_a_place_for_every_key(name: str, golden_folder: Path) -> None:
    weights = key_shapes.expand(key_shapes.recorded(golden_folder)["vaes"][name])
    spec = detect_autoencoder(weights)
    assert spec is not None
    own = spec.build(device="meta").state_dict()
    assert {key: own[key].shape for key in own} == {key: weights[key].shape for key in own}
    assert all(key.startswith("per_channel_statistics.") for key in weights.keys() - own.keys())


MOMENTS = [2.47696, 9.31065, 19.72768]


@pytest.mark.parametrize(
    ("version", "causal", "pixels"),
    [
        ("2", False, [1.91386, 3.58256, -1.85733]),
        ("2", True, [3.23117, 3.57202, -4.6724]),
        ("2.3", False, [-2.0629, -0.78156, -0.67624]),
        ("2.3", True, [1.68797, 4.9057, 0.6826]),
    ],
)
def test_the_autoencoders_of_ltx_2_give_what_another_implementation_gives(
    version: str, causal: bool, pixels: list[float]
) -> None:
    """The implementation of the diffusers library, on the same weights."""
    config = replace(VERSIONS[version], causal_decoder=causal)
    network = LTXVideoVAE(config).eval()
    network.load_state_dict(autoencoder(config))
    generator = torch.Generator().manual_seed(3)
    latent = torch.randn(1, 8, 2, 2, 3, generator=generator)
    video = torch.randn(1, 3, 9, 64, 96, generator=generator)
    found = network.encoder(video)[0, :3, 1, 1, 2]
    torch.testing.assert_close(found, torch.tensor(MOMENTS), rtol=1e-4, atol=1e-4)
    made = network.decoder(latent, 0.05, torch.Generator())[0, :, 5, 0, 95]
    torch.testing.assert_close(made, torch.tensor(pixels), rtol=1e-4, atol=1e-4)


def test_the_header_tells_borders_and_what_the_decoder_sees() -> None:
    told = {"vae": {"spatial_padding_mode": "replicate", "causal_decoder": True}}
    weights = autoencoder(SECOND_GENERATION)
    spec = detect_autoencoder(weights, {"config": json.dumps(told)})
    assert spec is not None
    config = spec.build().config
    assert (config.encoder_border, config.decoder_border) == ("replicate", "replicate")
    assert config.causal_decoder
    latent = torch.ones(1, 8, 2, 2, 3)
    told["vae"]["decoder_spatial_padding_mode"] = "zeros"
    header = {"config": json.dumps(told)}
    made = [VAE(sd=weights, metadata=one).decode(latent) for one in (header, None)]
    assert not torch.allclose(*made)


def test_the_header_tells_which_blocks_keep_what_they_unpack() -> None:
    entry = {"residual": True, "multiplier": 2}
    listed: list[Any] = [["res_x", {"num_layers": 1}]] * 9  # the decoder's last block first
    listed[5] = ["compress_all", entry]
    told = {"config": json.dumps({"vae": {"decoder_blocks": listed}})}
    kept = {}
    for name, header in (("told", told), ("usual", None)):
        spec = detect_autoencoder(autoencoder(LATER), header)
        assert spec is not None
        kept[name] = [block.keeps for block in spec.build().config.decoder]
    assert kept == {"told": [n == 3 for n in range(9)], "usual": [False] * 9}


def test_an_unknown_border_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown border 'wrap' of convolutions; known: zeros"):
        LTXVConfig(FIRST.encoder, FIRST.decoder, decoder_border="wrap")


@pytest.mark.parametrize(
    ("version", "moments", "pixels"),
    [
        ("0.9", [-1.90577, 1.76218, -3.39036], [1.18391, -4.91919, 0.18457]),
        ("0.9.5", [1.06796, -9.08713, 3.25213], None),
    ],
)
def test_an_autoencoder_gives_what_another_implementation_gives(
    version: str, moments: list[float], pixels: list[float] | None
) -> None:
    """Bit by bit what the implementation of the diffusers library gives on the same weights."""
    network = LTXVideoVAE(VERSIONS[version]).eval()
    network.load_state_dict(autoencoder(VERSIONS[version]))
    generator = torch.Generator().manual_seed(3)
    latent = torch.randn(1, 8, 2, 2, 3, generator=generator)
    video = torch.randn(1, 3, 9, 64, 96, generator=generator)
    found = network.encoder(video)[0, :3, 1, 1, 2]
    torch.testing.assert_close(found, torch.tensor(moments), rtol=1e-4, atol=1e-4)
    if pixels is not None:
        made = network.decoder(latent, 0.05, torch.Generator())[0, :, 5, 20, 30]
        torch.testing.assert_close(made, torch.tensor(pixels), rtol=1e-4, atol=1e-4)
