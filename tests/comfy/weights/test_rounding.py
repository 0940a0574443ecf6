"""Rounding to eight-bit floats: unbiased, by the key alone, up to the ends of the type."""

from __future__ import annotations

import math

import pytest
import torch

from comfy.weights import rounding
from comfy.weights.rounding import stochastic_rounding, string_to_seed

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SEED = string_to_seed("diffusion_model.out.2.weight")


def bits(value: torch.Tensor, dtype: torch.dtype, seed: int = SEED) -> torch.Tensor:
    return stochastic_rounding(value, dtype, seed).view(torch.uint8)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_what_lies_beyond_the_type_becomes_its_end(dtype: torch.dtype, source: torch.dtype) -> None:
    end = torch.finfo(dtype).max
    beyond = torch.tensor([math.inf, 1e9, 65504.0, 60000.0, end * 1.05, end], dtype=source)
    for sign in (1, -1):
        rounded = stochastic_rounding(sign * beyond, dtype, SEED).float()
        assert torch.equal(rounded, torch.full((6,), sign * end))


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_only_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    value = torch.tensor([math.nan, 0.0, -0.0, 1e-12, -1e-12, 1.0, -2.0])
    rounded = stochastic_rounding(value, dtype, SEED).float()
    assert rounded[0].isnan()
    assert rounded[1:].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, -2.0]


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("place", [0.1, 0.25, 0.5, 0.8])
@pytest.mark.parametrize("exponent", ["least", -3, 0, 5])
def test_each_neighbour_is_taken_as_often_as_it_is_near(
    dtype: torch.dtype, place: float, exponent: int | str
) -> None:
    info = torch.finfo(dtype)
    if exponent == "least":  # below the smallest normal number
        low, step = 0.0, info.smallest_normal * info.eps
    else:
        low = 2.0 ** float(exponent) * (1 + info.eps)
        step = 2.0 ** float(exponent) * info.eps
    count = 40_000
    value = torch.full((count,), low + place * step)
    rounded = stochastic_rounding(value, dtype, SEED).double()
    assert set(rounded.unique().tolist()) == {low, low + step}
    share = (rounded > low).double().mean().item()
    deviation = math.sqrt(place * (1 - place) / count)
    assert abs(share - place) < 5 * deviation + 2**-8  # noise has the steps of float16
    assert torch.equal(stochastic_rounding(-value, dtype, SEED).double(), -rounded)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_the_bytes_depend_on_values_and_key_alone(dtype: torch.dtype) -> None:
    value = torch.randn(12, 8, 3, 3, generator=torch.Generator().manual_seed(1))
    wanted = bits(value, dtype)
    copies = {
        "channels last": value.contiguous(memory_format=torch.channels_last),
        "transposed": value.transpose(0, 1).contiguous().transpose(0, 1),
        "strided": torch.stack([value, value], -1)[..., 0],
        "at an odd address": torch.cat([torch.zeros(1), value.flatten()])[1:].view_as(value),
    }
    for name, copied in copies.items():
        assert torch.equal(bits(copied, dtype), wanted), name
    assert torch.equal(bits(value.flatten(1), dtype).flatten(), wanted.flatten())
    state = torch.random.get_rng_state()
    torch.manual_seed(99)
    assert torch.equal(bits(value, dtype), wanted)
    before = torch.random.get_rng_state()
    bits(value, dtype)
    assert torch.equal(torch.random.get_rng_state(), before)  # nobody else's numbers change
    torch.random.set_rng_state(state)
    assert not torch.equal(bits(value, dtype, SEED + 1), wanted)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_any_shape_can_be_rounded(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (0, 4), (4, 0), (1,), (3, 1, 2)):
        assert stochastic_rounding(torch.ones(shape), dtype, SEED).shape == torch.Size(shape)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_what_is_looked_up_is_what_the_formula_gives(dtype: torch.dtype) -> None:
    """For every float16, on both sides of the noise from which on it becomes the upper neighbour,
    and at both ends of the noise."""
    patterns = torch.arange(2**16, dtype=torch.int32)
    values = patterns.to(torch.int16).view(torch.float16)
    bounds, neighbours = rounding._tables(dtype)
    bound = -bounds & (2**rounding.NOISE_BITS - 1)
    greatest = torch.tensor(1 - 2**-11, dtype=torch.float16).view(torch.int16).to(torch.int32)
    for noise in (bound - 1, bound, torch.zeros_like(bound), greatest.expand_as(bound)):
        drawn = noise.clamp(0, greatest)
        wanted = rounding._round_to_float8(
            values, drawn.to(torch.int16).view(torch.float16), dtype
        ).view(torch.uint8)
        shown = neighbours[((bounds + drawn) >> rounding.NOISE_BITS).long()]
        assert torch.equal(shown, wanted)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_neither_threads_nor_blocks_change_the_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.randn(300, 401, generator=torch.Generator().manual_seed(1))
    noise = rounding._noise(value.shape, torch.Generator().manual_seed(SEED))
    wanted = rounding._round_to_float8(value.half(), noise, dtype).view(torch.uint8)
    before = torch.get_num_threads()
    try:
        for threads, block in ((1, 2**15), (2, 2**15), (2, 2**17), (1, 500), (1, 10)):
            torch.set_num_threads(threads)
            monkeypatch.setattr(rounding, "BLOCK_ELEMENTS", block)
            assert torch.equal(bits(value, dtype), wanted)
    finally:
        torch.set_num_threads(before)
