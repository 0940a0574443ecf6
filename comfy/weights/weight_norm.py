"""Weights that files hold as a length and a direction of each row (weight normalisation).

``weight = length * direction / |direction|``, where the norm goes over all axes but the first. Two
spellings are in use: ``weight_g`` and ``weight_v``, and those of torch's parametrisations.
Source: Salimans and Kingma 2016, https://arxiv.org/abs/1602.07868.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SPELLINGS = (
    (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
    (".weight_g", ".weight_v"),
)


def joined(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with those in two parts as one, under the key ``weight``."""
    plain = dict(state_dict)
    for length_end, direction_end in SPELLINGS:
        for key in state_dict:
            name = key.removesuffix(length_end)
            if name == key or name + direction_end not in plain:
                continue
            length, direction = plain.pop(key), plain.pop(name + direction_end)
            norm = _norm(direction.float())
            whole = direction.float() * (length.float() / norm)
            plain[f"{name}.weight"] = whole.to(direction.dtype)
    return plain


def parted(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of convolutions over a line in two parts, in torch's spelling."""
    length_end, direction_end = SPELLINGS[0]
    saved: dict[str, Tensor] = {}
    for key, value in state_dict.items():
        name = key.removesuffix(".weight")
        if name == key or value.ndim != 3:
            saved[key] = value
            continue
        saved[name + length_end] = _norm(value.float()).to(value.dtype)
        saved[name + direction_end] = value
    return saved


def _norm(direction: Tensor) -> Tensor:
    axes = tuple(range(1, direction.ndim))
    return torch.linalg.vector_norm(direction, dim=axes, keepdim=True)
