"""Rounding a computed weight to the type it is stored in.

Eight-bit floats are rounded stochastically, so that a small delta survives on average; the random
bits come from the weight's key, so that the same patches give the same bytes every time.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator

import torch

SLICE_ELEMENTS = 4096 * 4096
"""Larger tensors are rounded in slices along axis 0, to bound the working memory."""

BLOCK_ELEMENTS = 2**15
"""Elements of a slice on the CPU: what is made of them stays in the cache, and torch does not split
so few among threads, which the noise would keep waiting."""

NOISE_BITS = 14
"""Noise is float16 in [0, 1): its bits, as a whole number, grow with it and are below 2**14."""

_CRC32_POLYNOMIAL = 0xEDB88320


def string_to_seed(data: str) -> int:
    """CRC-32 over the character codes of a text (not its bytes), as an unsigned number."""
    try:
        return zlib.crc32(data.encode("latin-1"))  # codes below 256 are bytes
    except UnicodeEncodeError:
        return _crc32_of_codes(data)


def _crc32_of_codes(data: str) -> int:
    crc = 0xFFFFFFFF
    for character in data:
        crc ^= ord(character)
        for _ in range(8):
            crc = (crc >> 1) ^ (_CRC32_POLYNOMIAL if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def stochastic_rounding(value: torch.Tensor, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor in another type; float8 targets are rounded at random, reproducibly.

    Args:
        value: Source; never modified.
        dtype: Target type.
        seed: Seed of the generator, which lives on the tensor's device.
    """
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return value.to(dtype=dtype)
    generator = torch.Generator(device=value.device)
    generator.manual_seed(seed)
    out = torch.empty_like(value, dtype=dtype)
    rows, rounded = torch.atleast_1d(value.detach()), torch.atleast_1d(out)
    if value.device.type == "cpu":
        _round_by_table(rows, rounded, generator)
        return out
    for part in _slices(rows, SLICE_ELEMENTS):
        x = rows[part].half()
        rounded[part] = _round_to_float8(x, _noise(x.shape, generator), dtype)
    return out


def _slices(value: torch.Tensor, elements: int) -> Iterator[slice]:
    """Slices along axis 0 of about so many elements, or of one row."""
    step = max(1, round(len(value) / max(1.0, value.numel() / elements)))
    for start in range(0, len(value), step):
        yield slice(start, start + step)


def _noise(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float16, device=generator.device, generator=generator)


def _round_by_table(value: torch.Tensor, out: torch.Tensor, generator: torch.Generator) -> None:
    """Round a tensor on the CPU into another: the bits `_round_to_float8` gives, in a fifth of the
    time, most of which the noise takes."""
    bounds, neighbours = _tables(out.dtype)
    codes = out.view(torch.uint8)
    for part in _slices(value, BLOCK_ELEMENTS):
        x = value[part].half().contiguous()
        bits = x.flatten().view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
        chosen = bounds.index_select(0, bits)
        chosen += _noise(x.shape, generator).flatten().view(torch.int16)
        chosen.bitwise_right_shift_(NOISE_BITS)
        codes[part] = neighbours.index_select(0, chosen).view(x.shape)


@functools.cache
def _tables(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What rounds float16 to float8 by looking up instead of by `_round_to_float8`.

    A value becomes its lower neighbour where the noise is below a bound, else the upper one.

    Returns:
        int32 [2**16]: for the bits of a float16, what reaches 2**NOISE_BITS * (place of the
            upper neighbour) where the bits of noise that are added reach the bound.
        uint8 [2 * pairs]: bits of all pairs of (lower, upper) neighbours.
    """
    whole = torch.arange(2**16, dtype=torch.int32, device="cpu")
    values = whole.to(torch.int16).view(torch.float16)

    def rounded(noise: torch.Tensor) -> torch.Tensor:
        noise = noise.to(torch.int16).view(torch.float16)
        return _round_to_float8(values, noise, dtype).view(torch.uint8).to(torch.int32)

    lower, bound = rounded(whole * 0), whole * 0
    for bit in reversed(range(NOISE_BITS)):
        further = bound + 2**bit
        bound = torch.where(rounded(further - 1) == lower, further, bound)
    pairs, place = torch.unique(lower * 256 + rounded(bound), return_inverse=True)
    neighbours = torch.stack([pairs // 256, pairs % 256], 1).flatten().to(torch.uint8)
    return ((2 * place.to(torch.int32) + 1) << NOISE_BITS) - bound, neighbours


def _round_to_float8(x: torch.Tensor, noise: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One slice: uniform noise is added to the mantissa, which is then floored.

    Args:
        x: Values in float16.
        noise: Of the same shape and type, in [0, 1).
        dtype: Target type.
    """
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if dtype == torch.float8_e4m3fn else (5, 2, 15)
    limits = torch.finfo(dtype)
    # What lies beyond the type would overflow on the way; NaN stays what it is.
    x = x.clamp(min=limits.min, max=limits.max)
    sign, magnitude = torch.sign(x), x.abs()
    sign = torch.where(magnitude == 0, torch.zeros_like(sign), sign)
    exponent = torch.clamp(torch.floor(torch.log2(magnitude)) + bias, 0, 2**exponent_bits - 1)
    normal = exponent != 0
    mantissa = torch.where(
        normal,
        (magnitude / (2.0 ** (exponent - bias)) - 1.0) * 2**mantissa_bits,
        magnitude / (2.0 ** (-bias + 1 - mantissa_bits)),
    )
    mantissa = (mantissa + noise).floor() / 2**mantissa_bits
    rounded = sign * torch.where(
        normal,
        (2.0 ** (exponent - bias)) * (1.0 + mantissa),
        (2.0 ** (-bias + 1)) * mantissa,
    )
    return torch.clamp(rounded, min=limits.min, max=limits.max).to(dtype)
