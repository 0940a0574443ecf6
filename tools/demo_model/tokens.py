"""CLIP byte-pair tokens, and the part of the vocabulary that captions use."""

from __future__ import annotations

import functools
import gzip
import importlib.util
import random
import re
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from tools.demo_model.captions import caption
from tools.demo_model.scenes import random_scene

START, END, LENGTH, VOCABULARY_SIZE = 49406, 49407, 77, 49408
_MERGES = 49152 - 256 - 2  # the vocabulary without the bytes and the two markers
_WORDS = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d|[^\W\d_]+|\d|(?:[^\s\w]|_)+", re.IGNORECASE)


def merges_file() -> Path:
    """The list of merges that comes with the package clip-anytorch (found, not imported)."""
    spec = importlib.util.find_spec("clip")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "bpe_simple_vocab_16e6.txt.gz"
        if path.exists():
            return path
    raise FileNotFoundError("CLIP merges not found; install them with: pip install clip-anytorch")


def _printable_bytes() -> list[str]:
    """A printable character for each byte, in the order of the vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [table[byte] for byte in printable + others]


class Tokenizer:
    """Text to token numbers, lower case, without padding."""

    def __init__(self, path: Path | None = None) -> None:
        lines = gzip.decompress((path or merges_file()).read_bytes()).decode().split("\n")
        merges = [tuple(line.split()) for line in lines[1 : _MERGES + 1]]
        characters = _printable_bytes()
        vocabulary = [*characters, *(c + "</w>" for c in characters)]
        vocabulary += ["".join(pair) for pair in merges]
        self._numbers = {word: number for number, word in enumerate(vocabulary)}
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        order = [*range(33, 127), *range(161, 173), *range(174, 256)]
        order += [byte for byte in range(256) if byte not in order]
        self._characters = dict(zip(order, characters))
        self._word = functools.lru_cache(maxsize=None)(self._merge)

    def _merge(self, word: str) -> list[int]:
        parts = [self._characters[byte] for byte in word.encode()]
        parts[-1] += "</w>"
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, _MERGES))
            if best not in self._ranks:
                break
            merged: list[str] = []
            for part in parts:
                if merged and (merged[-1], part) == best:
                    merged[-1] += part
                else:
                    merged.append(part)
            parts = merged
        return [self._numbers[part] for part in parts]

    def words(self, text: str) -> list[int]:
        """Token numbers of `text` without markers."""
        return [number for word in _WORDS.findall(text.lower()) for number in self._word(word)]

    def __call__(self, text: str) -> list[int]:
        """Token numbers with markers, padded with the end marker to 77."""
        numbers = [START, *self.words(text)[: LENGTH - 2], END]
        return numbers + [END] * (LENGTH - len(numbers))


def used_tokens(tokenizer: Tokenizer, captions: int = 60_000) -> list[int]:
    """The token numbers that occur in captions, ascending, markers included."""
    rng, used = random.Random(5), {START, END}
    for seed in range(captions):
        used.update(tokenizer.words(caption(random_scene(seed), rng)))
    return sorted(used)


def compact_numbers(used: list[int]) -> Tensor:
    """A table [49408] from token number to row of a compact embedding; unused tokens give 0."""
    table = torch.zeros(VOCABULARY_SIZE, dtype=torch.long)
    table[torch.tensor(used)] = torch.arange(1, len(used) + 1)
    return table
