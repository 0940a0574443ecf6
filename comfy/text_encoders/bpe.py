"""The byte-pair tokenizer of CLIP, from the merges file of the `clip-anytorch` package.

Text is normalised (NFC, white space to single blanks, lower case), cut into words, numbers and
signs, and each piece is merged from its bytes; the last byte of a piece carries ``</w>``.
Source: Radford et al. 2021, https://arxiv.org/abs/2103.00020, section 2.4.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

START_TEXT, END_TEXT = "<|startoftext|>", "<|endoftext|>"
VOCABULARY_SIZE = 49408
WORD_END = "</w>"
MERGES_FILE = "bpe_simple_vocab_16e6.txt.gz"
# English contractions, runs of letters, single digits, runs of anything else but blanks.
PIECES = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"

_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def merges_path() -> Path:
    """Where the merges file is installed; raises FileNotFoundError with what to install."""
    spec = importlib.util.find_spec("clip")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / MERGES_FILE
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{MERGES_FILE}, the word pieces of CLIP, was not found; install it with: "
        "pip install clip-anytorch"
    )


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte value, in the order of the vocabulary.

    Printable bytes stand for themselves; the others take the code points from 256 on.
    """
    return [chr(byte) for byte in _PRINTABLE] + [chr(256 + n) for n in range(256 - len(_PRINTABLE))]


def byte_values() -> list[int]:
    """The byte values in the order of `byte_letters`."""
    return [*_PRINTABLE, *(byte for byte in range(256) if byte not in _PRINTABLE)]


def vocabulary(merges: list[tuple[str, str]]) -> dict[str, int]:
    """Token -> id: bytes, bytes that end a word, merges in order, start, end."""
    letters = byte_letters()
    tokens = letters + [letter + WORD_END for letter in letters]
    tokens += [left + right for left, right in merges]
    tokens += [START_TEXT, END_TEXT]
    return {token: number for number, token in enumerate(tokens)}


def read_merges(path: Path) -> list[tuple[str, str]]:
    """The merges a vocabulary of 49,408 tokens uses, in order; the file has more."""
    count = VOCABULARY_SIZE - 2 - 2 * 256
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")
    pairs = [line.split() for line in lines[1 : count + 1]]
    return [(left, right) for left, right in pairs]


@functools.cache
def clip_bpe() -> Tokenizer:
    """The tokenizer, built once per process; it is not to be modified."""
    merges = read_merges(merges_path())
    model = models.BPE(
        vocab=vocabulary(merges),
        merges=merges,
        end_of_word_suffix=WORD_END,
        unk_token=END_TEXT,
        fuse_unk=False,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFC(),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Lowercase(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(START_TEXT, special=True), AddedToken(END_TEXT, special=True)]
    )
    return tokenizer


class CLIPTokenizer:
    """The tokenizer in the form text encoders expect: called with text, it gives ids between start
    and end."""

    def __init__(self, pieces: Tokenizer) -> None:
        self.pieces = pieces
        self._start = self._number(START_TEXT)
        self._end = self._number(END_TEXT)

    @classmethod
    def from_pretrained(cls, path: str | None = None, **options: Any) -> CLIPTokenizer:
        """The tokenizer of CLIP; every CLIP model has the same, so there is no path to give."""
        if path is not None or options:
            raise ValueError("CLIP's tokenizer is built in and takes neither a path nor options")
        return cls(clip_bpe())

    def __call__(self, text: str) -> dict[str, list[int]]:
        """``{"input_ids": [start, ..., end]}``."""
        ids = self.pieces.encode(text, add_special_tokens=False).ids
        return {"input_ids": [self._start, *ids, self._end]}

    def _number(self, token: str) -> int:
        number = self.pieces.token_to_id(token)
        if number is None:
            raise ValueError(f"the vocabulary lacks the token {token!r}, which bounds every text")
        return number

    def get_vocab(self) -> dict[str, int]:
        """Word piece -> id."""
        return self.pieces.get_vocab()

    def decode(self, ids: list[int]) -> str:
        """Text of ids, start and end left out."""
        kept = [number for number in ids if number not in (self._start, self._end)]
        letters = dict(zip(byte_letters(), byte_values()))
        joined = "".join(self.pieces.id_to_token(number) or "" for number in kept)
        words = joined.replace(WORD_END, " ").strip()
        return bytes(letters.get(c, ord(" ")) for c in words).decode("utf-8", "replace")
