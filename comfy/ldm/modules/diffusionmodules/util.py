"""Helpers of diffusion networks, under the names custom nodes import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from comfy.ldm.unet.video import AlphaBlender
from comfy.nn.timesteps import timestep_embedding

__all__ = ["AlphaBlender", "avg_pool_nd", "checkpoint", "timestep_embedding", "zero_module"]


def zero_module(module: nn.Module) -> nn.Module:
    """Set all parameters of a module to zero and return it."""
    for parameter in module.parameters():
        parameter.detach().zero_()
    return module


def avg_pool_nd(dims: int, *args: Any, **kwargs: Any) -> nn.Module:
    """An average pooling over ``dims`` axes (1, 2 or 3)."""
    kinds = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
    if dims not in kinds:
        raise ValueError(f"pooling over {dims} axes is not supported; 1, 2 and 3 are")
    return kinds[dims](*args, **kwargs)


def checkpoint(
    func: Callable[..., Any], inputs: Sequence[Any], params: Sequence[Any], flag: bool
) -> Any:
    """Call ``func(*inputs)``; recomputation in the backward pass, a training matter, is not
    done."""
    del params, flag
    return func(*inputs)
