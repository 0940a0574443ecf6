"""Mochi: its network and its autoencoder beside another implementation, and small files from text
to video.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import loading, text_loading
from comfy.families.family import BrokenModelError
from comfy.families.mochi import read_mochi_config
from comfy.ldm.genmo.model import AsymmDiTJoint
from comfy.ldm.genmo.vae import MochiVAEConfig, VideoVAE
from comfy.vae.vae import VAE
from tests.comfy.families.small_files import PREFIX, loaded_again, prefixed, sampled, write
from tests.comfy.families.test_transformers import pieces, random_like, text_encoders

TEXT = 24
SIZES: dict[str, Any] = {
    "patch_size": 2, "in_channels": 12, "hidden_size_x": 32, "hidden_size_y": 16, "depth": 3,
    "num_heads": 2, "t5_feat_dim": TEXT,
}  # fmt: skip
SHAPE = (1, 12, 2, 4, 6)
VAE_SIZES = MochiVAEConfig(
    (32, 32, 64, 64), (32, 64, 32, 64), (1, 1, 2, 1, 1), (1, 1, 2, 1, 1)
)  # fmt: skip


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def network() -> dict[str, Tensor]:
    weights = random_like(AsymmDiTJoint(**SIZES), 4)
    weights["pos_frequencies"] *= 0.2
    return weights


def autoencoder() -> dict[str, Tensor]:
    made = random_like(VideoVAE(VAE_SIZES), 3)
    return {key: value / 2 for key, value in made.items()}


def text_encoder() -> dict[str, Tensor]:
    return text_encoders(TEXT)["t5xxl"]


def checkpoint(folder: Path) -> str:
    pieces(folder)
    tensors = prefixed(network(), PREFIX)
    tensors |= prefixed(text_encoder(), "text_encoders.t5xxl.transformer.")
    tensors |= prefixed(autoencoder(), "vae.")
    return write(tensors, folder / "mochi.safetensors")


def waves(*shape: int) -> Tensor:
    """Values that need no generator."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 0.7).sin().view(shape)


# What diffusers 0.42.1 answers with the same weights (MochiTransformer3DModel, whose sign and
# time are those of its own sampler): a cell of the last frame.
NETWORK_ANSWER = [
    -0.48282,
    4.15187,
    0.09241,
    -6.19557,
    -0.63483,
    -3.36292,
    5.71098,
    2.61977,
    -2.15643,
    -2.4927,
    -0.68687,
    -3.10249,
]
# And the parts of AutoencoderKLMochi: a cell of the latent, and of the decoder, which here drops
# frames where its authors do and there only at the end, a pixel of each frame.
LATENT_ANSWER = [
    -0.19587,
    -0.00225,
    0.21904,
    0.16249,
    0.29218,
    0.06307,
    0.39219,
    -0.29054,
    -0.0014,
    -0.06958,
    0.26134,
    0.05987,
]
PIXEL_ANSWER = [-0.79105, -0.77867, -1.01126, -0.69999, 0.94133, 0.25213, 0.06186]


def test_the_network_agrees_with_another_implementation() -> None:
    model = AsymmDiTJoint(**SIZES).eval()
    model.load_state_dict(network())
    text, mask = waves(1, 7, TEXT), torch.tensor([[1, 1, 1, 1, 0, 0, 0]])
    out = model(waves(*SHAPE), torch.tensor([0.3]), text, mask, 4)
    torch.testing.assert_close(
        out[0, :, 1, 3, 4], torch.tensor(NETWORK_ANSWER), rtol=1e-4, atol=1e-4
    )
    text[:, 4:] = 9  # padding does not count
    torch.testing.assert_close(model(waves(*SHAPE), torch.tensor([0.3]), text, mask, 4), out)
    wide = model(waves(1, 12, 2, 5, 7), torch.tensor([0.3]), text, mask, 4)
    assert wide.shape == (1, 12, 2, 5, 7)


def test_the_autoencoder_agrees_with_another_implementation() -> None:
    model = VideoVAE(VAE_SIZES).eval()
    model.load_state_dict(autoencoder())
    latent = model.encode(waves(1, 3, 7, 16, 24))
    assert latent.shape == (1, 12, 2, 2, 3)
    torch.testing.assert_close(
        latent[0, :, 1, 1, 2], torch.tensor(LATENT_ANSWER), rtol=1e-4, atol=1e-4
    )
    video = model.decode(waves(1, 12, 2, 2, 3))
    assert video.shape == (1, 3, 7, 16, 24)
    torch.testing.assert_close(
        video[0, 1, :, 9, 13], torch.tensor(PIXEL_ANSWER), rtol=1e-4, atol=1e-4
    )


def test_halves_of_the_autoencoder_load_alone_and_say_what_they_lack() -> None:
    weights = autoencoder()
    whole = VAE(sd=dict(weights))
    halves = {
        half: VAE(sd={k.removeprefix(half): v for k, v in weights.items() if k.startswith(half)})
        for half in ("encoder.", "decoder.")
    }
    video = waves(7, 16, 24, 3) * 0.5 + 0.5
    latent = whole.encode(video)
    assert torch.equal(halves["encoder."].encode(video), latent)
    assert torch.equal(halves["decoder."].decode(latent), whole.decode(latent))
    with pytest.raises(ValueError, match="holds the encoder alone"):
        halves["encoder."].decode(latent)
    with pytest.raises(ValueError, match="holds the decoder alone"):
        halves["decoder."].encode(video)


def test_sizes_are_read_from_the_weights_and_a_hole_is_named() -> None:
    weights = network()
    config = read_mochi_config(weights)
    assert config is not None
    assert {key: config[key] for key in SIZES} == SIZES
    del weights["pos_frequencies"]
    with pytest.raises(BrokenModelError, match="layout of Mochi, but pos_frequencies"):
        read_mochi_config(weights)


def test_text_becomes_a_video_and_survives_saving(tmp_path: Path) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path))
    assert type(found.model.model.model_config).__name__ == "GenmoMochi"
    latent = sampled(found.model, found.clip, SHAPE)
    assert latent.shape == SHAPE
    video = found.vae.decode(latent)
    assert video.shape == (1, 7, 32, 48, 3)
    again = loaded_again(found, tmp_path)
    assert torch.equal(sampled(again.model, again.clip, SHAPE), latent)
    assert torch.equal(again.vae.decode(latent), video)


def test_single_files_load(tmp_path: Path) -> None:
    pieces(tmp_path)
    model = loading.load_diffusion_model(write(network(), tmp_path / "model.safetensors"))
    path = write(text_encoder(), tmp_path / "t5.safetensors")
    clip = text_loading.load_clip([path], clip_type=text_loading.CLIPType.MOCHI)
    told = clip.encode_from_tokens(clip.tokenize("a red cat"), return_dict=True)
    made = model.model.extra_conds(
        noise=torch.zeros(SHAPE), device="cpu", cross_attn=told["cond"],
        attention_mask=told["attention_mask"],
    )  # fmt: skip
    assert made["num_tokens"].cond == 4  # three words and the end
    sampled(model, clip, SHAPE)
