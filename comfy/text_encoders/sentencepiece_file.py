"""Reads the vocabulary files of SentencePiece (`spiece.model`).

Such a file is one protobuf message: the pieces with their scores, how the vocabulary was trained,
and how text is normalised. Only what a tokenizer needs is read.
Source: https://github.com/google/sentencepiece, sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

PIECES, TRAINING, NORMALISING = 1, 2, 3  # fields of the whole message
TEXT, SCORE, KIND = 1, 2, 3  # fields of a piece
MODEL_TYPE, UNIGRAM, MERGING = 3, 1, 2  # field and values in the part on training
CHARACTER_MAP, PREFIX, SPACES = 2, 3, 4  # fields in the part on normalising
UNKNOWN_KIND, CONTROL_KIND, TYPED_KIND, UNUSED_KIND, BYTE_KIND = 2, 3, 4, 5, 6
VARINT, EIGHT_BYTES, COUNTED, FOUR_BYTES = 0, 1, 2, 5  # wire types
BLANK = "\u2581"  # stands for a space in pieces
HIDDEN = "\0"  # before the names of pieces that text never means; normalising removes it from text


@dataclass
class PieceFile:
    """What a file says.

    Attributes:
        pieces: Text and score (a log probability) of each piece, in the order of their ids.
        unknown: Id of the piece for what no piece covers.
        marks: Ids of pieces for the end of a text and the like, that of the unknown among them.
        typed: Ids of pieces that text means wherever it has them, and that never join others.
        plain: Ids of pieces that other pieces join to.
        merges: Whether pieces are found by joining the best neighbours (BPE) and not by the best
            sum of scores (unigram).
        byte_pieces: Whether unknown characters are spelled in bytes.
        character_map: Compiled replacements of characters; empty for none.
        adds_prefix: Whether text begins with a space.
        joins_spaces: Whether several spaces count as one.
    """

    pieces: list[tuple[str, float]] = field(default_factory=list)
    unknown: int | None = None
    marks: list[int] = field(default_factory=list)
    typed: list[int] = field(default_factory=list)
    plain: list[int] = field(default_factory=list)
    merges: bool = False
    byte_pieces: bool = False
    character_map: bytes = b""
    adds_prefix: bool = True
    joins_spaces: bool = True


def read_piece_file(content: bytes) -> PieceFile:
    """Parses a file.

    Raises:
        ValueError: It is no SentencePiece file, or neither of the unigram nor of the BPE kind.
    """
    found = PieceFile()
    try:
        for number, value in _fields(content):
            if number == PIECES and isinstance(value, bytes):
                _add_piece(found, value)
            elif number == TRAINING and isinstance(value, bytes):
                kind = dict(_fields(value)).get(MODEL_TYPE, UNIGRAM)
                if kind not in (UNIGRAM, MERGING):
                    raise ValueError(
                        f"model type {kind!r}; expected {UNIGRAM} (unigram) or {MERGING} (BPE)"
                    )
                found.merges = kind == MERGING
            elif number == NORMALISING and isinstance(value, bytes):
                rules = dict(_fields(value))
                characters = rules.get(CHARACTER_MAP, b"")
                found.character_map = characters if isinstance(characters, bytes) else b""
                found.adds_prefix = bool(rules.get(PREFIX, True))
                found.joins_spaces = bool(rules.get(SPACES, True))
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"this is no SentencePiece file ({error})") from error
    if not found.pieces or found.unknown is None:
        raise ValueError("this is no SentencePiece file: it has no pieces or none for the unknown")
    return found


def _add_piece(found: PieceFile, message: bytes) -> None:
    facts = dict(_fields(message))
    text, score, kind = facts[TEXT], facts.get(SCORE, 0.0), facts.get(KIND)
    if not isinstance(text, bytes) or not isinstance(score, float):
        raise ValueError("this is no SentencePiece file: a piece has no text or no score")
    if kind == UNKNOWN_KIND:
        found.unknown = len(found.pieces)
    if kind in (UNKNOWN_KIND, CONTROL_KIND):
        found.marks.append(len(found.pieces))
    if kind == TYPED_KIND:
        found.typed.append(len(found.pieces))
    if kind not in (UNKNOWN_KIND, CONTROL_KIND, TYPED_KIND, UNUSED_KIND, BYTE_KIND):
        found.plain.append(len(found.pieces))
    found.byte_pieces = found.byte_pieces or kind == BYTE_KIND
    found.pieces.append((text.decode("utf-8"), score))


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Number and value of each field of a protobuf message."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value, place = _varint(message, place)
            yield number, value
        elif wire == FOUR_BYTES:
            yield number, struct.unpack_from("<f", message, place)[0]
            place += 4
        elif wire == EIGHT_BYTES:
            yield number, struct.unpack_from("<d", message, place)[0]
            place += 8
        elif wire == COUNTED:
            length, place = _varint(message, place)
            if place + length > len(message):
                raise IndexError("a field is longer than the file")
            yield number, message[place : place + length]
            place += length
        else:
            raise IndexError(f"unknown wire type {wire}")


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits a byte, least first, and where it ends."""
    value = shift = 0
    while True:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise IndexError("a number is too long")


def tokenizer_of(file: PieceFile, marks_in_text: bool = False) -> Tokenizer:
    """A tokenizer with these pieces.

    Args:
        marks_in_text: Whether the names of marks, such as ``</s>``, mean these when a person types
            them. SentencePiece itself takes them for text.
    """
    pieces = list(file.pieces)
    if not marks_in_text:
        for number in file.marks:
            pieces[number] = (HIDDEN + pieces[number][0], pieces[number][1])
    steps: list[normalizers.Normalizer] = []
    if file.character_map:
        steps.append(normalizers.Precompiled(file.character_map))
    if file.joins_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if file.adds_prefix:
        steps.append(normalizers.Prepend(" "))  # also before a space that is there already
    if file.merges:
        tokenizer = Tokenizer(_merging_model(file, pieces))
        steps.append(normalizers.Replace(" ", BLANK))
    else:
        unigram = models.Unigram(pieces, unk_id=file.unknown, byte_fallback=file.byte_pieces)
        tokenizer = Tokenizer(unigram)
        words_apart = not any(BLANK in text[1:] for text, _ in file.pieces)  # else blanks join, too
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, "never", words_apart)
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = _decoder(file.adds_prefix)
    if file.merges:
        names = [file.pieces[number][0] for number in file.typed]
        tokenizer.add_tokens([AddedToken(n, special=False, normalized=True) for n in names])
    if marks_in_text:
        names = [file.pieces[number][0] for number in file.marks]
        tokenizer.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names])
    return tokenizer


def _decoder(drops_first_blank: bool) -> decoders.Decoder:
    """The way back from pieces to text."""
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if drops_first_blank:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _merging_model(file: PieceFile, pieces: list[tuple[str, float]]) -> models.BPE:
    """The model that joins neighbours, those first whose joint piece has the highest score."""
    known = {pieces[number][0]: number for number in file.plain}
    joins = [
        (-pieces[number][1], known[name[:cut]], known[name[cut:]])
        for name, number in known.items()
        for cut in range(1, len(name))
        if name[:cut] in known and name[cut:] in known
    ]
    joins.sort()
    return models.BPE(
        vocab={name: number for number, (name, _) in enumerate(pieces)},
        merges=[(pieces[left][0], pieces[right][0]) for _, left, right in joins],
        unk_token=pieces[file.unknown or 0][0],
        fuse_unk=True,
        byte_fallback=file.byte_pieces,
    )
