"""The byte-pair vocabulary of Mistral: a `tekken.json`, as bytes, as a file, or as tokenizer.json.

A tekken file lists pieces of bytes by rank; which pairs of pieces join follows from the ranks. The
first numbers are those of marks such as `[INST]`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

START, PAD = 1, 11
EMBEDDED = "tekken_model"  # name of the tensor of bytes in files of encoders
FILE_NAMES = ("tekken.json", "mistral_tokenizer.json", "tokenizer.json")
MARK = "[SYSTEM_PROMPT]"
WANTED = (
    "take a file of Mistral Small 3 that holds them (a tensor tekken_model), or put tekken.json or "
    "tokenizer.json of the model beside it or in models/text_encoders, as tekken.json or "
    "mistral_tokenizer.json"
)
# Marks of files that do not list them, in the order of their numbers.
USUAL_MARKS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip


class TekkenPieces:
    """Called with text, it gives the start's id and those of the text."""

    def __init__(self, pieces: Tokenizer) -> None:
        self.pieces = pieces

    @classmethod
    def from_pretrained(cls, source: str | bytes | None = None) -> TekkenPieces:
        """From the bytes of a `tekken.json`, or from the path of one or of a `tokenizer.json`.

        Raises:
            FileNotFoundError: There is none; the text says what is needed.
            ValueError: It is no vocabulary of this kind.
        """
        if isinstance(source, str) and Path(source).is_file():
            content = Path(source).read_bytes()
        elif isinstance(source, bytes):
            content = source
        else:
            raise FileNotFoundError(
                f"the word pieces of Mistral were not found ({source or 'no file given'}); {WANTED}"
            )
        try:
            described = json.loads(content)
            if "config" in described:
                return cls(tokenizer_of(described))
            return cls(Tokenizer.from_str(content.decode("utf-8")))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"no word pieces of Mistral ({error}); {WANTED}") from error

    def __call__(self, text: str) -> dict[str, list[int]]:
        """``{"input_ids": [start, ...]}``."""
        return {"input_ids": [START, *self.pieces.encode(text, add_special_tokens=False).ids]}

    def get_vocab(self) -> dict[str, int]:
        """Piece -> id."""
        return self.pieces.get_vocab()


def tokenizer_of(described: Mapping[str, Any]) -> Tokenizer:
    """A tokenizer of the content of a `tekken.json`."""
    config = described["config"]
    marks = int(config["default_num_special_tokens"])
    count = int(config["default_vocab_size"]) - marks
    ranks = {
        base64.b64decode(entry["token_bytes"]): number
        for number, entry in enumerate(described["vocab"][:count])
    }
    letters = byte_letters()
    spelled = {piece: "".join(letters[byte] for byte in piece) for piece in ranks}
    names = dict(enumerate(USUAL_MARKS[:marks]))
    listed = described.get("special_tokens") or ()
    names.update({int(entry["rank"]): str(entry["token_str"]) for entry in listed})
    vocabulary = {spelled[piece]: marks + rank for piece, rank in ranks.items()}
    # A mark's number must be in the vocabulary before it is a mark: else it would get a new one.
    vocabulary.update({name: number for number, name in names.items()})
    merges = [(spelled[left], spelled[right]) for left, right in pairs(ranks)]
    pieces = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    pieces.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pieces.decoder = decoders.ByteLevel()
    added = [AddedToken(name, special=True, normalized=False) for name in names.values()]
    pieces.add_special_tokens(added)
    return pieces


def pairs(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Pairs of pieces that join into a piece, those of lower rank first."""
    found: list[tuple[int, int, int, bytes, bytes]] = []
    for piece, rank in ranks.items():
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        known = [(ranks[a], ranks[b], a, b) for a, b in halves if a in ranks and b in ranks]
        found.extend((rank, *pair) for pair in known)
    found.sort(key=lambda pair: pair[:3])
    return [(left, right) for _, _, _, left, right in found]


def byte_letters() -> dict[int, str]:
    """A printable letter for each byte, as byte-level vocabularies spell them: its own character
    where that is visible, else one from 256 on.
    """
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible}
    return letters | {byte: chr(256 + number) for number, byte in enumerate(hidden)}


def find_tekken_pieces(folders: Iterable[str]) -> str | None:
    """Path of the first vocabulary of Mistral in some folders; None if there is none."""
    for folder in folders:
        for name in FILE_NAMES:
            path = Path(folder) / name
            if path.is_file() and (name == FILE_NAMES[0] or MARK.encode() in path.read_bytes()):
                return str(path)
    return None
