"""Cosmos 1: its network and its autoencoder beside another implementation, and small files from
text and from frames to video.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import loading, text_loading
from comfy.families.cosmos_video import CosmosT2V, read_cosmos_config
from comfy.families.family import BrokenModelError
from comfy.ldm.cosmos.model import GeneralDIT
from comfy.ldm.cosmos.vae import CausalContinuousVideoTokenizer, CosmosVAEConfig
from comfy.vae.vae import VAE
from comfy.weights.fill import IncompleteWeightsError
from comfy_extras.nodes_cosmos import CosmosImageToVideoLatent
from tests.comfy.families import test_cosmos
from tests.comfy.families.small_files import PREFIX, loaded_again, prefixed, sampled, write
from tests.comfy.families.test_transformers import pieces, random_like

SIZES: dict[str, Any] = {
    "in_channels": 16, "out_channels": 16, "model_channels": 48, "num_blocks": 2, "num_heads": 2,
    "mlp_ratio": 1.5, "crossattn_emb_channels": test_cosmos.TEXT, "adaln_lora_dim": 8,
    "max_img_h": 24, "max_img_w": 20, "max_frames": 8, "rope_h_extrapolation_ratio": 2.0,
    "rope_w_extrapolation_ratio": 2.0, "rope_t_extrapolation_ratio": 2.0,
}  # fmt: skip
SHAPE = (1, 16, 3, 6, 8)
VAE_SIZES = CosmosVAEConfig(encoder=(8, 16, 24, 24), decoder=(24, 16, 24, 24))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def network(channels: int = 16) -> dict[str, Tensor]:
    return random_like(GeneralDIT(**{**SIZES, "in_channels": channels}), 4)


def autoencoder() -> dict[str, Tensor]:
    made = random_like(CausalContinuousVideoTokenizer(VAE_SIZES), 3)
    weights = {key: value / 4 if value.ndim > 1 else value / 8 for key, value in made.items()}
    weights["latent_mean"] = torch.linspace(-0.1, 0.1, 256)
    weights["latent_std"] = torch.linspace(0.5, 1.5, 256)
    return weights


def checkpoint(folder: Path, channels: int = 16) -> str:
    pieces(folder)
    tensors = prefixed(network(channels), PREFIX)
    tensors |= prefixed(test_cosmos.text_encoder(), "text_encoders.t5xxl.transformer.")
    tensors |= prefixed(autoencoder(), "vae.")
    return write(tensors, folder / "cosmos1.safetensors")


def waves(*shape: int) -> Tensor:
    """Values that need no generator."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 0.7).sin().view(shape)


# What diffusers 0.42.1 answers with the same weights (CosmosTransformer3DModel, without and with
# a rate of 12.5 frames a second): a cell of the last frame.
NETWORK_ANSWERS = {
    None: [
        -1.58898,
        1.04291,
        -0.62488,
        -4.18213,
        -0.34537,
        0.28488,
        1.40893,
        -0.24105,
        -3.45465,
        -0.0172,
        -0.1112,
        -0.33109,
        -0.76596,
        -1.12521,
        -1.92669,
        -0.46802,
    ],
    12.5: [
        -1.52496,
        1.10817,
        -0.71156,
        -4.02701,
        -0.28695,
        0.20667,
        1.35823,
        -0.23,
        -3.434,
        0.07937,
        -0.03657,
        -0.36838,
        -0.74438,
        -1.20491,
        -1.87701,
        -0.51373,
    ],
}
# And AutoencoderKLCosmos: a cell of the latent before it is scaled, a pixel of each frame.
LATENT_ANSWER = [
    0.17524,
    0.44818,
    0.4736,
    0.56013,
    0.57037,
    -0.01959,
    0.25724,
    0.21946,
    -0.12599,
    0.40135,
    0.78319,
    -0.03184,
    0.99425,
    0.28267,
    0.00802,
    -0.44347,
]
PIXEL_ANSWER = [
    -9.4583,
    -17.01982,
    4.40289,
    4.63885,
    -13.45334,
    -14.38041,
    -1.28767,
    3.70284,
    -15.45671,
]


@pytest.mark.parametrize("rate", [None, 12.5])
def test_the_network_agrees_with_another_implementation(rate: float | None) -> None:
    model = GeneralDIT(**SIZES).eval()
    model.load_state_dict(network())
    text = waves(1, 5, test_cosmos.TEXT)
    out = model(waves(*SHAPE), torch.tensor([0.4]), text, fps=rate)
    expected = torch.tensor(NETWORK_ANSWERS[rate])
    torch.testing.assert_close(out[0, :, 2, 3, 4], expected, rtol=1e-4, atol=1e-4)


def test_the_autoencoder_agrees_with_another_implementation() -> None:
    weights = autoencoder()
    model = CausalContinuousVideoTokenizer(VAE_SIZES).eval()
    model.load_state_dict(weights)
    latent = model.quant_conv(model.encoder(waves(1, 3, 9, 16, 24)))
    seen = latent[0, :, 1, 1, 2]
    torch.testing.assert_close(seen, torch.tensor(LATENT_ANSWER), rtol=1e-4, atol=1e-4)
    video = model.decoder(model.post_quant_conv(waves(1, 16, 2, 2, 3)))
    assert video.shape == (1, 3, 9, 16, 24)
    seen = video[0, 1, :, 9, 13]
    torch.testing.assert_close(seen, torch.tensor(PIXEL_ANSWER), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_autoencoder_computes_in_half_precision(dtype: torch.dtype) -> None:
    model = CausalContinuousVideoTokenizer(VAE_SIZES).eval()
    model.load_state_dict(autoencoder())
    video = waves(1, 3, 9, 16, 24)
    latent = model.encode(video)
    again = model.decode(latent)
    model.to(dtype)
    for made, exact in (
        (model.encode(video.to(dtype)), latent),
        (model.decode(latent.to(dtype)), again),
    ):
        assert made.dtype == dtype
        torch.testing.assert_close(
            made.float(), exact, rtol=0.0, atol=0.03 * exact.abs().max().item()
        )


def test_latents_are_scaled_by_channel_and_frame_and_back() -> None:
    model = CausalContinuousVideoTokenizer(VAE_SIZES).eval()
    model.load_state_dict(autoencoder())
    video = waves(1, 3, 17, 8, 8)
    plain, scaled = model.quant_conv(model.encoder(video)), model.encode(video)
    mean, deviation = torch.linspace(-0.1, 0.1, 256), torch.linspace(0.5, 1.5, 256)
    for channel, frame in ((0, 0), (3, 2)):
        place = channel * 16 + frame
        expected = (plain[0, channel, frame] - mean[place]) / deviation[place] * 0.5
        torch.testing.assert_close(scaled[0, channel, frame], expected)
    again = model.decoder(model.post_quant_conv(plain))
    torch.testing.assert_close(model.decode(scaled), again, rtol=1e-4, atol=1e-4)
    assert model.encode(waves(1, 3, 137, 8, 8)).shape[2] == 18  # more than there are means for


def test_an_autoencoder_without_the_scale_of_latents_is_refused() -> None:
    weights = autoencoder()
    weights["decoder.unpatcher3d.wavelets"] = torch.full((2,), 0.5**0.5)
    assert VAE(sd=dict(weights)).latent_channels == 16
    del weights["latent_mean"]
    with pytest.raises(IncompleteWeightsError, match=r"lacks 1 key \(latent_mean\)"):
        VAE(sd=weights)


def test_sizes_are_read_from_the_weights_and_a_hole_is_named() -> None:
    weights = network()
    config = read_cosmos_config(weights)
    assert config is not None
    assert {key: config[key] for key in SIZES} == SIZES
    del weights["final_layer.linear.weight"]
    with pytest.raises(BrokenModelError, match="layout of Cosmos 1, but final_layer"):
        read_cosmos_config(weights)


def test_a_video_larger_than_the_network_has_places_for_is_refused() -> None:
    model = GeneralDIT(**SIZES).eval()
    model.load_state_dict(network())
    with pytest.raises(ValueError, match=r"\(3, 13, 4\) cells .* places for \(8, 12, 10\)"):
        model(torch.zeros(1, 16, 3, 26, 8), torch.zeros(1), waves(1, 5, test_cosmos.TEXT))


def test_text_becomes_a_video_and_survives_saving(tmp_path: Path) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path))
    assert type(found.model.model.model_config).__name__ == "CosmosT2V"
    latent = sampled(found.model, found.clip, SHAPE)
    assert latent.shape == SHAPE
    slow = sampled(found.model, found.clip, SHAPE, frame_rate=12)
    assert not torch.allclose(slow, latent)
    video = found.vae.decode(latent)
    assert video.shape == (1, 17, 48, 64, 3)
    again = loaded_again(found, tmp_path)
    assert torch.equal(sampled(again.model, again.clip, SHAPE), latent)
    assert torch.equal(again.vae.decode(latent), video)


def test_given_frames_stay_as_they_are_and_change_the_others(tmp_path: Path) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path, 17))
    assert type(found.model.model.model_config).__name__ == "CosmosI2V"
    picture = torch.rand(1, 48, 64, 3, generator=torch.Generator().manual_seed(1))
    made = CosmosImageToVideoLatent.execute(found.vae, 64, 48, 17, 1, start_image=picture).args[0]
    mask = made["noise_mask"]
    assert mask[0, 0, :, 0, 0].tolist() == [0, 1, 1]
    model, clip = found.model, found.clip
    given = sampled(model, clip, SHAPE, mask, fill=0.5)
    torch.testing.assert_close(given[:, :, 0], torch.full_like(given[:, :, 0], 0.5))
    free = sampled(model, clip, SHAPE, fill=0.5)
    assert not torch.allclose(given[:, :, 1:], free[:, :, 1:])


def test_given_frames_are_scaled_as_recorded(
    golden_tensors: Callable[[str], dict[str, Tensor]],
) -> None:
    tensors = golden_tensors("model_conds.safetensors")
    root = "scale_latent_inpaint/Cosmos 1 7B T2V"
    model = CosmosT2V({**SIZES, "disable_unet_model_creation": True}).get_model({})
    for sigma in (0.3, 0.9):
        got = model.scale_latent_inpaint(
            torch.tensor([sigma]), tensors[f"{root}/noise"], tensors[f"{root}/latent"]
        )
        torch.testing.assert_close(got, tensors[f"{root}/sigma{sigma}"])


def test_single_files_load(tmp_path: Path) -> None:
    pieces(tmp_path)
    model = loading.load_diffusion_model(write(network(), tmp_path / "model.safetensors"))
    path = write(test_cosmos.text_encoder(), tmp_path / "t5.safetensors")
    clip = text_loading.load_clip([path], clip_type=text_loading.CLIPType.COSMOS)
    sampled(model, clip, SHAPE)
