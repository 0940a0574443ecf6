"""Types for authors of classic nodes and of functions that wrap a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from comfy.comfy_types.node_typing import (
    IO,
    CheckLazyMixin,
    ComfyNodeABC,
    FileLocator,
    InputTypeDict,
)

if TYPE_CHECKING:
    from torch import Tensor


class UnetApplyFunction(Protocol):
    """A model's `apply_model`: noisy latent `x` `[B, C, H, W]` at `t` `[B]` to an estimate."""

    def __call__(self, x: Tensor, t: Tensor, **kwargs: Any) -> Tensor: ...


class UnetApplyConds(TypedDict, total=False):
    """What a model is given beside latent and noise level."""

    c_concat: Tensor | None
    c_crossattn: Tensor | None
    control: dict[str, Any] | None
    transformer_options: dict[str, Any] | None


class UnetParams(TypedDict):
    """What a wrapper of a model is given; `cond_or_uncond` has 0 or 1 for each part of a batch."""

    input: Tensor
    timestep: Tensor
    c: UnetApplyConds
    cond_or_uncond: list[int]


UnetWrapperFunction = Callable[[UnetApplyFunction, UnetParams], "Tensor"]
"""A function that applies a model in its own way."""

__all__ = [
    "IO",
    "CheckLazyMixin",
    "ComfyNodeABC",
    "FileLocator",
    "InputTypeDict",
    "UnetApplyConds",
    "UnetApplyFunction",
    "UnetParams",
    "UnetWrapperFunction",
]
