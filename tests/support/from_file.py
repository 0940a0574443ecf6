"""Networks whose weights were converted from a file, as checkpoints for the CPU are loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from comfy import ops
from comfy.weights.assign import assign_weights
from comfy.weights.state_dict import load_torch_file
from tests.support.accelerator import Network


def network_from_file(
    folder: Path, stored: torch.dtype = torch.float16, used: torch.dtype = torch.float32,
    width: int = 32, depth: int = 2, seed: int = 0,
) -> Network:  # fmt: skip
    """A network loaded from a file of its own in another type."""
    path = folder / f"{width}-{depth}-{seed}-{str(stored)[6:]}.safetensors"
    made = Network(width, depth, ops.manual_cast, stored, seed)
    if not path.exists():
        save_file(made.state_dict(), path)
    model = made.to(used)
    assign_weights(model, load_torch_file(path), consume=True)
    return model
