"""Text encoders in GGUF files: names and rows of llama.cpp, vocabularies of headers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor

from comfy import text_loading
from comfy.ldm.llm.model import DecoderLLM
from comfy.ops import manual_cast
from comfy.ops.encoded import EncodedWeight
from comfy.text_encoders import hunyuan_video, lumina2, qwen, t5_pieces
from comfy.text_encoders.sentencepiece_file import read_piece_file
from comfy.weights import gguf_text, gguf_vocabulary
from comfy.weights.errors import UnknownWeightFormatError
from tests.comfy.families.test_qwen import pieces, text_encoder
from tests.comfy.families.test_transformers import random_like
from tests.comfy.test_text_loading import t5
from tests.comfy.text_encoders.test_lumina2 import gemma
from tests.comfy.text_encoders.test_sentencepiece_file import (
    MERGING,
    WORDS,
    merging_file,
    piece_file,
)
from tests.support import gguf_files

VOCABULARY = [*MERGING, ("<start_of_turn>", 0.0, 4)]
# Architecture in a header -> the encoder, and sizes that tell it.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (hunyuan_video.NAME, {"qk_norm": False}),
    "qwen2vl": (qwen.QWEN25_7B, {"qk_norm": False, "qkv_bias": True}),
    "qwen3": (qwen.QWEN3_4B, {"qk_norm": True}),
}


def llm(kind: str) -> dict[str, Tensor]:
    """A small model; its norms differ from 1, so that a mistake with them shows."""
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, **MODELS[kind][1],
    }  # fmt: skip
    weights = random_like(DecoderLLM(sizes, None, "cpu", manual_cast), 7)
    return {
        key: value + torch.linspace(0, 0.5, len(value)) if value.ndim == 1 else value
        for key, value in weights.items()
    }


def of_llama_cpp(weights: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The weights as converters of llama.cpp write them."""
    names = {theirs: ours for ours, theirs in gguf_text.ARCHITECTURES[kind].items()}
    made: dict[str, Tensor] = {}
    for key, value in weights.items():
        layer, _, last = key.rpartition(".")
        number = re.search(r"\.(\d+)\.", layer)
        generic = layer.replace(f".{number[1]}.", ".N.", 1) if number else layer
        name = names[generic].replace(".N.", f".{number[1]}.") if number else names[generic]
        heads = {"attn_q": 2, "attn_k": 1}.get(name.rpartition(".")[2])
        if kind == "llama" and heads is not None:
            value = (
                value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
            )
        if kind.startswith("gemma") and key.endswith("norm.weight"):
            value = value + 1
        made[f"{name}.{last}"] = value
    return made


def facts(kind: str, vocabulary: Any = None, **more: Any) -> dict[str, Any]:
    told = {
        "general.architecture": kind,
        f"{kind}.attention.head_count": 2,
        f"{kind}.attention.head_count_kv": 1,
        **more,
    }
    if vocabulary is not None:
        texts, scores, kinds = zip(*vocabulary)
        told["tokenizer.ggml.model"] = "t5" if kind == "t5" else "llama"
        told["tokenizer.ggml.tokens"] = list(texts)
        told["tokenizer.ggml.scores"] = [float(score) for score in scores]
        told["tokenizer.ggml.token_type"] = list(kinds)
    return told


def weights_of(clip: Any, name: str) -> dict[str, Tensor]:
    prefix = f"{name}.transformer."
    found = clip.cond_stage_model.state_dict()
    return {k[len(prefix) :]: v for k, v in found.items() if k.startswith(prefix)}


@pytest.mark.parametrize("kind", MODELS)
def test_a_language_model_gets_its_published_names_and_rows(kind: str, tmp_path: Path) -> None:
    pieces(tmp_path)
    (tmp_path / "llama_tokenizer.json").write_text(
        Tokenizer(models.BPE({hunyuan_video.MARK: 0}, [])).to_str()
    )
    weights = llm(kind)
    theirs = of_llama_cpp(weights, kind)
    if not kind.startswith("gemma"):  # which turns states into words with its token table
        theirs["output.weight"] = weights["lm_head.weight"] = torch.ones(64, 32)
    theirs["rope_freqs.weight"] = torch.ones(4)
    path = gguf_files.write(tmp_path / "llm.gguf", theirs, "F32", facts(kind))
    clip = text_loading.load_clip([str(path)])
    found = weights_of(clip, MODELS[kind][0])
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in weights)


def test_a_quantised_encoder_is_small_and_says_nearly_the_same(tmp_path: Path) -> None:
    pieces(tmp_path)
    weights = llm("qwen3")
    save_file(weights, tmp_path / "plain.safetensors")
    path = gguf_files.write(
        tmp_path / "q8.gguf", of_llama_cpp(weights, "qwen3"), "Q8_0", facts("qwen3")
    )
    plain = text_loading.load_clip([str(tmp_path / "plain.safetensors")])
    small = text_loading.load_clip([str(path)])
    network = small.cond_stage_model
    layers = [module for module in network.modules() if isinstance(module, EncodedWeight)]
    assert len(layers) == 1 + 3 * 7  # the token table too
    assert small.patcher.model_size() < 0.35 * plain.patcher.model_size()
    wanted, got = plain.encode("a red cat"), small.encode("a red cat")
    assert 0 < (got - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize(
    ("kind", "name"), [("gemma2", lumina2.GEMMA2_2B), ("gemma3", lumina2.GEMMA3_4B)]
)
def test_gemma_comes_with_the_vocabulary_of_its_header(
    kind: str, name: str, tmp_path: Path
) -> None:
    weights = gemma(name)
    held = {"spiece_model": torch.tensor(list(merging_file(VOCABULARY))).byte()}
    save_file({**weights, **held}, tmp_path / "plain.safetensors")
    told = facts(kind, VOCABULARY, **{"tokenizer.ggml.add_space_prefix": False})
    path = gguf_files.write(tmp_path / "g.gguf", of_llama_cpp(weights, kind), "F32", told)
    plain = text_loading.load_clip([str(tmp_path / "plain.safetensors")])
    clip = text_loading.load_clip([str(path)])
    for text in ("cat  cat", "\n\n\n", "<b> z \u00e9"):
        assert clip.tokenize(text) == plain.tokenize(text)
    torch.testing.assert_close(clip.encode("cat cat"), plain.encode("cat cat"))


@pytest.mark.parametrize("gated", [True, False])
def test_t5_gets_its_published_names(
    gated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(t5_pieces, "package_folders", lambda *_: [])
    weights = t5(32 if gated else 1024, gated)
    if not gated:
        weights = {key.replace(".wi.", ".wi_1."): value for key, value in weights.items()}
    words = [(word, -float(n), {0: 3, 1: 3, 2: 2}.get(n, 1)) for n, word in enumerate(WORDS)]
    padded = [*words, ("<extra_id_0>", 0.0, 4), ("[PAD9]", -1000.0, 5)]
    told = facts("t5", padded, **{"tokenizer.ggml.remove_extra_whitespaces": True})
    theirs = of_llama_cpp(weights, "t5")
    theirs["dec.blk.0.attn_q.weight"] = torch.ones(4, 4)
    path = gguf_files.write(tmp_path / "t5.gguf", theirs, "Q8_0", told)
    clip = text_loading.load_clip([str(path)])
    whole = piece_file()
    plain = t5_pieces.T5Pieces.from_pretrained(whole)
    tokens = clip.tokenize("a red  cat")["t5xxl"][0]
    expected = plain("a red  cat")["input_ids"]
    assert [token for token, _ in tokens][: len(expected)] == expected
    assert clip.encode("a red cat").isfinite().all()


def test_a_header_gives_the_pieces_of_the_file_it_was_made_from() -> None:
    made = gguf_vocabulary.of_header(facts("gemma2", VOCABULARY))
    assert made is not None
    again, first = read_piece_file(made), read_piece_file(merging_file(VOCABULARY))
    assert (again.pieces, again.marks, again.typed, again.merges) == (
        first.pieces, first.marks, first.typed, first.merges,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cut", "text", "words"),
    [
        ("qwen2", "a cat12's\n\n  e\u0301", ["a", "\u0120cat", "1", "2", "'s", "\u010a\u010a",
                                             "\u0120", "\u0120\u00c3\u00a9"]),
        ("llama-bpe", "a1234 e\u0301", ["a", "123", "4", "\u0120e", "\u00cc\u0123"]),
        ("tekken", "aCat/\n 12", ["a", "Cat", "/\u010a", "\u0120", "1", "2"]),
    ],
)  # fmt: skip
def test_pairs_join_within_the_words_that_the_header_names(
    cut: str, text: str, words: list[str]
) -> None:
    letters = sorted({letter for word in words for letter in word})
    merges, known = [], list(letters)
    for word in words:
        for end in range(1, len(word)):
            pair = (word[:end], word[end])
            if word[: end + 1] not in known:
                known.append(word[: end + 1])
                merges.append(" ".join(pair))
    told = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": cut,
        "tokenizer.ggml.tokens": [*known, "<|mark|>"], "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * len(known) + [3],
    }  # fmt: skip
    made = gguf_vocabulary.of_header(told)
    assert made is not None
    tokenizer = Tokenizer.from_str(made.decode())
    found = tokenizer.encode(f"{text}<|mark|>", add_special_tokens=False).tokens
    assert found == [*words, "<|mark|>"]


def test_a_vocabulary_of_an_unknown_kind_is_left_to_files_beside() -> None:
    told = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "odd",
            "tokenizer.ggml.tokens": ["a"]}  # fmt: skip
    assert gguf_vocabulary.of_header(told) is None
    assert gguf_vocabulary.of_header({}) is None


def test_rows_without_counts_of_heads_are_an_error(tmp_path: Path) -> None:
    theirs = of_llama_cpp(llm("llama"), "llama")
    told = {"general.architecture": "llama"}
    path = gguf_files.write(tmp_path / "l.gguf", theirs, "F32", told)
    with pytest.raises(UnknownWeightFormatError, match=r"l\.gguf.*llama\.attention\.head_count"):
        text_loading.load_clip([str(path)])


def test_an_encoder_with_published_names_keeps_them(tmp_path: Path) -> None:
    pieces(tmp_path)
    weights = llm("qwen3")
    path = gguf_files.write(tmp_path / "p.gguf", weights, "F32", {"general.architecture": "pig"})
    found = weights_of(text_loading.load_clip([str(path)]), qwen.QWEN3_4B)
    assert found.keys() == weights.keys()


def test_qwen3_vl_is_not_taken_for_qwen3(tmp_path: Path) -> None:
    """The names are the same, the waves of places are not."""
    pieces(tmp_path)
    weights = {"blk.0.attn_q.weight": torch.zeros(32, 32)}
    told = {"general.architecture": "qwen3vl"}
    path = gguf_files.write(tmp_path / "p.gguf", weights, "F32", told)
    with pytest.raises(UnknownWeightFormatError, match="architecture 'qwen3vl'"):
        text_loading.load_clip([str(path)])


def of_tower(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A picture tower as llama.cpp writes it: both pictures of a patch, and q, k, v, apart."""
    names = {theirs: ours for ours, theirs in gguf_text.TOWER_NAMES.items()}
    made: dict[str, Tensor] = {}
    for key, value in weights.items():
        layer, _, last = key.rpartition(".")
        number = re.search(r"\.blocks\.(\d+)\.", layer)
        name = names[layer.replace(f".{number[1]}.", ".N.") if number else layer]
        name = name.replace(".N.", f".{number[1]}.") if number else name
        if name == "v.patch_embd":
            made["v.patch_embd.weight"], made["v.patch_embd.weight.1"] = value.unbind(2)
        elif name.endswith("attn_qkv"):
            for part, rows in zip("qkv", value.chunk(3)):
                made[f"{name.removesuffix('qkv')}{part}.{last}"] = rows
        else:
            made[f"{name}.{last}"] = value
    return made


@pytest.mark.parametrize("beside", ["fits", "another width", "nothing"])
def test_a_picture_tower_beside_the_encoder_is_taken_with_it(beside: str, tmp_path: Path) -> None:
    pieces(tmp_path)
    weights = text_encoder(qwen.QWEN25_7B, 32, sees=True)
    tower = {key: value for key, value in weights.items() if key.startswith("visual.")}
    text = {key: value for key, value in weights.items() if key not in tower}
    theirs = of_llama_cpp(text, "qwen2vl")
    path = gguf_files.write(tmp_path / "Qwen-Q8_0.gguf", theirs, "F32", facts("qwen2vl"))
    if beside != "nothing":
        other = of_tower(tower)
        if beside == "another width":
            other["mm.2.weight"] = torch.cat([other["mm.2.weight"]] * 2)
        told = {"general.architecture": "clip"}
        gguf_files.write(tmp_path / "Qwen-mmproj-f16.gguf", other, "F32", told)
    found = weights_of(text_loading.load_clip([str(path)]), qwen.QWEN25_7B)
    wanted = weights if beside == "fits" else text
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
