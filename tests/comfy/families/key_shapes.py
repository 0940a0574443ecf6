"""Full state dicts of the recorded networks, as tensors without memory."""

from __future__ import annotations

import gzip
import itertools
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def recorded(golden_folder: Path) -> dict[str, Any]:
    """The recorded key patterns by kind and name."""
    with gzip.open(golden_folder / "model_state_dicts.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)


def network(golden_folder: Path, name: str, prefix: str = "") -> dict[str, Tensor]:
    """State dict of one recorded diffusion network on the meta device."""
    return expand(recorded(golden_folder)["nets"][name], prefix)


def expand(patterns: list[dict[str, Any]], prefix: str = "") -> dict[str, Tensor]:
    """Keys and shapes of patterns in which `#` stands for a number."""
    state_dict: dict[str, Tensor] = {}
    for pattern in patterns:
        for numbers in _numbers(pattern):
            key = pattern["key"]
            for number in numbers:
                key = key.replace("#", str(number), 1)
            state_dict[prefix + key] = torch.empty(pattern["shape"], device="meta")
    return state_dict


def _numbers(pattern: dict[str, Any]) -> list[tuple[int, ...]]:
    if "index_tuples" in pattern:
        return [tuple(numbers) for numbers in pattern["index_tuples"]]
    choices = []
    for item in pattern.get("indices_per_hash", []):
        if isinstance(item, str):
            first, last = item.split("-")
            choices.append(range(int(first), int(last) + 1))
        else:
            choices.append(item)
    return list(itertools.product(*choices))
