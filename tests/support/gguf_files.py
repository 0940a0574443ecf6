"""Writes small GGUF files: quantises weights plainly, without searching for the best scales.

Source of the format: https://github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comfy.weights.low_bit.ggml import GGML_TYPES

NUMBERS = {kind.name: number for number, kind in GGML_TYPES.items()}
ALIGNMENT = 32


def halves(values: Tensor) -> Tensor:
    """Float16 numbers ``[n, m]`` as bytes ``[n, 2 m]``."""
    return values.to(torch.float16).view(torch.uint8)


def joined_nibbles(codes: Tensor) -> Tensor:
    """Codes ``[..., 2, m]`` of four bits: the first half becomes the lower bits of bytes."""
    return (codes[..., 0, :] | (codes[..., 1, :] << 4)).to(torch.uint8)


def joined_pairs(codes: Tensor) -> Tensor:
    """Codes ``[..., 4, m]`` of two bits as bytes ``[..., m]``."""
    return sum(codes[..., n, :] << (2 * n) for n in range(4)).to(torch.uint8)  # type: ignore[union-attr]


def joined_bits(codes: Tensor) -> Tensor:
    """Bits ``[n, 8, m]`` as bytes ``[n, m]``, the first the lowest."""
    return sum(codes[:, n, :] << n for n in range(8)).to(torch.uint8)  # type: ignore[union-attr]


def divided(values: Tensor, by: Tensor) -> Tensor:
    """Values over steps, 0 where a step is 0."""
    return torch.where(by == 0, torch.zeros_like(values), values / by)


def q8_0(x: Tensor) -> Tensor:
    """See `comfy.weights.low_bit.ggml_simple`."""
    step = halves(x.abs().amax(1, keepdim=True) / 127)
    codes = divided(x, step.view(torch.float16).float()).round().clamp(-127, 127)
    return torch.cat([step, codes.to(torch.int8).view(torch.uint8)], dim=1)


def _around(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Step as bytes, and codes around the middle of so many levels."""
    step = halves(x.abs().amax(1, keepdim=True) / (levels // 2 - 0.5))
    codes = divided(x, step.view(torch.float16).float()).round() + levels // 2
    return step, codes.clamp(0, levels - 1).int()


def _above(x: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Step and least value as bytes, and codes."""
    low = x.amin(1, keepdim=True)
    step, least = halves((x.amax(1, keepdim=True) - low) / (levels - 1)), halves(low)
    wide, base = step.view(torch.float16).float(), least.view(torch.float16).float()
    codes = divided(x - base, wide).round().clamp(0, levels - 1)
    return step, least, codes.int()


def q4_0(x: Tensor) -> Tensor:
    """As above."""
    step, codes = _around(x, 16)
    return torch.cat([step, joined_nibbles(codes.reshape(-1, 2, 16))], dim=1)


def q4_1(x: Tensor) -> Tensor:
    """As above."""
    step, least, codes = _above(x, 16)
    return torch.cat([step, least, joined_nibbles(codes.reshape(-1, 2, 16))], dim=1)


def _fifth(codes: Tensor) -> Tensor:
    return joined_bits((codes >> 4).reshape(-1, 4, 8).transpose(1, 2))


def q5_0(x: Tensor) -> Tensor:
    """As above."""
    step, codes = _around(x, 32)
    low = joined_nibbles((codes & 15).reshape(-1, 2, 16))
    return torch.cat([step, _fifth(codes), low], dim=1)


def q5_1(x: Tensor) -> Tensor:
    """As above."""
    step, least, codes = _above(x, 32)
    low = joined_nibbles((codes & 15).reshape(-1, 2, 16))
    return torch.cat([step, least, _fifth(codes), low], dim=1)


def _nearest(x: Tensor, step: Tensor) -> Tensor:
    from comfy.weights.low_bit.ggml_simple import IQ4_VALUES

    values = torch.tensor(IQ4_VALUES).float()
    return (divided(x, step)[..., None] - values).abs().argmin(-1)


def iq4_nl(x: Tensor) -> Tensor:
    """As above."""
    step = halves(x.abs().amax(1, keepdim=True) / 120)
    codes = _nearest(x, step.view(torch.float16).float())
    return torch.cat([step, joined_nibbles(codes.reshape(-1, 2, 16))], dim=1)


# -- blocks of 256 ---------------------------------------------------------------------------------


def _scales_above(x: Tensor, levels: int, most: int) -> tuple[Tensor, ...]:
    """Of parts ``[n, parts, m]`` with a least value of at most 0: both scales of scales as bytes,
    scales and least values as codes, and codes of the numbers."""
    least = (-x.amin(2)).clamp(min=0)
    steps = (x.amax(2) + least).clamp(min=0) / (levels - 1)
    whole = halves(steps.amax(1, keepdim=True) / most)
    base = halves(least.amax(1, keepdim=True) / most)
    wide, deep = (t.view(torch.float16).float() for t in (whole, base))
    scale = divided(steps, wide).round().clamp(0, most)
    low = divided(least, deep).round().clamp(0, most)
    codes = divided(x + (low * deep)[..., None], (scale * wide)[..., None])
    return whole, base, scale.int(), low.int(), codes.round().clamp(0, levels - 1).int()


def _scales_around(x: Tensor, levels: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of parts ``[n, parts, m]`` around 0: scale of scales as bytes, scales, signed codes."""
    steps = x.abs().amax(2) / (levels // 2 - 0.5)
    whole = halves(steps.amax(1, keepdim=True) / most)
    wide = whole.view(torch.float16).float()
    scale = divided(steps, wide).round().clamp(-most, most)
    codes = divided(x, (scale * wide)[..., None]).round()
    return whole, scale.int(), codes.clamp(-(levels // 2), levels // 2 - 1).int()


def _packed_sixes(scale: Tensor, low: Tensor) -> Tensor:
    """Eight scales and least values of six bits in twelve bytes."""
    first = (scale[:, :4] & 63) | ((scale[:, 4:] >> 4) << 6)
    second = (low[:, :4] & 63) | ((low[:, 4:] >> 4) << 6)
    third = (scale[:, 4:] & 15) | ((low[:, 4:] & 15) << 4)
    return torch.cat([first, second, third], dim=1).to(torch.uint8)


def q2_k(x: Tensor) -> Tensor:
    """See `comfy.weights.low_bit.ggml_super`."""
    whole, base, scale, low, codes = _scales_above(x.reshape(-1, 16, 16), 4, 15)
    packed = joined_pairs(codes.reshape(-1, 2, 4, 32)).flatten(1)
    return torch.cat([(scale | (low << 4)).to(torch.uint8), packed, whole, base], dim=1)


def q3_k(x: Tensor) -> Tensor:
    """As above."""
    whole, scale, codes = _scales_around(x.reshape(-1, 16, 16), 8, 31)
    codes, scale = codes.reshape(-1, 8, 32) + 4, scale + 32
    packed = joined_pairs((codes & 3).reshape(-1, 2, 4, 32)).flatten(1)
    lower = joined_nibbles((scale & 15).reshape(-1, 2, 8))
    upper = joined_pairs((scale >> 4).reshape(-1, 4, 4))
    return torch.cat([joined_bits(codes >> 2), packed, lower, upper, whole], dim=1)


def q4_k(x: Tensor) -> Tensor:
    """As above."""
    whole, base, scale, low, codes = _scales_above(x.reshape(-1, 8, 32), 16, 63)
    packed = joined_nibbles(codes.reshape(-1, 4, 2, 32)).flatten(1)
    return torch.cat([whole, base, _packed_sixes(scale, low), packed], dim=1)


def q5_k(x: Tensor) -> Tensor:
    """As above."""
    whole, base, scale, low, codes = _scales_above(x.reshape(-1, 8, 32), 32, 63)
    packed = joined_nibbles((codes & 15).reshape(-1, 4, 2, 32)).flatten(1)
    return torch.cat([whole, base, _packed_sixes(scale, low), joined_bits(codes >> 4), packed], 1)


def q6_k(x: Tensor) -> Tensor:
    """As above."""
    whole, scale, codes = _scales_around(x.reshape(-1, 16, 16), 64, 127)
    codes = codes.reshape(-1, 2, 4, 32) + 32
    low = joined_nibbles((codes & 15).reshape(-1, 2, 2, 64)).flatten(1)
    high = joined_pairs(codes >> 4).flatten(1)
    return torch.cat([low, high, scale.to(torch.int8).view(torch.uint8), whole], dim=1)


def iq4_xs(x: Tensor) -> Tensor:
    """As above."""
    parts = x.reshape(-1, 8, 32)
    steps = parts.abs().amax(2) / 120
    whole = halves(steps.amax(1, keepdim=True) / 31)
    wide = whole.view(torch.float16).float()
    scale = divided(steps, wide).round().clamp(0, 31).int()
    codes = _nearest(parts, (scale * wide)[..., None])
    scale = scale + 32
    upper = joined_pairs((scale >> 4).reshape(-1, 2, 4, 1)).flatten(1)
    lower = joined_nibbles((scale & 15).reshape(-1, 4, 2, 1)).flatten(1)
    packed = joined_nibbles(codes.reshape(-1, 8, 2, 16)).flatten(1)
    return torch.cat([whole, upper, lower, packed], dim=1)


ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "IQ4_NL": iq4_nl,
    "Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k, "IQ4_XS": iq4_xs,
}  # fmt: skip


def encoded(weight: Tensor, kind: str) -> bytes:
    """A weight in a type, as in a file."""
    plain = GGML_TYPES[NUMBERS[kind]].dtype
    if plain is not None:
        return weight.to(plain).contiguous().view(torch.uint8).numpy().tobytes()
    blocks = weight.float().reshape(-1, GGML_TYPES[NUMBERS[kind]].elements)
    return ENCODERS[kind](blocks).numpy().tobytes()


def fitting(weight: Tensor, kind: str) -> str:
    """The type a converter would choose: matrices of whole blocks are quantised, others not."""
    row = weight.shape[-1] if weight.ndim == 2 else 1
    wanted = [kind, "Q8_0"] if kind in ENCODERS else []
    return next((k for k in wanted if row % GGML_TYPES[NUMBERS[k]].elements == 0), "F32")


def write(
    path: Path,
    tensors: Mapping[str, Tensor],
    kind: str | Callable[[str, Tensor], str] = "Q8_0",
    facts: Mapping[str, Any] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Path:
    """Write a file.

    Args:
        kind: The type of matrices, or what tells the type of each tensor.
        facts: Of the header: texts, whole numbers, numbers, lists of them.
        shapes: Shapes to announce that are not those of the tensors.
    """
    header, data = b"", b""
    for name, weight in tensors.items():
        of = kind(name, weight) if callable(kind) else fitting(weight, kind)
        shape = (shapes or {}).get(name, tuple(weight.shape))
        header += _text(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        header += struct.pack("<IQ", NUMBERS[of], len(data))
        data += encoded(weight, of)
        data += b"\0" * (-len(data) % ALIGNMENT)
    said = b"".join(_text(key) + _value(value) for key, value in (facts or {}).items())
    whole = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts or {})) + said + header
    path.write_bytes(whole + b"\0" * (-len(whole) % ALIGNMENT) + data)
    return path


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any, typed: bool = True) -> bytes:
    if isinstance(value, str):
        number, raw = 8, _text(value)
    elif isinstance(value, bool):
        number, raw = 7, struct.pack("<?", value)
    elif isinstance(value, int):
        number, raw = 5, struct.pack("<i", value)
    elif isinstance(value, float):
        number, raw = 6, struct.pack("<f", value)
    else:
        inner = struct.unpack("<I", _value(value[0])[:4])[0]
        number = 9
        raw = struct.pack("<IQ", inner, len(value)) + b"".join(_value(v, False) for v in value)
    return struct.pack("<I", number) + raw if typed else raw


def size_of(weight: Tensor, kind: str) -> int:
    """Bytes of a weight in a type."""
    of = GGML_TYPES[NUMBERS[kind]]
    return math.prod(weight.shape) // of.elements * of.size
