"""Lyrics as tokens, a line after the other, each with its language.

A line may begin with its language, as in ``[de]``; it is English otherwise. Japanese syllables are
written in Latin letters. The vocabulary is a file of byte pairs, ``vocab.json`` of ACE-Step.
Source: Gong et al. 2025, https://arxiv.org/abs/2506.00045, section 3.1;
https://github.com/ace-step/ACE-Step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from comfy.text_encoders.kana import in_latin_letters
from comfy.text_encoders.number_words import numbers_in_words
from comfy.text_encoders.t5_pieces import package_folders

START, LINE_END = 261, 2
ENGLISH, JAPANESE, TURKISH = "en", "ja", "tr"
LANGUAGES = frozenset(
    {"ar", "cs", "de", "en", "es", "fr", "hi", "hu", "it", "ja", "ko", "nl", "pl", "pt", "ru",
     "tr", "zh"}
)  # fmt: skip
NAMES = {"zh": "zh-cn"}  # of languages in the vocabulary, where it has another
LANGUAGE = re.compile(r"\[(..)\]")
SECTION = re.compile(r"\[.*?\]")  # such as [verse], in English whatever is sung
BLANK = "[SPACE]"
ABBREVIATIONS = {
    "mrs": "misess", "mr": "mister", "dr": "doctor", "st": "saint", "co": "company",
    "jr": "junior", "maj": "major", "gen": "general", "drs": "doctors", "rev": "reverend",
    "lt": "lieutenant", "hon": "honorable", "sgt": "sergeant", "capt": "captain",
    "esq": "esquire", "ltd": "limited", "col": "colonel", "ft": "fort",
}  # fmt: skip
ABBREVIATION = re.compile(rf"\b({'|'.join(ABBREVIATIONS)})\.")
SIGNS = {
    "&": "and", "@": "at", "%": "percent", "#": "hash", "$": "dollar", "£": "pound", "°": "degree",
}  # fmt: skip

FILE_NAME = "ace_lyrics_vocab.json"
PACKAGE, PACKAGE_FOLDER, PACKAGE_FILE = "acestep", "models/lyrics_utils", "vocab.json"
WANTED = (
    "put acestep/models/lyrics_utils/vocab.json of https://github.com/ace-step/ACE-Step into "
    "models/text_encoders, as ace_lyrics_vocab.json, or leave the lyrics empty for music without "
    "a voice"
)


def find_lyric_pieces(folders: Iterable[str]) -> str | None:
    """Path of the first vocabulary of lyrics in some folders, then in ACE-Step's own package; None
    if there is none."""
    places = [Path(folder) / FILE_NAME for folder in folders]
    packages = package_folders(PACKAGE_FOLDER, PACKAGE)
    places += [Path(folder) / PACKAGE_FILE for folder in packages]
    return next((str(place) for place in places if place.is_file()), None)


def plain(line: str, language: str) -> str:
    """A line as it was read in training: small letters, one blank between words, no quotes.

    English numbers, abbreviations and signs are written out.
    """
    line = line.replace('"', "")
    if language == TURKISH:
        line = line.replace("İ", "i")
    line = line.lower()
    if language == ENGLISH:
        line = numbers_in_words(line)
        line = ABBREVIATION.sub(lambda found: ABBREVIATIONS[found[1]], line)
        for sign, word in SIGNS.items():
            line = line.replace(sign, f" {word} ")
    return re.sub(r"\s+", " ", line).strip()


def line_and_language(line: str) -> tuple[str, str]:
    """A line without its mark of a language, and that language."""
    found = LANGUAGE.match(line)
    language = ENGLISH
    if found is not None and found[1].lower() in LANGUAGES:
        line, language = line[found.end() :], found[1].lower()
    latin = in_latin_letters(line)
    if latin != line:
        line, language = latin, JAPANESE
    return line, ENGLISH if SECTION.match(line) else language


class LyricPieces:
    """Called with lyrics, it gives a start and the ids and the end of every line.

    Empty lines need no vocabulary; it is looked for when there are words.

    Args:
        folders: Where it is looked for.
    """

    def __init__(self, folders: Iterable[str] = ()) -> None:
        self.folders = list(folders)
        self._pieces: Tokenizer | None = None

    @classmethod
    def from_pretrained(cls, source: None = None, folders: Iterable[str] = ()) -> LyricPieces:
        """As the class itself, in the way in which tokenizers are made."""
        del source  # the folders tell
        return cls(folders)

    def pieces(self) -> Tokenizer | None:
        """The vocabulary; None as long as there is none.

        Raises:
            ValueError: The file holds none.
        """
        path = None if self._pieces else find_lyric_pieces(self.folders)
        if path is not None:
            try:
                self._pieces = Tokenizer.from_file(path)
            except Exception as error:  # the library raises nothing narrower
                raise ValueError(
                    f"{path} holds no vocabulary of lyrics ({error}); {WANTED}"
                ) from error
        return self._pieces

    def __call__(self, text: str) -> dict[str, list[int]]:
        """``{"input_ids": [start, ..., end of line, ..., end of line]}``.

        Raises:
            FileNotFoundError: There are words, and no vocabulary.
        """
        ids = [START]
        for line in text.split("\n"):
            ids += [*self._of_line(line.strip()), LINE_END]
        return {"input_ids": ids}

    def _of_line(self, line: str) -> list[int]:
        if not line:
            return []
        pieces = self.pieces()
        if pieces is None:
            raise FileNotFoundError(
                f"lyrics: found {line[:40]!r}, but the vocabulary of lyrics is not there; {WANTED}"
            )
        line, language = line_and_language(line)
        marked = f"[{NAMES.get(language, language)}]{plain(line, language)}"
        return list(pieces.encode(marked.replace(" ", BLANK)).ids)

    def get_vocab(self) -> dict[str, int]:
        """Piece -> id."""
        pieces = self.pieces()
        return {} if pieces is None else dict(pieces.get_vocab())
