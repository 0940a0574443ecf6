"""HiDream: the recorded network, and small files from text to picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import loading, text_loading
from comfy.families.family import BrokenModelError
from comfy.families.hidream import read_hidream_config
from comfy.ldm.clip.text import CLIPTextModel
from comfy.ldm.hidream.model import HiDreamImageTransformer2DModel
from comfy.ops import manual_cast
from comfy.text_loading import CLIPType
from comfy_extras.nodes_hidream import CLIPTextEncodeHiDream
from tests.comfy.families import test_hunyuan_video, test_transformers
from tests.comfy.families.small_files import sampled, write
from tests.comfy.families.test_transformers import random_like
from tests.support.golden_nets import assert_close_to_golden, read_golden_net

T5_WIDTH = 24
LLAMA_WIDTH = test_hunyuan_video.WIDTH
POOLED = 64 + 64
SIZES: dict[str, Any] = {
    "in_channels": 16, "out_channels": 16, "num_layers": 1, "num_single_layers": 2,
    "attention_head_dim": 32, "num_attention_heads": 1, "caption_channels": [T5_WIDTH, LLAMA_WIDTH],
    "text_emb_dim": POOLED, "num_routed_experts": 3, "num_activated_experts": 2,
    "axes_dims_rope": [16, 8, 8], "llama_layers": [0, 1, 2], "ff_dim": 24, "shared_ff_dim": 16,
}  # fmt: skip
SHAPE = (1, 16, 6, 7)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def network() -> dict[str, Tensor]:
    return random_like(HiDreamImageTransformer2DModel(**SIZES), 4)


def clip_g() -> dict[str, Tensor]:
    """Told from other CLIPs by its number of layers, so that is the real one."""
    sizes = {
        "hidden_size": 64, "intermediate_size": 16, "num_hidden_layers": 32,
        "num_attention_heads": 1, "vocab_size": 49408,
    }  # fmt: skip
    return random_like(CLIPTextModel(sizes, None, "cpu", manual_cast), 8)


def encoders(folder: Path) -> dict[str, str]:
    """Files of the four text encoders, by name."""
    test_transformers.pieces(folder)
    test_hunyuan_video.pieces(folder)
    both = test_transformers.text_encoders(T5_WIDTH)
    weights = {**both, "clip_g": clip_g(), "llama": test_hunyuan_video.text_encoders()["llama"]}
    return {name: write(one, folder / f"{name}.safetensors") for name, one in weights.items()}


def clip_of(folder: Path, *names: str, kind: CLIPType = CLIPType.HIDREAM) -> Any:
    paths = encoders(folder)
    return text_loading.load_clip([paths[name] for name in names or paths], clip_type=kind)


def test_the_network_agrees_with_the_reference(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/hidream.safetensors")
    model = HiDreamImageTransformer2DModel(**net.constructor).eval()
    model.load_state_dict(net.weights)
    given = net.calls()["a"]
    assert_close_to_golden(model(given.pop("x"), given.pop("t"), **given), net.outputs["a"])


def test_sizes_are_read_from_the_weights_and_a_hole_is_named() -> None:
    weights = network()
    config = read_hidream_config(weights)
    assert config is not None
    assert {key: config[key] for key in SIZES} == SIZES
    del weights["caption_projection.3.linear.weight"]
    with pytest.raises(BrokenModelError, match=r"layout of HiDream, but caption_projection\.3"):
        read_hidream_config(weights)


def test_four_texts_and_a_picture_become_a_latent(tmp_path: Path) -> None:
    model = loading.load_diffusion_model(write(network(), tmp_path / "model.safetensors"))
    assert type(model.model.model_config).__name__ == "HiDream"
    clip = clip_of(tmp_path)
    [[cond, told]] = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
    assert cond.shape == (1, 128, T5_WIDTH)
    assert told["pooled_output"].shape == (1, POOLED)
    layers = told["conditioning_llama3"]
    assert layers.shape[0] == 1
    assert layers.shape[2:] == (128, LLAMA_WIDTH)
    latent = sampled(model, clip, SHAPE)
    edited = sampled(model, clip, SHAPE, concat_latent_image=torch.ones(SHAPE))
    assert edited.shape == SHAPE
    assert not torch.equal(edited, latent)
    texts = {"clip_l": "a", "clip_g": "a", "t5xxl": "a", "llama": "a cat"}
    [[one, other]] = CLIPTextEncodeHiDream.execute(clip, **texts)[0]
    [[same, facts]] = CLIPTextEncodeHiDream.execute(clip, **{**texts, "llama": "cat"})[0]
    assert torch.equal(one, same)
    assert not torch.equal(other["conditioning_llama3"], facts["conditioning_llama3"])


def test_an_absent_encoder_counts_as_zeros(tmp_path: Path) -> None:
    clip = clip_of(tmp_path, "llama", kind=CLIPType.STABLE_DIFFUSION)
    [[cond, told]] = clip.encode_from_tokens_scheduled(clip.tokenize("a cat"))
    assert cond.shape == (1, 128, 4096)
    assert not cond.any()
    assert told["pooled_output"].shape == (1, 768 + 1280)
    assert told["conditioning_llama3"].any()
    clip = clip_of(tmp_path, "t5xxl", "clip_l")
    [[cond, told]] = clip.encode_from_tokens_scheduled(clip.tokenize("a cat"))
    assert cond.any()
    assert told["conditioning_llama3"].shape == (1, 32, 1, 4096)


def test_without_its_states_the_network_says_what_is_missing(tmp_path: Path) -> None:
    model = loading.load_diffusion_model(write(network(), tmp_path / "model.safetensors"))
    x, t = torch.zeros(SHAPE), torch.ones(1)
    with pytest.raises(ValueError, match="encode the text with the text encoders of HiDream"):
        model.model.diffusion_model(x, t, context=torch.zeros(1, 3, T5_WIDTH))
