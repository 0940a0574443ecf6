"""FLUX.2: small files from text to picture and back, its autoencoder and its text encoder."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from comfy import loading, text_loading
from comfy.families.dit_layout import read_flux2_config, read_flux_config
from comfy.families.family import BrokenModelError
from comfy.ldm.autoencoder.kl import AutoencoderKL, PatchedAutoencoderKL
from comfy.ldm.autoencoder.layers import AutoencoderConfig
from comfy.ldm.flux.model import Flux
from comfy.ldm.llm.model import DecoderLLM
from comfy.ops import manual_cast
from comfy.saving import save_checkpoint
from comfy.text_encoders.tekken import TekkenPieces, byte_letters
from comfy.vae.vae import VAE
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families.test_transformers import random_like
from tests.support.golden_nets import read_golden_net

WIDTH = 8  # of the language model
SIZES: dict[str, Any] = {
    "in_channels": 32, "out_channels": 32, "vec_in_dim": None, "context_in_dim": 3 * WIDTH,
    "hidden_size": 32, "mlp_ratio": 3.0, "num_heads": 2, "depth": 1, "depth_single_blocks": 1,
    "axes_dim": [4, 4, 4, 4], "theta": 2000, "patch_size": 1, "qkv_bias": False,
    "guidance_embed": True, "txt_ids_dims": [3], "ops_bias": False, "global_modulation": True,
    "mlp_silu_act": True, "default_ref_method": "index", "ref_index_scale": 10.0,
}  # fmt: skip
PREFIX = "model.diffusion_model."
LLM = "text_encoders.mistral3_24b."


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def vocabulary(words: tuple[bytes, ...] = (b" r", b"ed", b" red", b" cat")) -> bytes:
    """A small `tekken.json`: all bytes, and some words."""
    pieces = [bytes([number]) for number in range(256)] + [b"at", b" c", *words]
    entries = [
        {"rank": n, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for n, piece in enumerate(pieces)
    ]
    config = {
        "pattern": r"\s?\p{L}+|[^\p{L}]", "num_vocab_tokens": len(pieces),
        "default_vocab_size": len(pieces) + 20, "default_num_special_tokens": 20,
    }  # fmt: skip
    return json.dumps({"config": config, "vocab": entries}).encode()


def language_model(layers: int = 30, final_norm: bool = True) -> dict[str, Tensor]:
    config = {
        "vocab_size": 300, "hidden_size": WIDTH, "intermediate_size": 8,
        "num_hidden_layers": layers, "num_attention_heads": 1, "num_key_value_heads": 1,
        "qk_norm": False, "final_norm": final_norm,
    }  # fmt: skip
    weights = random_like(DecoderLLM(config, None, None, manual_cast), 6)
    held = torch.tensor(list(vocabulary()), dtype=torch.uint8)
    return {**weights, "tekken_model": held}


def autoencoder() -> dict[str, Tensor]:
    sizes = AutoencoderConfig(
        ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=8, norm_num_groups=32
    )
    weights = random_like(PatchedAutoencoderKL(sizes, 8), 5)
    weights["bn.running_mean"] = torch.linspace(-1, 1, 32)
    weights["bn.running_var"] = torch.linspace(0.5, 2, 32)
    return weights


def checkpoint(folder: Path) -> str:
    tensors = {PREFIX + key: value for key, value in random_like(Flux(**SIZES), 4).items()}
    tensors |= {f"vae.{key}": value for key, value in autoencoder().items()}
    for key, value in language_model().items():
        tensors[LLM + (key if key == "tekken_model" else f"transformer.{key}")] = value
    path = folder / "flux2.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return str(path)


def sampled(model: Any, clip: Any, **options: Any) -> Tensor:
    positive = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
    if options:
        positive = [[positive[0][0], {**positive[0][1], **options}]]
    model.model.latent_format.latent_channels = 32  # as this small network has
    latent = {"samples": torch.zeros(1, 32, 4, 6)}
    made = common_ksampler(model, 3, 2, 1.0, "euler", "simple", positive, positive, latent)
    samples: Tensor = made[0]["samples"]
    return samples


def test_the_recorded_sizes_are_read_from_the_weights(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/flux2.safetensors")
    config = read_flux2_config(net.weights)
    assert config == net.constructor
    assert read_flux_config(net.weights) is None


@pytest.mark.parametrize("key", ["txt_in.weight", "double_blocks.0.img_mlp.2.weight"])
def test_a_hole_is_named(key: str) -> None:
    weights = random_like(Flux(**SIZES), 4)
    del weights[key]
    with pytest.raises(BrokenModelError, match=rf"layout of FLUX.2, but {key}"):
        read_flux2_config(weights)


def test_text_becomes_a_picture_and_survives_saving(tmp_path: Path) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path))
    assert type(found.model.model.model_config).__name__ == "Flux2"
    latent = sampled(found.model, found.clip)
    assert latent.isfinite().all()
    assert not torch.equal(sampled(found.model, found.clip, guidance=9.0), latent)
    reference = [torch.ones(1, 32, 2, 2)]
    assert not torch.equal(sampled(found.model, found.clip, reference_latents=reference), latent)
    picture = found.vae.decode(latent)
    assert picture.shape == (1, 16, 24, 3)
    again_path = tmp_path / "again.safetensors"
    save_checkpoint(str(again_path), found.model, found.clip, found.vae)
    saved = load_file(again_path)
    assert saved["text_encoders.tekken_model"].tolist() == list(vocabulary())
    again: Any = loading.load_checkpoint_guess_config(str(again_path))
    assert torch.equal(sampled(again.model, again.clip), latent)
    assert torch.equal(again.vae.decode(latent), picture)


def test_a_text_is_what_three_layers_say_of_its_conversation(tmp_path: Path) -> None:
    weights = language_model(layers=32)
    path = tmp_path / "mistral.safetensors"
    save_file(weights, path)
    clip = text_loading.load_clip([str(path)], clip_type=text_loading.CLIPType.FLUX2)
    tokens = clip.tokenize("a (red:1.5) cat")
    chunk = tokens["mistral3_24b"][0]
    ids = [token for token, _ in chunk]
    assert ids[:2] == [1, 17]  # the start, and the mark of the system's words
    assert ids[-1] == 4  # the end of the person's
    assert {weight for _, weight in chunk} == {1.0}
    cond, pooled = clip.encode_from_tokens(tokens, return_pooled=True)
    assert pooled is None
    model = clip.cond_stage_model.mistral3_24b.transformer.model
    x = model.embed_tokens(torch.tensor([ids])).float()
    layers = [model(x, None, number - 1, False)[1] for number in (10, 20, 30)]
    torch.testing.assert_close(cond, torch.cat(layers, dim=-1), rtol=1e-3, atol=1e-3)


def test_a_model_without_its_last_layers_and_norm_loads(tmp_path: Path) -> None:
    path = tmp_path / "mistral.safetensors"
    save_file(language_model(layers=30, final_norm=False), path)
    clip = text_loading.load_clip([str(path)])
    assert clip.encode("a cat").shape[-1] == 3 * WIDTH
    save_file(language_model(layers=12), path)
    with pytest.raises(loading.BrokenCheckpointError, match=r"12 layers.*takes.*layer 30"):
        text_loading.load_clip([str(path)])


def test_the_vocabulary_lies_beside_the_encoder_or_the_error_says_so(tmp_path: Path) -> None:
    weights = language_model()
    del weights["tekken_model"]
    weights["model.layers.0.post_attention_layernorm.weight"] = torch.ones(5120)
    assert text_loading.detect_encoder(weights) == "mistral3_24b"
    with pytest.raises(FileNotFoundError, match=r"Mistral were not found.*tekken\.json"):
        TekkenPieces.from_pretrained()
    (tmp_path / "tekken.json").write_bytes(vocabulary())
    data = loading.vocabulary_beside({"mistral3_24b.x": None}, [str(tmp_path)])
    pieces = TekkenPieces.from_pretrained(next(iter(data.values())))
    assert pieces("[INST] cat")["input_ids"] == [1, 3, 20 + 261]
    with pytest.raises(ValueError, match="no word pieces of Mistral"):
        TekkenPieces.from_pretrained(b"{")


def test_pieces_join_by_rank() -> None:
    pieces = TekkenPieces.from_pretrained(vocabulary())
    assert pieces(" red")["input_ids"] == [1, 20 + 260]
    assert pieces("bat")["input_ids"] == [1, 20 + ord("b"), 20 + 256]
    assert pieces("\u00e9")["input_ids"] == [1, 20 + 0xC3, 20 + 0xA9]
    assert len(set(byte_letters().values())) == 256


def test_the_autoencoder_puts_four_cells_into_one_and_norms_them() -> None:
    weights = autoencoder()
    vae = VAE(sd=weights, dtype=torch.float32)
    assert (vae.latent_channels, vae.downscale_ratio) == (32, 4)
    picture = torch.rand(1, 16, 24, 3, generator=torch.Generator().manual_seed(2))
    latent = vae.encode(picture)
    assert latent.shape == (1, 32, 4, 6)
    plain = AutoencoderKL(vae.first_stage_model.config, 8).eval()
    plain.load_state_dict({k: v for k, v in weights.items() if not k.startswith("bn.")})
    inner = plain.encode(picture.movedim(-1, 1) * 2 - 1)
    cells = functional.pixel_unshuffle(inner, 2)
    mean, var = weights["bn.running_mean"], weights["bn.running_var"]
    expected = functional.batch_norm(cells, mean, var, eps=1e-4)
    torch.testing.assert_close(latent, expected)
    decoded = ((plain.decode(inner) + 1) / 2).clamp(0, 1).movedim(1, -1)
    torch.testing.assert_close(vae.decode(latent), decoded, rtol=1e-4, atol=1e-4)


def test_the_autoencoder_is_known_by_its_other_names() -> None:
    weights = autoencoder()
    for inner, plain in (("encoder.", "quant_conv."), ("decoder.", "post_quant_conv.")):
        for part in ("weight", "bias"):
            weights[inner + plain + part] = weights.pop(plain + part)
    latent = torch.randn(1, 32, 2, 2)
    whole = VAE(sd=autoencoder(), dtype=torch.float32).decode(latent)
    assert torch.equal(VAE(sd=weights, dtype=torch.float32).decode(latent), whole)
