"""A simulated accelerator as the primary device of a test, and a small network to load on it."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from comfy import ops
from comfy.devices import residency
from comfy.devices.policies import MemoryPolicy, PrecisionPolicy, VRAMState
from comfy.devices.runtime import build_runtime, install_runtime

CPU = torch.device("cpu")


@contextmanager
def simulated_accelerator(**policy: Any) -> Iterator[Any]:
    """Install a runtime on the simulated device; skips visibly where it cannot be built.

    Args:
        **policy: Fields of MemoryPolicy; the reserve is 0 unless given.
    """
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("the simulated accelerator needs a C++ compiler (g++ or clang++)")
    from tests.support import fakegpu

    residency.current_loaded_models.clear()
    gc.collect()
    fakegpu.reset()
    fakegpu.set_rounding(1)
    settings = {"device": f"{fakegpu.NAME}:0", "reserve_vram_bytes": 0,
                "vram_state": VRAMState.NORMAL_VRAM, **policy}  # fmt: skip
    # What is tuned to the CPU rounds otherwise than the same layer on the simulated device.
    install_runtime(build_runtime(MemoryPolicy(**settings), PrecisionPolicy(tune_cpu=False)))
    try:
        yield fakegpu
    finally:
        residency.unload_all_models()
        install_runtime(build_runtime(MemoryPolicy(cpu=True)))
        fakegpu.reset()


class Network(nn.Module):
    """Convolutions, norms, an attention-like product and an embedding: every kind of layer."""

    def __init__(
        self, width: int = 32, depth: int = 4, operations: Any = ops.disable_weight_init,
        dtype: torch.dtype = torch.float32, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = operations.Embedding(16, width, dtype=dtype)
        self.conv = operations.Conv2d(4, width, 3, padding=1, dtype=dtype)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": operations.LayerNorm(width, dtype=dtype),
                    "up": operations.Linear(width, 2 * width, dtype=dtype),
                    "down": operations.Linear(2 * width, width, dtype=dtype),
                }
            )
            for _ in range(depth)
        )
        self.group = operations.GroupNorm(4, width, dtype=dtype)
        self.out = operations.Conv2d(width, 4, 1, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype))
        self.register_buffer("table", torch.arange(8, dtype=torch.float32))
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.data = (values / max(parameter[0].numel(), 1) ** 0.5).to(dtype)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[B, 4, H, W] and token ids [B] to [B, 4, H, W]."""
        h = self.conv(x) + self.embed(tokens).to(x.dtype)[:, :, None, None]
        tokens_first = h.flatten(2).transpose(1, 2)
        for block in self.blocks:
            inner = block["up"](block["norm"](tokens_first))
            tokens_first = tokens_first + block["down"](torch.nn.functional.silu(inner))
        h = tokens_first.transpose(1, 2).reshape(h.shape)
        return self.out(self.group(h)) * self.scale * self.table[1]

    def memory_required(self, input_shape: Any) -> float:
        """Nothing worth counting at this size."""
        return 0.0


def bytes_of(model: nn.Module) -> int:
    """Bytes of a model's state dict."""
    return sum(t.nbytes for t in model.state_dict().values())


def snapshot(model: nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    """Identity and contents of every parameter and buffer."""
    state = model.state_dict(keep_vars=True)
    return {key: (id(t), t.detach().cpu().clone()) for key, t in state.items()}


def assert_untouched(model: nn.Module, before: dict[str, tuple[int, torch.Tensor]]) -> None:
    """Every parameter is the same object with the same bytes as in `before`."""
    state = model.state_dict(keep_vars=True)
    assert state.keys() == before.keys()
    for key, (identity, contents) in before.items():
        assert id(state[key]) == identity, f"{key} is another object"
        assert torch.equal(state[key].detach().view(torch.uint8), contents.view(torch.uint8)), key
