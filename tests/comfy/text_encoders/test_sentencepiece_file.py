"""Vocabularies of T5: from `spiece.model`, from `tokenizer.json`, from the encoder's own file."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from comfy.text_encoders import t5_pieces
from comfy.text_encoders.sentencepiece_file import read_piece_file, tokenizer_of
from comfy.text_encoders.t5_pieces import T5Pieces, find_pieces, pieces_source
from comfy.text_encoders.umt5 import UMT5Pieces

WORDS = [
    "<pad>",
    "</s>",
    "<unk>",
    "\u2581",
    "\u2581a",
    "\u2581red",
    "\u2581cat",
    "c",
    "a",
    "t",
    "s",
]
NORMAL, UNKNOWN, CONTROL = 1, 2, 3


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def counted(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def piece_file(
    model_type: int = 1,
    adds_prefix: bool = True,
    joins_spaces: bool = True,
    words: list[str] = WORDS,
) -> bytes:
    """The bytes of a `spiece.model` with a few words."""
    content = b""
    for number, word in enumerate(words):
        kind = {0: CONTROL, 1: CONTROL, 2: UNKNOWN}.get(number, NORMAL)
        piece = counted(1, word.encode()) + varint(2 << 3 | 5) + struct.pack("<f", -float(number))
        content += counted(1, piece + varint(3 << 3) + varint(kind))
    training = varint(3 << 3) + varint(model_type) + counted(7, b"ignored")
    normalising = varint(3 << 3) + varint(int(adds_prefix))
    normalising += varint(4 << 3) + varint(int(joins_spaces))
    return content + counted(2, training) + counted(3, normalising)


def same_as_json(folder: Path) -> Path:
    tokenizer = Tokenizer(models.Unigram([(w, -float(n)) for n, w in enumerate(WORDS)], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("text", ["a red cat", "cats", "", "a  red   cat ", "xyz cat", " red"])
def test_both_kinds_of_file_give_the_same_tokens(text: str, tmp_path: Path) -> None:
    path = tmp_path / "spiece.model"
    path.write_bytes(piece_file())
    from_pieces = T5Pieces.from_pretrained(str(path))
    from_json = T5Pieces.from_pretrained(str(same_as_json(tmp_path)))
    single = " ".join(text.split())
    assert from_pieces(text) == from_json(single)
    assert from_pieces(text)["input_ids"][-1] == 1


def test_the_words_have_the_ids_of_the_file() -> None:
    pieces = T5Pieces.from_pretrained(piece_file())
    assert pieces("a red cats")["input_ids"] == [4, 5, 6, 10, 1]
    assert pieces("\u732b")["input_ids"][-2:] == [2, 1]


@pytest.mark.parametrize("text", [" cat", "  cat", "\u2581cat"])
def test_a_blank_is_put_before_text_that_begins_with_one(text: str) -> None:
    """As SentencePiece does; so begin the texts between weighted words."""
    tokenizer = tokenizer_of(read_piece_file(piece_file(joins_spaces=False)))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == [3] * (len(text) - 3) + [6]


def test_pieces_of_several_blanks_are_found() -> None:
    content = piece_file(joins_spaces=False, words=[*WORDS, "\u2581" * 4])
    tokenizer = tokenizer_of(read_piece_file(content))
    assert tokenizer.encode("a     cat", add_special_tokens=False).ids == [4, 11, 6]


def test_typed_marks_mean_these_for_t5_and_are_text_for_umt5() -> None:
    words = [*WORDS, "<", "/", ">"]
    t5 = T5Pieces.from_pretrained(piece_file(words=words))
    assert t5("a</s>")["input_ids"] == [4, 1, 1]
    assert t5("<extra_id_99>")["input_ids"] == [len(words), 1]
    assert t5("<extra_id_0>")["input_ids"] == [len(words) + 99, 1]
    umt5 = UMT5Pieces.from_pretrained(piece_file(words=words))
    assert umt5("a</s>")["input_ids"] == [4, 11, 12, 10, 13, 1]
    assert umt5("<pad>")["input_ids"][-2:] == [13, 1]
    assert umt5.get_vocab()["</s>"] == 1


def test_a_file_may_leave_out_the_blank_at_the_beginning() -> None:
    tokenizer = tokenizer_of(read_piece_file(piece_file(adds_prefix=False)))
    assert tokenizer.encode("cat", add_special_tokens=False).ids == [7, 8, 9]


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00", b"not a vocabulary", b"\xff" * 40, piece_file()[:50], piece_file(model_type=3)],
)
def test_what_is_no_vocabulary_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"SentencePiece|model type"):
        read_piece_file(content)
    path = tmp_path / "spiece.model"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"spiece\.model holds no word pieces of T5"):
        T5Pieces.from_pretrained(str(path))


def test_t5_does_not_take_a_vocabulary_whose_pieces_join(tmp_path: Path) -> None:
    path = tmp_path / "spiece.model"
    path.write_bytes(merging_file(MERGING))
    with pytest.raises(ValueError, match=r"spiece\.model holds no word pieces of T5.*BPE"):
        T5Pieces.from_pretrained(str(path))


def test_the_encoders_own_vocabulary_comes_first() -> None:
    own = torch.tensor(list(piece_file()), dtype=torch.uint8)
    data = {"t5_tokenizer": "/elsewhere", "spiece_model": own}
    assert pieces_source(data) == piece_file()
    assert pieces_source({"t5xxl.transformer.spiece_model": own}) == piece_file()
    assert pieces_source({"t5_tokenizer": "/elsewhere"}) == "/elsewhere"
    assert pieces_source(None) is None


def test_vocabularies_of_other_encoders_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(t5_pieces, "PACKAGE", "a_package_nobody_has")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    Tokenizer(models.BPE()).save(str(first / "tokenizer.json"))
    assert find_pieces([str(first)]) is None
    (first / "broken.json").write_text("{", encoding="utf-8")
    found = same_as_json(second)
    assert find_pieces([str(first), str(second)]) == str(found)
    (second / "t5_tokenizer.json").write_bytes(found.read_bytes())
    assert find_pieces([str(second)]) == str(second / "t5_tokenizer.json")


def merging_file(words: list[tuple[str, float, int]]) -> bytes:
    """The bytes of a `tokenizer.model` of the kind that joins neighbours, as Gemma has it."""
    content = b""
    for word, score, kind in words:
        piece = counted(1, word.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score)
        content += counted(1, piece + varint(3 << 3) + varint(kind))
    training = varint(3 << 3) + varint(2)
    normalising = varint(3 << 3) + varint(0) + varint(4 << 3) + varint(0)
    return content + counted(2, training) + counted(3, normalising)


MERGING = [
    ("<pad>", 0.0, 3), ("<eos>", 0.0, 3), ("<bos>", 0.0, 3), ("<unk>", 0.0, 2),
    ("\n\n", 0.0, 4), ("\u2581\u2581", 0.0, 4), ("<0xC3>", 0.0, 6), ("<0xA9>", 0.0, 6),
    ("at", -0.5, 1), ("\u2581c", -1.0, 1), ("ca", -2.0, 1), ("cat", -3.0, 1),
    ("\u2581cat", -4.0, 1), ("c", -5.0, 1), ("a", -6.0, 1), ("t", -7.0, 1), ("\u2581", -8.0, 1),
    ("<", -9.0, 1), (">", -10.0, 1), ("b", -11.0, 1), ("\n", -12.0, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("cat", [11]),  # c + at, for "at" has the highest score
        (" cat", [12]),
        ("cacat", [10, 11]),
        ("  cat", [5, 11]),  # a piece that text means joins nothing
        ("\n\n\n", [4, 20]),
        ("\u00e9", [6, 7]),
        ("<b>", [17, 19, 18]),
        ("z", [3]),
        ("", []),
    ],
)
def test_neighbours_of_the_highest_score_join_first(text: str, ids: list[int]) -> None:
    tokenizer = tokenizer_of(read_piece_file(merging_file(MERGING)))
    assert tokenizer.encode(text, add_special_tokens=False).ids == ids


def test_names_of_marks_are_text_where_neighbours_join() -> None:
    words = [*MERGING, ("<bos", -13.0, 1), ("o", -14.0, 1), ("s", -15.0, 1), ("<b", -12.5, 1)]
    words += [("<bo", -12.7, 1)]
    tokenizer = tokenizer_of(read_piece_file(merging_file(words)))
    assert tokenizer.encode("<bos>", add_special_tokens=False).ids == [21, 18]
