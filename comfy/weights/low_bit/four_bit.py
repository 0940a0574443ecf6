"""Weights in four-bit floats, in eight-bit ones with block scales and in whole numbers, as
`comfy_quant` files and those of bitsandbytes hold them.

NVFP4: two E2M1 a byte (the first in its upper half), for each 16 a scale in E4M3, one factor for
all. MXFP8: E4M3, for each 32 a scale that is a power of two. The scales of both lie in the order
in which hardware reads them: tiles of 128 rows and 4 columns.
Sources: https://arxiv.org/abs/2310.10537,
https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy.ops.encoded import Parts
from comfy.weights.low_bit.bits import looked_up, paired_nibbles, power_of_two
from comfy.weights.low_bit.blocks import BlockCode

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_E2M1, *(-value for value in _E2M1))
_SMALL = tuple(n / 512 for n in range(8))
_E4M3 = (*_SMALL, *((8 + n % 8) * 2.0 ** (n // 8 - 10) for n in range(8, 127)), math.nan)
E4M3_VALUES = (*_E4M3, *(-value for value in _E4M3))
NVFP4_BLOCK, MXFP8_BLOCK = 16, 32
TILE_ROWS, TILE_COLUMNS = 128, 4


class BrokenCodeError(ValueError):
    """A layer's tensors are not what its code needs."""


def nvfp4(weight: Tensor, parts: Parts) -> BlockCode:
    """The code of a weight ``[N, K / 2]`` in bytes.

    Raises:
        BrokenCodeError: A scale is missing, or sizes do not agree.
    """
    _require(parts, "nvfp4", "weight_scale", "weight_scale_2")
    shape = _matrix(weight, "nvfp4", 2)
    _check_tiles(parts["weight_scale"], shape, NVFP4_BLOCK, "nvfp4")
    require_count(parts, "nvfp4", "weight_scale_2", 1)
    unpack = functools.partial(_pairs_of, values=E2M1_VALUES)
    return BlockCode("nvfp4", shape, NVFP4_BLOCK, NVFP4_BLOCK // 2, unpack, _nvfp4_scales)


def _nvfp4_scales(parts: Parts, shape: torch.Size) -> Tensor:
    tiles = parts["weight_scale"].view(torch.float8_e4m3fn)
    whole = parts["weight_scale_2"].float().reshape(())
    return untiled(tiles, shape[0], shape[1] // NVFP4_BLOCK).float() * whole


def mxfp8(weight: Tensor, parts: Parts) -> BlockCode:
    """The code of a weight ``[N, K]`` in E4M3.

    Raises:
        BrokenCodeError: The scale is missing, or sizes do not agree.
    """
    _require(parts, "mxfp8", "weight_scale")
    shape = _matrix(weight, "mxfp8", 1)
    _check_tiles(parts["weight_scale"], shape, MXFP8_BLOCK, "mxfp8")
    return BlockCode("mxfp8", shape, MXFP8_BLOCK, MXFP8_BLOCK, _e4m3, _mxfp8_scales)


def _e4m3(blocks: Tensor) -> Tensor:
    return looked_up(blocks, E4M3_VALUES)  # a processor has no instruction for them


def _mxfp8_scales(parts: Parts, shape: torch.Size) -> Tensor:
    tiles = parts["weight_scale"].view(torch.uint8)
    return power_of_two(untiled(tiles, shape[0], shape[1] // MXFP8_BLOCK).contiguous(), 127)


def _pairs_of(blocks: Tensor, values: tuple[float, ...]) -> Tensor:
    return looked_up(paired_nibbles(blocks), values)


def int8(weight: Tensor, parts: Parts, is_rotated: bool) -> BlockCode:
    """The code of a weight ``[N, K]`` in whole numbers, times one factor or one for each row.

    Raises:
        BrokenCodeError: A scale is missing, sizes do not agree, or the weight was turned before.
    """
    _require(parts, "int8_tensorwise", "weight_scale")
    shape = _matrix(weight, "int8_tensorwise", 1)
    if is_rotated:
        raise BrokenCodeError(
            "is stored as 'int8_tensorwise' with 'convrot', which is not supported; take a version "
            "of the model without it"
        )
    require_count(parts, "int8_tensorwise", "weight_scale", 1, shape[0])
    return BlockCode("int8_tensorwise", shape, shape[1], shape[1], _int8, _int8_scales)


def _int8(blocks: Tensor) -> Tensor:
    return blocks.view(torch.int8).float()


def _int8_scales(parts: Parts, shape: torch.Size) -> Tensor:
    return parts["weight_scale"].float().reshape(-1).expand(shape[0])


def untiled(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Scales ``[rows, columns]`` out of hardware's order.

    A tile holds rows r, r + 32, r + 64 and r + 96 side by side in its line r.
    """
    down, across = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
    tiles = scales.reshape(down, across, 32, 4, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(down * TILE_ROWS, -1)[:rows, :columns]


def _require(parts: Parts, name: str, *needed: str) -> None:
    missing = [part for part in needed if part not in parts]
    if missing:
        raise BrokenCodeError(f"is stored as {name!r} without its scale ({', '.join(missing)})")


def require_count(parts: Parts, name: str, part: str, *counts: int) -> None:
    """BrokenCodeError where a tensor beside a weight has none of some numbers of elements."""
    found = parts[part].numel()
    if found not in counts:
        raise BrokenCodeError(
            f"is stored as {name!r} with {found} numbers in {part}; expected "
            f"{' or '.join(map(str, counts))}"
        )


def _matrix(weight: Tensor, name: str, per_byte: int) -> torch.Size:
    if weight.ndim != 2 or weight.element_size() != 1:
        raise BrokenCodeError(
            f"is stored as {name!r}, which is a matrix of bytes; found {tuple(weight.shape)} in "
            f"{str(weight.dtype).removeprefix('torch.')}"
        )
    return torch.Size((weight.shape[0], weight.shape[1] * per_byte))


def _check_tiles(scales: Tensor, shape: torch.Size, block: int, name: str) -> None:
    columns = shape[1] / block
    wanted = -(-shape[0] // TILE_ROWS) * TILE_ROWS * math.ceil(columns / TILE_COLUMNS)
    wanted *= TILE_COLUMNS
    if columns != int(columns) or scales.numel() != wanted or scales.element_size() != 1:
        raise BrokenCodeError(
            f"is stored as {name!r} with {scales.numel()} scales of {scales.element_size()} bytes; "
            f"a weight of {tuple(shape)} needs {wanted} of 1 byte and columns in blocks of {block}"
        )


# -- bitsandbytes ----------------------------------------------------------------------------------

BNB_STATE = "weight.quant_state.bitsandbytes__"
"""Beginning of the key, below a layer, that describes it to bitsandbytes; the kind follows."""

BNB_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
"""Tensors beside such a weight, below its key."""


def bitsandbytes(
    kind: str, weight: Tensor, parts: Mapping[str, Tensor], state: Tensor
) -> BlockCode:
    """The code of a layer of bitsandbytes: two numbers of a table a byte, a scale for each block.

    Args:
        kind: "nf4" or "fp4".
        weight: Bytes, flat.
        parts: Tensors by the names of `BNB_PARTS`; with "nested_..." the scales are bytes of a
            second table, with scales of their own.
        state: What is said of the layer, as JSON.
    Raises:
        BrokenCodeError: A tensor is missing, or the description is broken.
    """
    _require(parts, kind, "absmax", "quant_map")
    try:
        told: dict[str, Any] = json.loads(state.cpu().numpy().tobytes())
        shape, block = torch.Size(told["shape"]), int(told["blocksize"])
        offset, nested = float(told.get("nested_offset", 0.0)), told.get("nested_blocksize")
        nested = None if nested is None else max(int(nested), 1)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BrokenCodeError(
            f"is stored as {kind!r} with a broken description ({error})"
        ) from error
    count = math.prod(shape)
    if (
        min(shape, default=0) < 0
        or block < 2
        or block % 2
        or count % block
        or weight.numel() * weight.element_size() * 2 != count
    ):
        raise BrokenCodeError(
            f"is stored as {kind!r} in {weight.numel()} bytes; {tuple(shape)} in blocks of {block} "
            f"needs {count // 2}"
        )
    require_count(parts, kind, "absmax", count // block)
    require_count(parts, kind, "quant_map", 16)
    if nested is not None:
        _require(parts, kind, "nested_absmax", "nested_quant_map")
        require_count(parts, kind, "nested_absmax", -(-count // block // nested))
        require_count(parts, kind, "nested_quant_map", 256)
    values = tuple(parts["quant_map"].float().flatten().tolist())
    scales = functools.partial(_bnb_scales, nested=nested, offset=offset)
    unpack = functools.partial(_pairs_of, values=values)
    return BlockCode(kind, shape, block, block // 2, unpack, scales)


def _bnb_scales(
    parts: Parts,
    shape: torch.Size,  # noqa: ARG001 - as all scales take it
    nested: int | None,
    offset: float,
) -> Tensor:
    scales = parts["absmax"]
    if nested is None:
        return scales.float()
    numbers = parts["nested_quant_map"].float()[scales.flatten().int()]
    factors = parts["nested_absmax"].float().repeat_interleave(nested)[: len(numbers)]
    return numbers * factors + offset
