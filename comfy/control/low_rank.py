"""Weights of a Control-LoRA's network: those of a diffusion model, and low-rank differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from comfy.patching.attributes import get_key_weight
from comfy.weights.adapters import LoRAAdapter


def low_rank_patches(
    model: Any, differences: Mapping[str, Tensor], network: nn.Module, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """Weights of a control network and how they change: its own where the differences have them,
    else those of the diffusion model with its patches and ``up @ down``.
    """
    base = _base_weights(model)
    weights: dict[str, Tensor] = {}
    patches: dict[str, list[Any]] = {}
    for key in network.state_dict():
        stem = key.removesuffix(".weight")
        up, down = differences.get(f"{stem}.up"), differences.get(f"{stem}.down")
        if key in differences:
            weights[key] = differences[key].to(dtype)
        elif key in base:
            (weight, convert), *changes = base[key]
            weights[key] = convert(weight.detach()).to(dtype)
            patches[key] = list(changes)
        else:
            raise ValueError(f"the Control-LoRA lacks {key}, and so does the diffusion model")
        if key.endswith(".weight") and up is not None and down is not None:
            product = LoRAAdapter(set(), (up, down, None, None, None, None))
            patches.setdefault(key, []).append((1.0, product, 1.0, None, None))
    return weights, {key: changes for key, changes in patches.items() if changes}


def _as_it_is(weight: Tensor) -> Tensor:
    return weight


def _base_weights(model: Any) -> dict[str, list[Any]]:
    """The diffusion network's weights with the patches of the view that runs, by their keys."""
    view = getattr(model, "current_patcher", None)
    if view is None:  # outside a run they count as they are shown
        network = model.diffusion_model
        shown = {key: get_key_weight(network, key) for key in network.state_dict()}
        return {
            key: [(weight, convert or _as_it_is)] for key, (weight, _, convert) in shown.items()
        }
    prefix = "diffusion_model."
    found = view.get_key_patches(prefix)
    return {key.removeprefix(prefix): value for key, value in found.items()}
