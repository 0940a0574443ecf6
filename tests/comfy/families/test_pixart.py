"""PixArt alpha and sigma: the recorded networks, and small files from text to picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy import loading, text_loading
from comfy.families.family import BrokenModelError
from comfy.families.pixart import read_pixart_config
from comfy.ldm.pixart.pixartms import PixArtMS
from comfy.saving import save_checkpoint
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families.test_transformers import pieces, random_like, text_encoders
from tests.support.golden_nets import assert_close_to_golden, read_golden_net

TEXT = 24
SIZES: dict[str, Any] = {
    "patch_size": 2, "in_channels": 4, "hidden_size": 144, "depth": 2, "num_heads": 2,
    "mlp_ratio": 2.0, "caption_channels": TEXT, "model_max_length": 12,
}  # fmt: skip
PREFIX = "model.diffusion_model."


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def network(is_alpha: bool) -> dict[str, Tensor]:
    return random_like(PixArtMS(**SIZES, micro_condition=is_alpha), 4)


def checkpoint(folder: Path, is_alpha: bool) -> str:
    """A whole checkpoint but for the autoencoder, which is that of Stable Diffusion."""
    pieces(folder)
    tensors = {PREFIX + key: value for key, value in network(is_alpha).items()}
    encoder = text_encoders(TEXT)["t5xxl"]
    tensors |= {f"text_encoders.t5xxl.transformer.{k}": v for k, v in encoder.items()}
    path = folder / "pixart.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return str(path)


def sampled(model: Any, clip: Any, side: int = 8, **options: Any) -> Tensor:
    [[cond, told]] = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
    positive = [[cond, {**told, **options}]]
    negative = clip.encode_from_tokens_scheduled(clip.tokenize(""))
    latent = {"samples": torch.zeros(1, 4, side, side + 3)}
    made = common_ksampler(model, 3, 2, 2.0, "euler", "normal", positive, negative, latent)
    samples: Tensor = made[0]["samples"]
    return samples


@pytest.mark.parametrize("name", ["pixart_alpha", "pixart_sigma"])
def test_the_network_agrees_with_the_reference(name: str, golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / f"nets/{name}.safetensors")
    model = PixArtMS(**net.constructor).eval()
    model.load_state_dict(net.weights)
    given = net.calls()["a"]
    out = model(given.pop("x"), given.pop("t"), **given)
    assert_close_to_golden(out, net.outputs["a"])


@pytest.mark.parametrize("is_alpha", [True, False])
def test_sizes_are_read_from_the_weights_and_holes_are_named(is_alpha: bool) -> None:
    weights = network(is_alpha)
    config = read_pixart_config(weights)
    assert config is not None
    assert {key: config[key] for key in SIZES} == SIZES
    assert config["micro_condition"] is is_alpha
    weights["pos_embed"] = torch.zeros(1, 64 * 64, 144)
    config = read_pixart_config(weights)
    assert config is not None
    assert (config["input_size"], config["pe_interpolation"]) == (128, 2)
    del weights["blocks.0.mlp.fc1.weight"]
    with pytest.raises(BrokenModelError, match=r"layout of PixArt, but blocks\.0\.mlp"):
        read_pixart_config(weights)


@pytest.mark.parametrize(("is_alpha", "family"), [(True, "PixArtAlpha"), (False, "PixArtSigma")])
def test_text_becomes_a_latent_and_survives_saving(
    is_alpha: bool, family: str, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path, is_alpha)
    found: Any = loading.load_checkpoint_guess_config(path, output_vae=False)
    assert type(found.model.model.model_config).__name__ == family
    latent = sampled(found.model, found.clip)
    assert latent.shape == (1, 4, 8, 11)
    assert latent.isfinite().all()
    told = sampled(found.model, found.clip, width=1024, height=512)
    assert torch.equal(told, latent) is not is_alpha
    again_path = str(tmp_path / "again.safetensors")
    save_checkpoint(again_path, found.model, found.clip, None)
    again: Any = loading.load_checkpoint_guess_config(again_path, output_vae=False)
    assert torch.equal(sampled(again.model, again.clip), latent)


def test_single_files_load_and_text_has_no_padding(tmp_path: Path) -> None:
    pieces(tmp_path)
    for name, weights in (("model", network(False)), ("t5", text_encoders(TEXT)["t5xxl"])):
        whole = {key: value.contiguous() for key, value in weights.items()}
        save_file(whole, tmp_path / f"{name}.safetensors")
    model = loading.load_diffusion_model(str(tmp_path / "model.safetensors"))
    clip = text_loading.load_clip(
        [str(tmp_path / "t5.safetensors")], clip_type=text_loading.CLIPType.PIXART
    )
    assert clip.encode("a").shape[1] < 16
    assert sampled(model, clip, side=2).isfinite().all()  # smaller than any of training
