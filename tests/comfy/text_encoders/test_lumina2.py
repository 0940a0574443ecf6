"""Gemma 2 and 3 as text encoders: from files with and without word pieces, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy import text_loading
from comfy.families.text_sizes import text_model_configs
from comfy.ldm.llm.model import DecoderLLM
from comfy.ops import manual_cast
from comfy.text_encoders import lumina2
from comfy.weights.errors import WeightFileError
from tests.comfy.families import key_shapes
from tests.comfy.families.test_transformers import random_like
from tests.comfy.text_encoders.test_sentencepiece_file import MERGING, merging_file

VOCABULARY = merging_file([*MERGING, ("<start_of_turn>", 0.0, 4)])
KINDS = {lumina2.GEMMA2_2B: lumina2.GEMMA2_CONFIG, lumina2.GEMMA3_4B: lumina2.GEMMA3_CONFIG}


def gemma(kind: str) -> dict[str, Tensor]:
    sizes = {
        **KINDS[kind], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 7, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 256,
    }  # fmt: skip
    return random_like(DecoderLLM(sizes, None, "cpu", manual_cast), 7)


def written(weights: dict[str, Tensor], folder: Path, content: bytes | None) -> str:
    path = str(folder / "gemma.safetensors")
    held = {} if content is None else {"spiece_model": torch.tensor(list(content)).byte()}
    save_file({**weights, **held}, path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_its_vocabulary_loads_encodes_and_is_saved_whole(
    kind: str, tmp_path: Path
) -> None:
    weights = gemma(kind)
    clip = text_loading.load_clip([written(weights, tmp_path, VOCABULARY)])
    tokens = clip.tokenize("cat  cat")
    assert [pair[0] for pair in tokens[kind][0]] == [2, 11, 5, 11]
    cond, pooled = clip.encode_from_tokens(tokens, return_pooled=True)
    assert cond.shape == (1, 4, 32)
    assert pooled is None
    told = clip.encode_from_tokens(tokens, return_dict=True)
    assert told["attention_mask"].tolist() == [[1, 1, 1, 1]]
    assert not torch.equal(cond, clip.encode("cat cat cat"))
    saved = clip.get_sd()
    assert bytes(saved["spiece_model"].tolist()) == VOCABULARY
    prefix = f"{kind}.transformer."
    assert {k.removeprefix(prefix) for k in saved if k.startswith(prefix)} == set(weights)


@pytest.mark.parametrize("name", ["gemma_tokenizer.model", "tokenizer.model"])
def test_the_vocabulary_may_lie_beside_the_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")  # of another model
    (tmp_path / name).write_bytes(VOCABULARY)
    clip = text_loading.load_clip([written(gemma(lumina2.GEMMA2_2B), tmp_path, None)])
    assert [pair[0] for pair in clip.tokenize("cat")[lumina2.GEMMA2_2B][0]] == [2, 11]
    assert "spiece_model" not in clip.get_sd()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "word pieces of Gemma were not found"), (b"x", "no word pieces")],
)
def test_without_a_vocabulary_the_error_says_what_to_fetch(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    path = written(gemma(lumina2.GEMMA2_2B), tmp_path, content)
    with pytest.raises((FileNotFoundError, WeightFileError), match=rf"{message}.*tokenizer\.json"):
        text_loading.load_clip([path])


def test_only_gemma_2_gives_parentheses_a_meaning(tmp_path: Path) -> None:
    for kind, weights in ((lumina2.GEMMA2_2B, {2.0}), (lumina2.GEMMA3_4B, {1.0})):
        clip = text_loading.load_clip([written(gemma(kind), tmp_path, VOCABULARY)])
        told: Any = clip.tokenize("(cat:2)")[kind][0]
        assert {weight for _, weight in told[1:]} == weights, kind


def test_the_full_size_encoder_has_the_recorded_weights(golden_folder: Path) -> None:
    recorded = key_shapes.recorded(golden_folder)["text_encoders"]
    patterns = recorded["text_encoders.lumina2.LuminaTEModel_"]["keys"]
    expected = {key: list(value.shape) for key, value in key_shapes.expand(patterns).items()}
    configs = text_model_configs(key_shapes.expand(patterns), {})
    encoder = lumina2.LuminaModel("meta", torch.bfloat16, configs)
    found = {key: list(value.shape) for key, value in encoder.state_dict().items()}
    assert found == expected
