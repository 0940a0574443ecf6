"""Rounding a computed weight to the type it is stored in.

Eight-bit floats are rounded stochastically, so that a small delta survives on average; the random
bits come from the weight's key, so that the same patches give the same bytes every time.
"""

from __future__ import annotations

import zlib

import torch

SLICE_ELEMENTS = 4096 * 4096
"""Larger tensors are rounded in slices along axis 0, to bound the working memory."""

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
    if dtype in (torch.float32, torch.float16, torch.bfloat16):
        return value.to(dtype=dtype)
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return value.to(dtype=dtype)
    generator = torch.Generator(device=value.device)
    generator.manual_seed(seed)
    out = torch.empty_like(value, dtype=dtype)
    slices = max(1.0, value.numel() / SLICE_ELEMENTS)
    step = max(1, round(value.shape[0] / slices)) if value.ndim else 1
    if value.ndim == 0:
        return _round_to_float8(value, dtype, generator)
    for start in range(0, value.shape[0], step):
        part = slice(start, start + step)
        out[part].copy_(_round_to_float8(value[part], dtype, generator))
    return out


def _round_to_float8(
    value: torch.Tensor, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """One slice: uniform noise is added to the mantissa, which is then floored."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if dtype == torch.float8_e4m3fn else (5, 2, 15)
    limits = torch.finfo(dtype)
    # What lies beyond the type would overflow on the way; NaN stays what it is.
    x = value.clamp(min=limits.min, max=limits.max).half()
    sign, magnitude = torch.sign(x), x.abs()
    sign = torch.where(magnitude == 0, torch.zeros_like(sign), sign)
    exponent = torch.clamp(torch.floor(torch.log2(magnitude)) + bias, 0, 2**exponent_bits - 1)
    normal = exponent != 0
    mantissa = torch.where(
        normal,
        (magnitude / (2.0 ** (exponent - bias)) - 1.0) * 2**mantissa_bits,
        magnitude / (2.0 ** (-bias + 1 - mantissa_bits)),
    )
    noise = torch.rand(
        mantissa.size(), dtype=mantissa.dtype, layout=mantissa.layout, device=mantissa.device,
        generator=generator,
    )  # fmt: skip
    mantissa = (mantissa + noise).floor() / 2**mantissa_bits
    rounded = sign * torch.where(
        normal,
        (2.0 ** (exponent - bias)) * (1.0 + mantissa),
        (2.0 ** (-bias + 1)) * mantissa,
    )
    return torch.clamp(rounded, min=limits.min, max=limits.max).to(dtype)
