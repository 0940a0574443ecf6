"""Float8 weights on the CPU: converted to the bits torch gives, whatever their shape and layout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from comfy.devices import casting

ALL = torch.arange(256, dtype=torch.int32).to(torch.uint8)
WIDE = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SHAPES: list[tuple[int, ...]] = [(), (0, 3), (256,), (300, 401), (16, 4, 3, 3)]


def same(shown: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (
        shown.dtype == wanted.dtype
        and shown.stride() == wanted.stride()
        and torch.equal(shown.nan_to_num(nan=512.0), wanted.nan_to_num(nan=512.0))
        and torch.equal(shown.signbit(), wanted.signbit())
    )


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_each_pattern_has_its_value_in_any_shape(stored: torch.dtype, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        count = torch.Size(shape).numel()
        weight = ALL.repeat(count // 256 + 1)[:count].view(stored).view(shape)
        assert same(casting.cast_to(weight, dtype), weight.to(dtype))
    layouts = [weight.to(memory_format=torch.channels_last), weight[:, ::2], weight.transpose(0, 1)]
    for layout in layouts:
        assert same(casting.cast_to(layout, dtype), layout.to(dtype))


def test_a_weight_in_its_own_type_is_copied_only_when_asked() -> None:
    weight = ALL.view(torch.float8_e4m3fn)
    assert casting.cast_to(weight, torch.float8_e4m3fn) is weight
    copied = casting.cast_to(weight, copy=True)
    assert copied.dtype == weight.dtype
    assert copied.data_ptr() != weight.data_ptr()
    assert torch.equal(copied.view(torch.uint8), ALL)


def test_a_weight_that_is_trained_keeps_its_gradient() -> None:
    weight = torch.ones(4).to(torch.float8_e4m3fn).requires_grad_()
    assert casting.cast_to(weight, torch.float32).requires_grad
