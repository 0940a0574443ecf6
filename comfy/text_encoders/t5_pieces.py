"""The unigram tokenizer of T5, from a `tokenizer.json` file.

The vocabulary is not part of any package this server installs; a file of it can be given by path,
or under the entry ``t5_tokenizer`` of the tokenizer data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

END, PAD = 1, 0
DATA_ENTRY = "t5_tokenizer"


class T5Pieces:
    """Called with text, it gives ids and the end token."""

    def __init__(self, pieces: Tokenizer) -> None:
        self.pieces = pieces

    @classmethod
    def from_pretrained(cls, path: str | None = None) -> T5Pieces:
        """From the path of a `tokenizer.json`, or of a folder with one.

        Raises FileNotFoundError with what is needed when there is none.
        """
        file = Path(path or "")
        if path is not None and file.is_dir():
            file = file / "tokenizer.json"
        if path is None or not file.is_file():
            raise FileNotFoundError(
                f"the word pieces of T5 were not found ({path or 'no file given'}); get the "
                "tokenizer.json of a T5 v1.1 model and name it in the tokenizer data"
            )
        return cls(Tokenizer.from_file(str(file)))

    def __call__(self, text: str) -> dict[str, list[int]]:
        """``{"input_ids": [..., end]}``."""
        return {"input_ids": [*self.pieces.encode(text, add_special_tokens=False).ids, END]}

    def get_vocab(self) -> dict[str, int]:
        """Word piece -> id."""
        return self.pieces.get_vocab()


def pieces_path(tokenizer_data: Mapping[str, Any] | None) -> str | None:
    """The file that tokenizer data names, if any."""
    return (tokenizer_data or {}).get(DATA_ENTRY)
