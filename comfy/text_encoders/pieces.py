"""Word pieces of a `tokenizer.json`; where there are none, the error says what to fetch."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


def read_pieces(source: str | bytes | None, model: str, wanted: str) -> Tokenizer:
    """The tokenizer of a file.

    Args:
        source: Path of a `tokenizer.json`, or its contents; None where none was found.
        model: Whose word pieces these are, for messages.
        wanted: What to put where, for messages.
    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no tokenizer.
    """
    if isinstance(source, bytes):
        return Tokenizer.from_str(source.decode("utf-8"))
    if source is None or not Path(source).is_file():
        raise FileNotFoundError(
            f"the word pieces of {model} were not found ({source or 'no file given'}); {wanted}"
        )
    try:
        return Tokenizer.from_file(str(source))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{source} holds no word pieces of {model} ({error}); {wanted}") from error
