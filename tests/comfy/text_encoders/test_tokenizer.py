"""Tokens against the recorded ones: ids, weights, word numbers, chunks, embeddings."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy.text_encoders.bpe import CLIPTokenizer
from comfy.text_encoders.sd1 import SD1Tokenizer
from comfy.text_encoders.sd2 import SD2Tokenizer
from comfy.text_encoders.sdxl import SDXLTokenizer, StableCascadeTokenizer


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    """A folder as the recorder had it; each row is findable by its value."""
    folder = tmp_path_factory.mktemp("emb") / "emb"
    (folder / "sub").mkdir(parents=True)
    values = {
        "style_a": torch.randn(2, 768),
        "xlpair_l": torch.randn(3, 768),
        "xlpair_g": torch.randn(3, 1280),
        "old": torch.randn(1, 768),
        "flat": torch.randn(768),
        "tiny32": torch.randn(2, 32),
    }
    save_file({"emb_params": values["style_a"]}, folder / "style_a.safetensors")
    save_file(
        {"clip_l": values["xlpair_l"], "clip_g": values["xlpair_g"]}, folder / "xlpair.safetensors"
    )
    torch.save({"string_to_param": {"*": values["old"]}}, folder / "old.pt")
    save_file({"emb_params": values["flat"]}, folder / "sub" / "flat.safetensors")
    save_file({"emb_params": values["tiny32"]}, folder / "tiny32.safetensors")
    return folder, values


def describe(token: Any, values: dict[str, Tensor]) -> Any:
    """An embedding row in the recorder's words; an id as it is."""
    if not isinstance(token, Tensor):
        return token
    for name, rows in values.items():
        for number, row in enumerate(rows.reshape(-1, rows.shape[-1])):
            if row.shape == token.shape and torch.equal(row, token):
                return {"embedding": name, "row": number}
    raise AssertionError("a row of no embedding")


def unpack(chunk: dict[str, Any]) -> list[list[Any]]:
    token, times = chunk.get("then_repeat") or (None, 0)
    tokens = chunk["tokens"] + [token] * times
    assert len(tokens) == chunk["length"]
    return tokens


@pytest.mark.parametrize(
    ("case", "kind", "has_folder"),
    [
        ("SD1 (l)", SD1Tokenizer, True),
        ("SD1 without embedding directory", SD1Tokenizer, False),
        ("SD2 (h)", SD2Tokenizer, True),
        ("SDXL (l,g)", SDXLTokenizer, True),
        ("Stable Cascade (g)", StableCascadeTokenizer, True),
    ],
)
def test_tokens_equal_the_recorded_ones(case, kind, has_folder, embeddings, golden_json) -> None:
    folder, values = embeddings
    tokenizer = kind(embedding_directory=str(folder) if has_folder else None)
    for text, expected in golden_json("prompt_tokens.json")["tokenizers"][case].items():
        actual = tokenizer.tokenize_with_weights(text, return_word_ids=True)
        assert actual.keys() == expected.keys()
        for name, chunks in expected.items():
            described = [
                [[describe(t, values), w, i] for t, w, i in chunk] for chunk in actual[name]
            ]
            assert described == [unpack(chunk) for chunk in chunks], (text, name)


def test_a_missing_embedding_is_warned_about_by_name(embeddings, caplog) -> None:
    tokenizer = SD1Tokenizer(embedding_directory=str(embeddings[0]))
    with caplog.at_level(logging.WARNING):
        tokenizer.tokenize_with_weights("a embedding:nowhere cat")
    assert "nowhere" in caplog.text


@pytest.mark.parametrize("text", ["cat,embedding:style_a", "cat,\tembedding:style_a"])
def test_an_embedding_may_start_at_any_word_boundary(text: str, embeddings) -> None:
    folder, values = embeddings
    [chunk] = SD1Tokenizer(embedding_directory=str(folder)).tokenize_with_weights(text)["l"]
    rows = [token for token, _ in chunk if isinstance(token, Tensor)]
    assert torch.equal(torch.stack(rows), values["style_a"])
    assert [token for token, _ in chunk[1:3]] == [2368, 267]


@pytest.mark.parametrize("sign", [",", ".", "!", '"', "),", "..."])
def test_signs_may_follow_an_embedding(sign: str, embeddings) -> None:
    folder, values = embeddings
    tokenizer = SD1Tokenizer(embedding_directory=str(folder))
    [chunk] = tokenizer.tokenize_with_weights(
        f"a embedding:style_a{sign} cat", disable_weights=True
    )["l"]
    rows = [token for token, _ in chunk if isinstance(token, Tensor)]
    assert torch.equal(torch.stack(rows), values["style_a"])
    [plain] = tokenizer.tokenize_with_weights(f"{sign} cat", disable_weights=True)["l"]
    ids = [token for token, _ in plain]
    assert [token for token, _ in chunk[4:]] == ids[1:-3]


def test_warnings_reach_the_person_at_the_graph(embeddings) -> None:
    from comfy import progress

    shown: list[str] = []
    progress.set_note_hook(shown.append)
    try:
        tokenizer = SD1Tokenizer(embedding_directory=str(embeddings[0]))
        tokenizer.tokenize_with_weights("a embedding:nowhere, cat")
    finally:
        progress.set_note_hook(None)
    assert len(shown) == 1
    assert "'nowhere' was not found" in shown[0]


def test_a_text_of_missing_embeddings_takes_time_in_proportion_and_says_so_once(tmp_path) -> None:
    from comfy import progress

    for number in range(20):
        (tmp_path / f"folder{number}").mkdir()
    shown: list[str] = []
    progress.set_note_hook(shown.append)
    begin = time.process_time()
    try:
        tokenizer = SD1Tokenizer(embedding_directory=str(tmp_path))
        tokenizer.tokenize_with_weights("a ,embedding:nowhere, " * 5000)
    finally:
        progress.set_note_hook(None)
    assert time.process_time() - begin < 5.0
    assert len(shown) == 1


@pytest.mark.parametrize(
    ("text", "same"),
    [("\ud83d\ude00 cat", "\U0001f600 cat"), ("\ud800 cat", "\ufffd cat"), ("\udfff", "\ufffd")],
)
def test_halves_of_characters_are_joined_or_replaced(text: str, same: str) -> None:
    tokenizer = SD1Tokenizer()
    assert tokenizer.tokenize_with_weights(text) == tokenizer.tokenize_with_weights(same)


@pytest.mark.parametrize("name", ["\0", "a\0b", "\ud800", "x" * 5000, ".", "/etc/passwd"])
def test_names_no_file_can_have_are_missing_embeddings(name: str, embeddings) -> None:
    tokenizer = SD1Tokenizer(embedding_directory=str(embeddings[0]))
    [chunk] = tokenizer.tokenize_with_weights(f"a embedding:{name} cat")["l"]
    assert [token for token, _ in chunk[1:3]] == [320, 2368]


def test_an_embedding_outside_the_folder_is_not_read(tmp_path, caplog) -> None:
    (tmp_path / "in").mkdir()
    save_file({"emb_params": torch.zeros(1, 768)}, tmp_path / "out.safetensors")
    tokenizer = SD1Tokenizer(embedding_directory=[str(tmp_path / "in")])
    [chunk] = tokenizer.tokenize_with_weights("embedding:../out")["l"]
    assert not any(isinstance(token, Tensor) for token, _ in chunk)


def test_decoding_gives_the_text_back() -> None:
    tokenizer = CLIPTokenizer.from_pretrained()
    assert tokenizer.decode(tokenizer("a café, two cats")["input_ids"]) == "a café , two cats"
