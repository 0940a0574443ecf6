"""Lumina 2: small files from text to picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import loading, text_loading
from comfy.families.family import BrokenModelError
from comfy.families.qwen_layout import read_lumina2_config
from comfy.ldm.lumina.model import NextDiT
from comfy.text_encoders.lumina2 import GEMMA2_2B
from comfy_extras.nodes_lumina2 import CLIPTextEncodeLumina2
from tests.comfy.families.small_files import PREFIX, loaded_again, prefixed, sampled, write
from tests.comfy.families.test_transformers import random_like
from tests.comfy.text_encoders.test_lumina2 import VOCABULARY, gemma
from tests.support.golden_nets import assert_close_to_golden, read_golden_net

TEXT = 32
SIZES: dict[str, Any] = {
    "in_channels": 16, "dim": 96, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 4,
    "n_kv_heads": 2, "cap_feat_dim": TEXT, "axes_dims": [8, 8, 8], "ffn_dim_multiplier": 0.5,
    "multiple_of": 1,
}  # fmt: skip
SHAPE = (1, 16, 6, 7)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def network() -> dict[str, Tensor]:
    return random_like(NextDiT(**SIZES), 4)


def text_encoder() -> dict[str, Tensor]:
    return {**gemma(GEMMA2_2B), "spiece_model": torch.tensor(list(VOCABULARY)).byte()}


def checkpoint(folder: Path) -> str:
    tensors = prefixed(network(), PREFIX)
    encoder = text_encoder()
    tensors["text_encoders.spiece_model"] = encoder.pop("spiece_model")
    tensors |= prefixed(encoder, f"text_encoders.{GEMMA2_2B}.transformer.")
    return write(tensors, folder / "lumina2.safetensors")


def test_the_network_agrees_with_the_reference(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/lumina2.safetensors")
    config = read_lumina2_config(net.weights)
    assert config is not None
    config["axes_dims"] = net.constructor["axes_dims"]  # thirds at full size
    model = NextDiT(**config).eval()
    model.load_state_dict(net.weights)
    for call, given in net.calls().items():
        out = model(given.pop("x"), given.pop("t"), **given)
        assert_close_to_golden(out, net.outputs[call])


def test_sizes_are_read_from_the_weights_and_a_hole_is_named() -> None:
    weights = network()
    config = read_lumina2_config(weights)
    assert config is not None
    assert {key: config[key] for key in SIZES} == SIZES
    del weights["x_embedder.weight"]
    with pytest.raises(BrokenModelError, match="layout of Lumina 2, but x_embedder"):
        read_lumina2_config(weights)


def test_text_becomes_a_latent_and_survives_saving(tmp_path: Path) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path), output_vae=False)
    assert type(found.model.model.model_config).__name__ == "Lumina2"
    sampling = found.model.get_model_object("model_sampling")
    assert (sampling.shift, sampling.multiplier) == (6.0, 1.0)
    latent = sampled(found.model, found.clip, SHAPE)
    again = loaded_again(found, tmp_path)
    assert torch.equal(sampled(again.model, again.clip, SHAPE), latent)


def test_single_files_load_and_a_beginning_changes_the_text(tmp_path: Path) -> None:
    model = loading.load_diffusion_model(write(network(), tmp_path / "model.safetensors"))
    path = write(text_encoder(), tmp_path / "gemma.safetensors")
    clip = text_loading.load_clip([path], clip_type=text_loading.CLIPType.LUMINA2)
    sampled(model, clip, SHAPE)
    [[cond, _]] = CLIPTextEncodeLumina2.execute(clip, "cat", "superior")[0]
    assert cond.shape[1] > clip.encode("cat").shape[1]
