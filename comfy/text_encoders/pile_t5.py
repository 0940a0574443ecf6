"""Pile-T5 XL as the text encoder of AuraFlow: a T5 with the word pieces of Llama 2.

Its vocabulary is a file: `tokenizer.json` of EleutherAI/pile-t5-xl.
Source: https://blog.eleuther.ai/pile-t5/.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from comfy.text_encoders.t5_alone import Arrangement
from comfy.text_encoders.t5_pieces import T5Pieces

NAME = "pile_t5xl"
WIDTH = 2048
END, PAD = 2, 1
CONFIG: dict[str, Any] = {
    "d_model": WIDTH, "d_kv": 64, "d_ff": 5120, "num_heads": 32, "num_layers": 24,
    "vocab_size": 32128, "model_type": "umt5",
}  # fmt: skip
FILE_NAMES = ("pile_t5_tokenizer.json", "pile_t5_spiece.model")
WANTED = (
    "put tokenizer.json of EleutherAI/pile-t5-xl beside the text encoder or in "
    "models/text_encoders, as pile_t5_tokenizer.json"
)


def find_pile_pieces(folders: Iterable[str]) -> str | None:
    """Path of the first vocabulary of Pile-T5 in some folders; None if there is none."""
    for folder in folders:
        for name in FILE_NAMES:
            path = Path(folder) / name
            if path.is_file():
                return str(path)
    return None


class PilePieces(T5Pieces):
    """Called with text, it gives ids and the end token."""

    marks_in_text = False
    end = END

    @classmethod
    def from_pretrained(cls, source: str | bytes | None = None) -> T5Pieces:
        """As T5's.

        Raises:
            FileNotFoundError: There is no vocabulary; the text says what is needed.
        """
        if source is None:
            raise FileNotFoundError(f"the word pieces of Pile-T5 were not found; {WANTED}")
        return super().from_pretrained(source)


AURAFLOW = Arrangement(256, name=NAME, config=CONFIG, zeroes=True, pieces=PilePieces, pad=PAD)
