"""Weights made ready at the moment of use: moved to the input's device, patched, cast.

A layer's weight is stored in one place and type and used in another. `cast_bias_weight` is the
one door between the two; layers call it when `comfy_cast_weights` is set or functions are
attached, and use their parameters directly otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling as compiling

from comfy.devices import casting
from comfy.interrupt import throw_exception_if_processing_interrupted
from comfy.ops import streaming

WeightFunction = Callable[[torch.Tensor], torch.Tensor]
"""Takes a weight on the device of use, in its stored type, and returns the patched one."""


class CastWeightBiasOp:
    """What a layer needs in order to stay off the device: flags and functions, set per instance.

    Attributes:
        comfy_cast_weights: Cast weight and bias to the input's device and type on every call.
        weight_function: Functions applied to the weight on every call (streamed patches).
        bias_function: The same for the bias.
        stream_plan: The transfer plan of its model while the layer is streamed.
        patched_on_arrival: The plan applies patches, so weights at rest are not what is shown.
    """

    comfy_cast_weights: bool = False
    weight_function: list[WeightFunction] = []  # noqa: RUF012 - replaced per instance, never filled
    bias_function: list[WeightFunction] = []  # noqa: RUF012
    stream_plan: streaming.StreamPlan | None = None
    patched_on_arrival: bool = False

    def needs_cast(self) -> bool:
        """Whether the stored parameters cannot be used as they are."""
        return bool(self.comfy_cast_weights or self.weight_function or self.bias_function)


class CastLayer(CastWeightBiasOp):
    """Mixin put before a torch layer: chooses the direct or the casting forward."""

    def reset_parameters(self) -> None:
        """Leave weights as allocated: a file fills them."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The layer's forward; raises InterruptProcessingException after a cancellation."""
        if not compiling():  # compiled code would be made anew to notice the flag
            throw_exception_if_processing_interrupted()
        if self.comfy_cast_weights or self.weight_function or self.bias_function:
            return self.forward_comfy_cast_weights(*args, **kwargs)
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def forward_comfy_cast_weights(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The layer's forward over weights made ready for this call; layers define it."""
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def cast_to(
    weight: torch.Tensor | None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    stream: Any | None = None,
) -> torch.Tensor | None:
    """As `comfy.devices.casting.cast_to`; None stays None."""
    if weight is None:
        return None
    return casting.cast_to(weight, dtype, device, non_blocking, copy, stream)


def cast_to_input(
    weight: torch.Tensor | None,
    input: torch.Tensor,
    non_blocking: bool = False,
    copy: bool = True,
) -> torch.Tensor | None:
    """A weight in the type and on the device of `input`."""
    return cast_to(weight, input.dtype, input.device, non_blocking=non_blocking, copy=copy)


def cast_bias_weight(
    s: Any,
    input: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    bias_dtype: torch.dtype | None = None,
    offloadable: bool = False,
    decoded: bool = True,
) -> tuple[Any, ...]:
    """Weight and bias of a layer, ready to compute with.

    Functions see the weight on the device of use in its stored type, so that a streamed patch
    rounds exactly like a resident one; the cast to the computing type comes last.

    Args:
        s: Layer with `weight`, and `bias` or None.
        input: Tensor whose device and type to match unless they are given.
        bias_dtype: Type of the bias when it differs.
        offloadable: Also return a token to hand to `uncast_bias_weight` after use.
        decoded: Decode weights that are stored in a code (see `comfy.ops.encoded`).
    Returns:
        (weight, bias) or, when offloadable, (weight, bias, token).
    """
    if input is not None:
        dtype = dtype or input.dtype
        device = device or input.device
    bias_dtype = bias_dtype or dtype
    weight, bias, token = streaming.fetch(s, device)
    decode = getattr(s, "decode_weight", None) if decoded else None
    for function in s.weight_function:
        if decode is not None and not getattr(function, "takes_stored", False):
            weight, decode = decode(weight, dtype), None
        weight = function(weight)
    if decode is not None and weight is not None:
        weight = decode(weight, dtype)
    if bias is not None:
        for function in s.bias_function:
            bias = function(bias)
        if bias_dtype is not None:
            bias = bias.to(dtype=bias_dtype)
    if dtype is not None and weight is not None:
        weight = casting.cast_to(weight, dtype)
    return (weight, bias, token) if offloadable else (weight, bias)


def uncast_bias_weight(
    s: Any,  # noqa: ARG001 - public signature
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    offload_stream: Any,
) -> None:
    """Say that what `cast_bias_weight(..., offloadable=True)` gave is no longer used.

    Args:
        s: The layer.
        weight: The weight returned for it.
        bias: The bias returned for it.
        offload_stream: The token returned for it.
    """
    streaming.release(offload_stream, weight, bias)


def is_castable(module: nn.Module) -> bool:
    """Whether a module can compute with weights that rest on another device."""
    return hasattr(module, "comfy_cast_weights")
