"""Chroma: the recorded network, and small files from text to picture and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from comfy import loading, text_loading
from comfy.families.dit_layout import read_chroma_config
from comfy.families.family import BrokenModelError
from comfy.ldm.chroma.model import Chroma
from comfy.ldm.flux.model import Flux
from comfy.saving import save_checkpoint
from tests.comfy.families.test_transformers import (
    autoencoder,
    pieces,
    random_like,
    sampled,
    text_encoders,
)
from tests.support.golden_nets import assert_close_to_golden, read_golden_net

SIZES: dict[str, Any] = {
    "context_in_dim": 24, "hidden_size": 32, "mlp_ratio": 2.0, "num_heads": 2, "depth": 1,
    "depth_single_blocks": 2, "axes_dim": [4, 6, 6], "theta": 10000, "qkv_bias": True,
    "out_dim": 32, "hidden_dim": 24, "n_layers": 2,
}  # fmt: skip
PREFIX = "model.diffusion_model."


def network() -> dict[str, Tensor]:
    return random_like(Chroma(**SIZES), 4)


def checkpoint(folder: Path) -> str:
    """A whole checkpoint of small parts."""
    pieces(folder)
    tensors = {PREFIX + key: value for key, value in network().items()}
    tensors |= {f"first_stage_model.{key}": value for key, value in autoencoder().items()}
    encoder = text_encoders(24)["t5xxl"]
    tensors |= {f"cond_stage_model.t5xxl.transformer.{k}": v for k, v in encoder.items()}
    path = folder / "chroma.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return str(path)


@torch.inference_mode()
def test_the_network_agrees_with_the_reference(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/chroma.safetensors")
    model = Chroma(**net.constructor).eval()
    model.load_state_dict(net.weights)
    given = net.calls()["a"]
    out = model(given["x"], given["t"], given["context"], guidance=given["guidance"])
    assert_close_to_golden(out, net.outputs["a"], 5e-5)
    strong = model(given["x"], given["t"], given["context"], guidance=given["guidance"] + 3.0)
    assert not torch.allclose(strong, out)
    none = model(given["x"], given["t"], given["context"])
    assert torch.equal(none, out)  # the recorded strength is 0


def test_the_recorded_sizes_are_read_from_the_weights(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/chroma.safetensors")
    config = read_chroma_config(net.weights)
    assert config is not None
    wanted = {key: value for key, value in net.constructor.items() if key != "vec_in_dim"}
    assert {key: config[key] for key in wanted} == wanted
    assert read_chroma_config({"img_in.weight": torch.zeros(1)}) is None


@pytest.mark.parametrize("key", ["img_in.weight", "distilled_guidance_layer.in_proj.weight"])
def test_a_hole_is_named(key: str) -> None:
    weights = network()
    del weights[key]
    with pytest.raises(BrokenModelError, match=rf"layout of Chroma, but {key}"):
        read_chroma_config(weights)


def test_modulation_of_another_width_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"need 20 modulations of width 32.*344 of width 48"):
        Chroma(**{**SIZES, "out_dim": 48})


@torch.inference_mode()
def test_text_becomes_a_picture_and_survives_saving(tmp_path: Path) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path))
    assert type(found.model.model.model_config).__name__ == "Chroma"
    latent = sampled(found.model, found.clip)
    assert latent.isfinite().all()
    picture = found.vae.decode(latent)
    assert picture.shape == (1, 64, 64, 3)
    again_path = tmp_path / "again.safetensors"
    save_checkpoint(str(again_path), found.model, found.clip, found.vae)
    assert load_file(again_path).keys() >= {PREFIX + key for key in network()}
    again: Any = loading.load_checkpoint_guess_config(str(again_path))
    assert torch.equal(sampled(again.model, again.clip), latent)


@torch.inference_mode()
def test_single_files_load_and_text_and_guidance_count(tmp_path: Path) -> None:
    pieces(tmp_path)
    parts = {"model": network(), "t5": text_encoders(24)["t5xxl"]}
    for name, weights in parts.items():
        whole = {key: value.contiguous() for key, value in weights.items()}
        save_file(whole, tmp_path / f"{name}.safetensors")
    model = loading.load_diffusion_model(str(tmp_path / "model.safetensors"))
    clip = text_loading.load_clip(
        [str(tmp_path / "t5.safetensors")], clip_type=text_loading.CLIPType.CHROMA
    )
    cond, extra = clip.encode_from_tokens_scheduled(clip.tokenize("a"))[0]
    assert cond.shape[1] < 16  # no padding
    assert extra["pooled_output"] is None
    conds = model.model.extra_conds(cross_attn=cond, noise=torch.zeros(1, 16, 8, 8), device="cpu")
    assert conds.keys() == {"c_crossattn", "guidance"}
    assert conds["guidance"].cond.tolist() == [0.0]
    assert not torch.equal(sampled(model, clip), torch.zeros(1, 16, 8, 8))


def test_chroma_and_flux_are_told_apart() -> None:
    flux = Flux(
        in_channels=16, out_channels=16, vec_in_dim=None, guidance_embed=False, patch_size=2,
        **{key: value for key, value in SIZES.items() if key not in ("out_dim", "hidden_dim")},
    )  # fmt: skip
    assert read_chroma_config(flux.state_dict()) is None
