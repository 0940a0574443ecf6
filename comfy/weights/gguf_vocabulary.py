"""The vocabulary in the header of a GGUF file, in a form that tokenizers of this server read.

Lists of pieces with scores become a SentencePiece model, lists with pairs that join a
tokenizer.json. The header names the way text is cut before pairs are joined; a vocabulary with
another way than these is left out, and one from a file beside the encoder is needed.
Source: https://github.com/ggml-org/ggml, docs/gguf.md, "Tokenizer".
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

logger = logging.getLogger(__name__)

PLAIN, UNKNOWN, CONTROL, TYPED, UNUSED = 1, 2, 3, 4, 5  # kinds of pieces; as in SentencePiece
UNIGRAM, MERGING = 1, 2  # kinds of SentencePiece models
PADDING = ("[PAD", "<extra_id_")  # pieces after the vocabulary that fill up the token table

Item = TypeVar("Item", str, float, int)
NAMES: dict[type, str] = {str: "texts", float: "numbers", int: "whole numbers"}


class Cut(NamedTuple):
    """How text is cut into words: a pattern, and whether characters are composed before."""

    pattern: str
    composes: bool = False


_ENDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CUTS: dict[str, Cut] = {
    "qwen2": Cut(_SHORT + _ENDS % "", composes=True),
    "llama-bpe": Cut(_SHORT + _ENDS % "{1,3}"),
    "tekken": Cut(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""Names of ways to cut text -> patterns."""


class BrokenVocabularyError(ValueError):
    """Lists of a vocabulary that are not what they must be."""


def of_header(facts: Mapping[str, Any]) -> bytes | None:
    """A tokenizer.json or a SentencePiece model; None where the header has no such vocabulary.

    Raises:
        BrokenVocabularyError: It has one that no tokenizer can be made of.
    """
    kind, pieces = str(facts.get("tokenizer.ggml.model")), _listed(facts, "tokens", str)
    if not pieces:
        return None
    if kind in ("t5", "llama") and len(_listed(facts, "scores", float)) == len(pieces):
        return _sentencepiece(pieces, facts, UNIGRAM if kind == "t5" else MERGING)
    cut = CUTS.get(str(facts.get("tokenizer.ggml.pre")))
    if kind == "gpt2" and cut is not None:
        return _pairs(pieces, facts, cut)
    logger.info("the vocabulary of the file (%s, %s) is of no known kind; one beside it is needed",
                kind, facts.get("tokenizer.ggml.pre"))  # fmt: skip
    return None


def _listed(facts: Mapping[str, Any], name: str, kind: type[Item]) -> list[Item]:
    """A list of the vocabulary; empty where there is none.

    Raises:
        BrokenVocabularyError: It is no list, or holds something else.
    """
    values = facts.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(values, list) or not {type(value) for value in values} <= {kind}:
        raise BrokenVocabularyError(f"tokenizer.ggml.{name} is no list of {NAMES[kind]}")
    return values


def _kinds(facts: Mapping[str, Any], count: int) -> Sequence[int]:
    kinds = _listed(facts, "token_type", int)
    if min(kinds, default=0) < 0:
        raise BrokenVocabularyError(f"tokenizer.ggml.token_type holds {min(kinds)}")
    return kinds if len(kinds) == count else [PLAIN] * count


def _pairs(pieces: Sequence[str], facts: Mapping[str, Any], cut: Cut) -> bytes:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as cutting

    kinds = _kinds(facts, len(pieces))
    numbers = {p: n for n, (p, kind) in enumerate(zip(pieces, kinds)) if kind != UNUSED}
    halves = (text.split(" ") for text in _listed(facts, "merges", str))
    joined = [(pair[0], pair[1]) for pair in halves if len(pair) == 2]
    for pair in joined:
        if not {*pair, "".join(pair)} <= numbers.keys():
            raise BrokenVocabularyError(f"tokenizer.ggml.merges joins {pair}, which are no pieces")
    made = Tokenizer(models.BPE(numbers, joined, ignore_merges=not cut.composes))
    if cut.composes:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = cutting.Sequence(
        [
            cutting.Split(Regex(cut.pattern), "isolated"),
            cutting.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    marks = [p for p, kind in zip(pieces, kinds) if kind in (CONTROL, TYPED)]
    made.add_special_tokens([AddedToken(p, special=True, normalized=False) for p in marks])
    return made.to_str().encode()


def _sentencepiece(pieces: Sequence[str], facts: Mapping[str, Any], kind: int) -> bytes:
    """A SentencePiece model.

    Source: https://github.com/google/sentencepiece, sentencepiece_model.proto.
    """
    count, kinds = len(pieces), _kinds(facts, len(pieces))
    while count and pieces[count - 1].startswith(PADDING):
        count -= 1
    scores = _listed(facts, "scores", float)
    whole = b"".join(
        _field(1, _field(1, text.encode()) + _number(2, score) + _field(3, int(of)))
        for text, score, of in zip(pieces[:count], scores, kinds)
    )
    rules = _field(3, int(bool(facts.get("tokenizer.ggml.add_space_prefix", True))))
    rules += _field(4, int(bool(facts.get("tokenizer.ggml.remove_extra_whitespaces", False))))
    characters = _listed(facts, "precompiled_charsmap", int)
    if characters:
        rules = _field(2, bytes(value & 255 for value in characters)) + rules
    return whole + _field(2, _field(3, kind)) + _field(3, rules)


def _field(number: int, value: int | bytes) -> bytes:
    """A field of a protobuf message: a whole number, or counted bytes."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _number(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])
