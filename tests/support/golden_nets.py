"""Reads the tiny networks of the golden folder: weights, inputs, outputs and constructor arguments.

Weights are stored in one of four ways: int8 codes with an exponent (``w8/``), plainly (``w/``), as
the used rows of an embedding table (``w_rows/``), or not at all, with a recipe to make them again
(``recipe_shapes`` in the header).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


@dataclass
class GoldenNet:
    """One recorded network.

    Attributes:
        weights: State dict, float32 unless stored otherwise.
        inputs: Tensors given, by name.
        outputs: Tensors the reference answered, by name.
        constructor: Arguments of the reference's constructor.
        note: What the recorder wrote about the file.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    constructor: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def calls(self) -> dict[str, dict[str, Tensor]]:
        """Inputs named ``call/argument``, grouped by call."""
        grouped: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.inputs.items():
            call, _, argument = name.partition("/")
            if argument:
                grouped.setdefault(call, {})[argument] = tensor
        return grouped


def read_golden_net(path: Path) -> GoldenNet:
    """Read one file of ``golden/nets`` or ``golden/text_encoders``."""
    net = GoldenNet()
    with safe_open(str(path), "pt") as file:
        header = file.metadata() or {}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    exponents = json.loads(header.get("w8_exponents") or "{}")
    row_shapes = json.loads(header.get("row_shapes") or "{}")
    net.note = header.get("note", "")
    net.constructor = json.loads(header.get("constructor") or "{}")
    shapes = json.loads(header.get("recipe_shapes") or "{}")
    if shapes:
        net.weights.update(_recipe_weights(shapes, _recipe_seed(net.note)))
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "w8":
            net.weights[name] = tensor.float() * 2.0 ** -exponents[name]
        elif kind == "w":
            net.weights[name] = tensor
        elif kind == "w_rows" and name.endswith("/ids"):
            name = name.removesuffix("/ids")
            table = torch.zeros(row_shapes[name])
            table[tensor] = tensors[f"w_rows/{name}/rows"].float()
            net.weights[name] = table
        elif kind == "in":
            net.inputs[name] = tensor
        elif kind == "out":
            net.outputs[name] = tensor
    return net


def _recipe_seed(note: str) -> int:
    found = re.search(r"seed (\d+)", note)
    assert found, f"no seed in the note {note!r}"
    return int(found[1])


def _recipe_weights(shapes: dict[str, list[int]], seed: int) -> dict[str, Tensor]:
    """Weights of the documented recipe, rounded to int8 codes times a power of two."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name in sorted(shapes):
        value = torch.randn(shapes[name], generator=generator)
        if value.ndim >= 2:
            value = value / math.sqrt(math.prod(shapes[name][1:]))
        elif value.ndim == 1 and name.rpartition(".")[2] in ("weight", "scale", "gamma"):
            value = 1 + 0.1 * value
        else:
            value = 0.1 * value
        exponent = math.floor(math.log2(127 / value.abs().max().item()))
        weights[name] = (value * 2.0**exponent).round().clamp(-127, 127) * 2.0**-exponent
    return weights


def assert_close_to_golden(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    """Compare within ``tolerance`` times the standard deviation of the expected tensor."""
    assert actual.shape == expected.shape, (tuple(actual.shape), tuple(expected.shape))
    scale = expected.float().std().item()
    error = (actual.float() - expected.float()).abs().max().item()
    assert error <= tolerance * scale, f"largest error {error:.3g}, allowed {tolerance * scale:.3g}"
