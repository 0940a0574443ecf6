"""The released file: its contents, and that the project's networks and the training ones agree."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

import folder_paths
from tests.demo.painter import CHECKPOINT, Painter
from tools.demo_model.latent_space import SD1_RGB_FACTORS, fit_rgb
from tools.demo_model.reference import Checkpoint
from tools.demo_model.tokens import Tokenizer, used_tokens
from tools.demo_model.training import painted_batch

TEXTS = ["a red circle on a blue background", "two kittens in the snow, masterpiece"]
# float32 sums in another order; far below the step of 2/255 = 8e-3 between pixel values.
CLOSE = {"atol": 2e-4, "rtol": 2e-4}


@pytest.fixture(scope="module")
def path() -> str:
    return folder_paths.get_full_path_or_raise("checkpoints", CHECKPOINT)


@pytest.fixture(scope="module")
def reference(path: str) -> Checkpoint:
    return Checkpoint(path)


@pytest.fixture(scope="module")
def painter() -> Painter:
    return Painter()


@pytest.fixture(scope="module")
def noisy() -> torch.Tensor:
    return torch.randn(2, 4, 12, 16, generator=torch.Generator().manual_seed(1))


def test_the_file_is_small_and_says_what_shapes_cannot(path: str) -> None:
    with safe_open(path, "pt") as file:
        header = file.metadata()
        assert len(file.keys()) == 490
    assert json.loads(header["unet_config"]) == {"num_heads": 8, "norm_num_groups": 8}
    assert json.loads(header["vae_config"]) == {"norm_num_groups": 2}
    assert json.loads(header["text_config"]) == {"num_attention_heads": 2}
    assert header["modelspec.license"] == "Apache-2.0"
    with open(path, "rb") as file:
        assert file.seek(0, 2) <= 40e6


def test_only_tokens_of_captions_have_an_embedding(reference: Checkpoint) -> None:
    rows = reference.text.text_model.embeddings.token_embedding.weight
    embedded = rows.any(dim=1).nonzero().flatten().tolist()
    assert set(used_tokens(Tokenizer(), 1000)) <= set(embedded)
    assert len(embedded) == 143


def test_both_text_encoders_read_the_same(painter: Painter, reference: Checkpoint) -> None:
    for text in TEXTS:
        hidden = painter.clip.encode_from_tokens(painter.clip.tokenize(text))
        torch.testing.assert_close(hidden, reference.context([text]), **CLOSE)


@pytest.mark.parametrize("sigma", [0.05, 1.0, 10.0])
def test_both_unets_see_the_same_in_noise(
    painter: Painter, reference: Checkpoint, noisy: torch.Tensor, sigma: float
) -> None:
    level = reference.sigmas[(reference.sigmas - sigma).abs().argmin()]
    context = reference.context(TEXTS)
    with torch.inference_mode():
        expected = reference.denoise(noisy * level, level, (context, context), cfg=1)
        model = painter.model.model
        seen = model.apply_model(noisy * level, level.expand(2), c_crossattn=context)
    torch.testing.assert_close(seen, expected, **CLOSE)


def test_both_autoencoders_paint_the_same(
    painter: Painter, reference: Checkpoint, noisy: torch.Tensor
) -> None:
    latent_format = painter.model.model.latent_format
    with torch.inference_mode():
        pixels = painter.vae.decode(latent_format.process_out(noisy))
        expected = (reference.autoencoder.decode(noisy) / 2 + 0.5).clamp(0, 1)
        torch.testing.assert_close(pixels, expected.permute(0, 2, 3, 1), **CLOSE)
        latents = latent_format.process_in(painter.vae.encode(pixels))
        expected = reference.autoencoder.encode(pixels.permute(0, 3, 1, 2) * 2 - 1)
    torch.testing.assert_close(latents, expected, **CLOSE)


def test_previews_with_the_family_s_factors_show_the_right_colours(reference: Checkpoint) -> None:
    pictures = painted_batch(range(900_000, 900_016), (128, 128))
    latents = reference.autoencoder.encode(pictures)
    factors, _, explained = fit_rgb(latents, pictures)
    assert explained.min() > 0.9
    cosine = torch.nn.functional.cosine_similarity(
        factors.flatten(), SD1_RGB_FACTORS.flatten(), dim=0
    )
    assert cosine > 0.9
