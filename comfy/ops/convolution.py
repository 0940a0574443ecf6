"""Convolutions on a CPU in the form that is fastest and does not depend on the batch.

As one matrix product: the convolution library rearranges the weights at every call; where few
positions meet many weights (the coarse levels of a UNet) that costs more than the arithmetic. With
channels innermost the weights already are a matrix ``[O, kH kW C]``, and gathering the
neighbourhoods of the positions costs next to nothing. Measured for float32 on two AVX-512 cores,
3x3 kernels, batch 2: 8x8 positions of 1280 channels 43 -> 20 ms, of 2560 71 -> 33 ms; 16x16 of 1280
73 -> 54 ms; at 32x32 the library wins. Of 192 channels 4x4 positions take 0.29 -> 0.22 ms, at 8x8
the library wins: what fits a cache is rearranged quickly. Kernels of one position are linear layers
and as fast or up to three times faster as such.

The same bits for an item alone and in a batch: the choice looks at one item, products round alike
(see ``comfy.devices.reproducible``), and torch, which hands small single items to another kernel
than batches, is led past that.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling as compiling
from torch.nn import functional as F

from comfy.devices import precision

BOUNDS = ((16, 200_000), (256, 9 * 512 * 512))
"""Positions of one item's result, and the elements of the kernel from which so few pay."""
SMALL = 20480
"""Elements up to which torch keeps a single item from the library."""


def convolve(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """A Conv2d's result in a form of this module; None where torch's own serves as well."""
    if not _is_tuned(x, weight):
        return None
    if is_pointwise(layer, x):
        return pointwise(x, weight, bias)
    if is_faster_as_product(layer, x, weight):
        return as_product(layer, x, weight, bias)
    if is_left_to_slow_kernel(layer, x):
        innermost = torch.channels_last
        return torch.mkldnn_convolution(
            x.contiguous(memory_format=innermost), weight.contiguous(memory_format=innermost), bias,
            layer.padding, layer.stride, layer.dilation, layer.groups,
        )  # fmt: skip
    return None


def convolve_line_or_video(
    layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor | None:
    """A Conv1d's or Conv3d's result by the library that torch gives batches to, whatever the
    number of items; None where torch's own serves as well.

    torch itself looks at their number: it keeps single small items of every kernel, and fewer than
    16 of kernels without columns and rows (on one thread), from the library.
    """
    if not (_is_tuned(x, weight, layer.dilation) and _is_for_library(layer, x)):
        return None
    if x.ndim == 3:  # a picture of one row
        row = (0, *layer.padding), (1, *layer.stride), (1, *layer.dilation)
        x, weight = x.unsqueeze(2).contiguous(), weight.unsqueeze(2).contiguous()
        return torch.mkldnn_convolution(x, weight, bias, *row, layer.groups).squeeze(2)
    innermost = any(_is_innermost(tensor) for tensor in (x, weight))
    layout = torch.channels_last_3d if innermost else torch.contiguous_format
    return torch.mkldnn_convolution(
        x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout), bias,
        layer.padding, layer.stride, layer.dilation, layer.groups,
    )  # fmt: skip


def _is_innermost(x: Tensor) -> bool:
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d)


def _is_for_library(layer: Any, x: Tensor) -> bool:
    """Whether the library computes this convolution of x, which has cells, and gives a result."""
    return (
        x.numel() > 0
        and x.shape[1] == layer.in_channels
        and layer.padding_mode == "zeros"
        and isinstance(layer.padding, tuple)
        and all(
            side + 2 * pad >= dilation * (wide - 1) + 1
            for side, pad, dilation, wide in zip(
                x.shape[2:], layer.padding, layer.dilation, layer.kernel_size, strict=True
            )
        )
        and not compiling()
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )


def _is_tuned(x: Tensor, weight: Tensor, axes: Sized = (1, 1)) -> bool:
    return (
        x.ndim == len(axes) + 2
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and precision.tunes_cpu()
    )


def in_rows(x: Tensor) -> Tensor:
    """The input ``x [B, L, C]`` of a linear layer, laid out as it reads.

    A transposed view (a latent whose cells become tokens) torch multiplies item by item if there
    are several, and at once if there is one, which rounds otherwise.
    """
    usual = x.ndim < 3 or x.is_contiguous() or x.device.type != "cpu" or compiling()
    return x if usual or x.dtype != torch.float32 or not precision.tunes_cpu() else x.contiguous()


def is_pointwise(layer: Any, x: Tensor) -> bool:
    """Whether a Conv2d is a linear layer over the positions of x: where its channels are innermost,
    and where items are so small that torch would choose the kernel by their number."""
    return (
        layer.kernel_size == (1, 1) == layer.stride
        and layer.groups == 1
        and layer.padding == (0, 0)
        and x.shape[1] == layer.in_channels
        and (x.is_contiguous(memory_format=torch.channels_last) or x[:1].numel() <= SMALL)
    )


def pointwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear layer ``weight [O, C, 1, 1]`` over the positions of ``x [B, C, H, W]``."""
    batch, channels, height, width = x.shape
    tokens = x.permute(0, 2, 3, 1).reshape(batch, height * width, channels)
    out = F.linear(tokens, weight.flatten(1), bias)
    return out.view(batch, height, width, weight.shape[0]).permute(0, 3, 1, 2)


def is_left_to_slow_kernel(layer: Any, x: Tensor) -> bool:
    """Whether torch would compute x, a small single item, by another kernel than a batch."""
    return (
        x.shape[0] == 1
        and 0 < x.numel() <= SMALL
        and layer.kernel_size != (1, 1)
        and min(layer.kernel_size) <= 3
        and layer.groups == 1
        and x.shape[1] == layer.in_channels
        and layer.padding_mode == "zeros"
        and isinstance(layer.padding, tuple)
        and not compiling()
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )


def is_faster_as_product(layer: Any, x: Tensor, weight: Tensor) -> bool:
    """Whether `as_product` beats the library for a Conv2d `layer` on ``x [B, C, H, W]``."""
    return (
        weight.numel() >= BOUNDS[0][1]
        and _is_tuned(x, weight)
        and _is_ordinary(layer)
        and _are_few(_positions(layer, x), weight.numel())
        and weight.is_contiguous(memory_format=torch.channels_last)
    )


def _is_ordinary(layer: Any) -> bool:
    """Zero padding by numbers, one group, no dilation, a kernel wider than one position."""
    return (
        layer.kernel_size != (1, 1)
        and layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and isinstance(layer.padding, tuple)
    )


def _are_few(positions: int, elements: int) -> bool:
    # Compiled code is made anew for each side of a bound that it asks about: the small gain is
    # not worth that.
    bounds = BOUNDS[1:] if compiling() else BOUNDS
    return any(elements >= least and 0 < positions <= most for most, least in bounds)


def _positions(layer: Any, x: Tensor) -> int:
    height, width = _result_size(layer, x)
    return max(0, height) * max(0, width) if x.shape[0] else 0


def _result_size(layer: Any, x: Tensor) -> tuple[int, int]:
    height, width = (
        (x.shape[2 + axis] + 2 * layer.padding[axis] - layer.kernel_size[axis])
        // layer.stride[axis]
        + 1
        for axis in (0, 1)
    )
    return height, width


def as_product(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of ``x [B, C, H, W]``, laid out with channels innermost.

    Args:
        layer: Conv2d that says kernel size, stride and padding.
        weight: ``[O, C, kH, kW]`` with channels innermost in memory.
    Raises:
        RuntimeError: The channels of x and weight differ.
    """
    batch, channels = x.shape[:2]
    if channels != weight.shape[1]:
        raise RuntimeError(
            f"a convolution of {weight.shape[1]} channels was given {channels}: "
            f"weight {list(weight.shape)}, input {list(x.shape)}"
        )
    (rows, columns), (high, wide) = _result_size(layer, x), layer.kernel_size
    down, right = layer.padding
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, right, right, down, down)).contiguous()
    per_item, per_row, per_column, _ = padded.stride()
    neighbourhoods = padded.as_strided(  # of each position: kH runs of kW * C neighbours in memory
        (batch, rows, columns, high, wide * channels),
        (per_item, per_row * layer.stride[0], per_column * layer.stride[1], per_row, 1),
    ).reshape(batch * rows * columns, high * wide * channels)
    matrix = weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)
    out = F.linear(neighbourhoods, matrix, bias)
    return out.view(batch, rows, columns, weight.shape[0]).permute(0, 3, 1, 2)
