"""Scales of adapters that stand beside the tensors: in the file's header, or in a file next to it.

Libraries that train with PEFT write two factors for each layer and keep `alpha` in the adapter's
settings. The product is scaled by alpha / rank, or with `use_rslora` by alpha / sqrt(rank)
(Kalajdzievski 2023, https://arxiv.org/abs/2312.03732). Here the scale becomes a tensor
`<layer>.alpha`, as other trainers write it, so that whoever reads the tensors reads it too.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

logger = logging.getLogger(__name__)

HEADER_ENTRY = "lora_adapter_metadata"
BESIDE = {
    "adapter_model.safetensors": "adapter_config.json",
    "adapter_model.bin": "adapter_config.json",
}
"""Names of weight files -> the file of settings that belongs beside them."""

LONGEST = 2**20  # bytes of a file of settings

FACTORS = re.compile(r"^(?P<layer>.+?)\.(?P<factor>lora_A|lora_down|lora\.down|lora_embedding_A|"
                     r"hada_w1_b|lokr_w1|lokr_w1_a)(?:\.default)?(?:\.weight)?$")  # fmt: skip
"""A factor that tells a layer's rank: its first axis is that of most kinds."""

INPUT_SCALES = re.compile(r"^(?P<layer>.+)\.ia3_l$")
INPUT_ROTATION = re.compile(r"^(?P<layer>.+)\.oft_R\.weight$")

WRAPPING = "base_model.model."  # around the names of layers that patterns speak of

LONGEST_PATTERN, MOST_REPEATS = 256, 3
"""Patterns within these bounds, and without groups, are surely matched in no time."""


def with_scales(
    tensors: dict[str, Any], metadata: Mapping[str, str] | None, path: str | os.PathLike[str]
) -> dict[str, Any]:
    """The tensors of a file, with `<layer>.alpha` for layers whose scale is written elsewhere.

    Args:
        tensors: By key; returned as they are when there are no settings.
        metadata: The file's header.
        path: The file.
    """
    settings = _settings(metadata, path)
    if not settings:
        return tensors
    added = dict(_scales(tensors, settings))
    return {**tensors, **added} if added else tensors


def _settings(
    metadata: Mapping[str, str] | None, path: str | os.PathLike[str]
) -> dict[str, dict[str, Any]]:
    """Settings of each part of a pipeline by its prefix; "" when they hold for the whole file."""
    text = (metadata or {}).get(HEADER_ENTRY)
    if text is None:
        folder, name = os.path.split(os.fspath(path))
        text = _text_of(os.path.join(folder, BESIDE[name])) if name in BESIDE else None
    if text is None:
        return {}
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict):
        logger.warning("%s: its adapter settings are no JSON object; scales are 1", path)
        return {}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in entries.items():
        prefix, _, setting = str(name).rpartition(".")
        parts.setdefault(prefix, {})[setting] = value
    return parts


def _text_of(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(LONGEST)
    except (OSError, UnicodeDecodeError):
        return None


def _scales(
    tensors: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors to add or to put in the place of others."""
    for key, tensor in tensors.items():
        yield from _beside_scales(key, tensor, settings)
        found = FACTORS.match(key)
        if found is None or not isinstance(tensor, torch.Tensor) or tensor.ndim < 1:
            continue
        layer = found["layer"]
        part = next((p for p in settings if p and layer.startswith(p + ".")), "")
        own = settings.get(part, {})
        if f"{layer}.alpha" in tensors or not own:
            continue
        name = layer.removeprefix(f"{part}.").removeprefix(WRAPPING)
        alpha = _value(name, own, "lora_alpha", "alpha")
        if found["factor"].startswith("lokr"):
            rank = _value(name, own, "r", pattern="rank_pattern")
            if alpha is not None and rank:
                # PEFT scales also what it did not factorise, for which an alpha would not count
                yield key, tensor.float() * (alpha / rank)
        elif alpha is not None and (rank := tensor.shape[0]):
            scale = alpha / math.sqrt(rank) if own.get("use_rslora") is True else alpha / rank
            yield f"{layer}.alpha", torch.tensor(scale * rank)


def _beside_scales(
    key: str, tensor: Any, settings: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """What settings say of (IA)^3 in convolutions, where [1, n] may mean inputs or outputs, and of
    the series that OFT takes for its rotations."""
    own = settings.get("", {})
    scales, rotation = INPUT_SCALES.match(key), INPUT_ROTATION.match(key)
    if scales and getattr(tensor, "ndim", 0) > 2 and "feedforward_modules" in own:
        if not _is_named(scales["layer"].removeprefix(WRAPPING), own["feedforward_modules"]):
            yield key, tensor.transpose(0, 1)
    elif rotation:
        terms = own.get("num_cayley_neumann_terms", None)
        if own.get("use_cayley_neumann") is False:
            terms = 0
        if isinstance(terms, int):
            yield f"{rotation['layer']}.oft_terms", torch.tensor(terms)


def _is_named(layer: str, names: Any) -> bool:
    """Whether a layer is one of a list of name endings, or matches a pattern as a whole."""
    if isinstance(names, str):
        return _ends_with(layer, names)
    return isinstance(names, list) and any(layer.endswith(str(name)) for name in names)


def _value(
    layer: str, settings: Mapping[str, Any], *names: str, pattern: str = "alpha_pattern"
) -> float | None:
    """One layer's value: that of the first pattern its name ends with, else the common one."""
    found = next((settings[name] for name in names if name in settings), None)
    patterns = settings.get(pattern)
    if isinstance(patterns, dict):
        found = next((v for words, v in patterns.items() if _ends_with(layer, words)), found)
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    return float(found) if is_number and math.isfinite(found) else None  # type: ignore[arg-type]


def _ends_with(layer: str, pattern: str) -> bool:
    """Whether a layer is named by a pattern, as a whole or after a dot."""
    if layer == pattern or layer.endswith("." + pattern):
        return True
    repeats = sum(pattern.count(sign) for sign in "*+?")
    if len(pattern) > LONGEST_PATTERN or repeats > MOST_REPEATS or any(c in pattern for c in "({|"):
        return False
    try:
        return re.match(rf"(?:.*\.)?(?:{pattern})$", layer) is not None
    except re.error:
        return False
