"""The picture tower of Qwen 2.5 VL, which lies in a file of its own beside a GGUF encoder.

Such files are told by `mmproj` in their names; one that is named after the encoder goes first.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from comfy.weights.state_dict import load_torch_file

logger = logging.getLogger(__name__)

MARK = "mmproj"
SUFFIX = ".gguf"
TABLE, BIAS = "model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.bias"  # of Qwen 2.5
LAST = "visual.merger.mlp.2.weight"
# What names end in that tells the quantisation, such as -Q4_K_M or .f16
QUANTISATION = re.compile(r"[-_.](ud-)?(i?q\d\w*|bf16|f16|f32)$", re.IGNORECASE)


def with_tower(weights: dict[str, Tensor], path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a text encoder, and those of its tower where that lies beside it.

    Args:
        weights: By published names.
        path: The encoder's file.
    """
    is_gguf = os.fspath(path).lower().endswith(SUFFIX)
    if not is_gguf or BIAS not in weights or LAST in weights:
        return weights
    width = weights[TABLE].shape[1]
    for name in _names_beside(path):
        tower: Mapping[str, Any] = load_torch_file(name)
        if LAST in tower and tower[LAST].shape[0] == width:
            logger.info("the picture tower is that of %s", name)
            return {**weights, **tower}
    logger.info("%s: no picture tower (%s) of width %d beside it", path, MARK, width)
    return weights


def _names_beside(path: str | os.PathLike[str]) -> list[str]:
    """Files of towers in an encoder's folder, those named after it first."""
    folder, own = os.path.split(os.path.abspath(path))
    stem = QUANTISATION.sub("", os.path.splitext(own)[0]).lower()
    names = [n for n in sorted(os.listdir(folder)) if n.lower().endswith(SUFFIX) and n != own]
    towers = [name for name in names if MARK in name.lower()]
    towers.sort(key=lambda name: stem not in name.lower())
    return [os.path.join(folder, name) for name in towers]
