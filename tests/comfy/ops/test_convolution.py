"""Convolutions of few positions as products: the same numbers, chosen only where they pay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comfy import ops
from comfy.devices.policies import MemoryPolicy, PrecisionPolicy
from comfy.devices.runtime import build_runtime, install_runtime
from comfy.ops import convolution
from tests.support.processor import has_equal_products

WIDE = 520
"""Channels of a kernel that is worth a product."""


@pytest.fixture(autouse=True)
def default_runtime() -> Iterator[None]:
    install_runtime(build_runtime(MemoryPolicy(cpu=True)))
    yield
    install_runtime(None)


def conv(channels: int, out: int, kernel: Any = 3, **options: Any) -> Any:
    layer = ops.disable_weight_init.Conv2d(channels, out, kernel, **options)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    return layer.to(memory_format=torch.channels_last).requires_grad_(False)


def library(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.Conv2d._conv_forward(layer, x, layer.weight, layer.bias)


@pytest.mark.parametrize("innermost", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [(1, 1), (4, 4), (5, 7)])
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (3, {"padding": 1}),
        (3, {"padding": 1, "stride": 2}),
        (3, {"padding": 1, "bias": False}),
        ((1, 3), {"padding": (0, 1)}),
        ((5, 3), {"padding": (2, 3), "stride": (1, 2)}),
        (1, {}),
    ],
)
def test_a_product_gives_what_the_library_gives(
    kernel: Any, options: dict[str, Any], size: tuple[int, int], batch: int, innermost: bool
) -> None:
    layer = conv(6, 10, kernel, **options)
    x = torch.randn(batch, 6, *size)
    x = x.contiguous(memory_format=torch.channels_last) if innermost else x
    out = convolution.as_product(layer, x, layer.weight, layer.bias)
    assert out.shape == library(layer, x).shape
    torch.testing.assert_close(out, library(layer, x))


def test_few_positions_of_many_channels_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    product = convolution.as_product
    monkeypatch.setattr(convolution, "as_product", lambda *a: calls.append(a) or product(*a))
    layer = conv(WIDE, WIDE, padding=1)
    x = torch.randn(2, WIDE, 4, 4)
    torch.testing.assert_close(layer(x), library(layer, x), atol=1e-4, rtol=1e-4)
    assert len(calls) == 1
    layer.comfy_cast_weights = True
    layer.weight_function = [lambda weight: weight * 2]
    torch.testing.assert_close(
        layer(x), F.conv2d(x, layer.weight * 2, layer.bias, padding=1), atol=2e-4, rtol=1e-4
    )
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        ({}, (2, WIDE, 32, 32)),  # many positions
        ({"dilation": 2}, (1, WIDE, 8, 8)),
        ({"padding_mode": "circular"}, (1, WIDE, 8, 8)),
        ({"padding": "same"}, (1, WIDE, 8, 8)),
        ({}, (0, WIDE, 8, 8)),
    ],
)
def test_other_convolutions_stay_with_the_library(
    change: dict[str, Any], shape: tuple[int, ...]
) -> None:
    layer = conv(WIDE, WIDE, **{"padding": 1, **change})
    x = torch.empty(shape)
    assert not convolution.is_faster_as_product(layer, x, layer.weight)


def test_weights_in_the_usual_layout_and_other_types_stay_with_the_library() -> None:
    layer, x = conv(WIDE, WIDE, padding=1), torch.empty(1, WIDE, 4, 4)
    assert convolution.is_faster_as_product(layer, x, layer.weight)
    assert not convolution.is_faster_as_product(layer, x, layer.weight.contiguous())
    assert not convolution.is_faster_as_product(layer, x.bfloat16(), layer.weight.bfloat16())
    assert not convolution.is_faster_as_product(layer, x, layer.weight.double())


@pytest.mark.parametrize(
    ("side", "channels", "expected"),
    [(4, 160, True), (6, 160, False), (16, 520, True), (4, 140, False)],
)
def test_the_fewer_positions_the_smaller_a_kernel_pays(
    side: int, channels: int, expected: bool
) -> None:
    layer, x = conv(channels, channels, padding=1), torch.empty(2, channels, side, side)
    assert convolution.is_faster_as_product(layer, x, layer.weight) is expected


def test_a_policy_leaves_everything_to_the_library() -> None:
    layer, x = conv(WIDE, WIDE, padding=1), torch.empty(1, WIDE, 4, 4)
    install_runtime(build_runtime(MemoryPolicy(cpu=True), PrecisionPolicy(tune_cpu=False)))
    assert not convolution.is_faster_as_product(layer, x, layer.weight)


def test_a_replaced_convolution_of_one_layer_is_used() -> None:
    layer = conv(WIDE, WIDE, padding=1)
    layer._conv_forward = lambda x, weight, bias: x * 0
    assert layer(torch.ones(1, WIDE, 4, 4)).abs().max() == 0


def test_wrong_channels_are_named() -> None:
    layer = conv(WIDE, WIDE, padding=1)
    with pytest.raises(RuntimeError, match=f"{WIDE}.*{WIDE + 1}"):
        layer(torch.ones(1, WIDE + 1, 4, 4))


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("innermost", [True, False])
@pytest.mark.parametrize(
    "shape", [(1, 8, 4, 4), (1, 8, 5, 3), (3, 8, 4, 4), (2, 8, 1, 1), (0, 8, 4, 4)]
)
def test_single_items_and_single_positions_give_what_the_library_gives(
    kernel: int, innermost: bool, shape: tuple[int, ...]
) -> None:
    layer, x = conv(8, 6, kernel, padding=kernel // 2), torch.randn(shape)
    x = x.contiguous(memory_format=torch.channels_last) if innermost else x
    torch.testing.assert_close(layer(x), library(layer, x))


def test_the_form_is_chosen_by_one_item() -> None:
    layer = conv(160, 160, padding=1)
    for batch in (1, 2, 9):
        assert convolution.is_faster_as_product(layer, torch.empty(batch, 160, 4, 4), layer.weight)
        few = torch.empty(batch, 160, 5, 4)
        assert not convolution.is_faster_as_product(layer, few, layer.weight)


@pytest.mark.skipif(not has_equal_products(), reason="here a batch rounds by its size")
@pytest.mark.parametrize("kind", [ops.disable_weight_init, ops.manual_cast])
@pytest.mark.parametrize("size", [(70, 128), (12, 16), (3, 5, 36)])
@pytest.mark.parametrize("bias", [True, False])
def test_cells_seen_as_tokens_have_their_bits_alone_and_in_every_batch(
    kind: Any, size: tuple[int, ...], bias: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    *places, channels = size
    layer = kind.Linear(channels, 64, bias=bias)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    x = torch.randn(5, channels, *places, generator=generator).movedim(1, -1)
    whole = layer(x)
    for first, end in ((0, 1), (4, 5), (1, 3)):
        item = x.movedim(-1, 1)[first:end].clone().movedim(1, -1)
        assert torch.equal(layer(item), whole[first:end]), (first, end)
    torch.testing.assert_close(whole, F.linear(x, layer.weight, layer.bias))


LINES_AND_VIDEOS: dict[str, tuple[str, int, int, Any, dict[str, Any], tuple[int, ...]]] = {
    "patches of a video": ("Conv3d", 16, 32, (1, 2, 2), {"stride": (1, 2, 2)}, (3, 8, 10)),
    "moments": ("Conv3d", 64, 64, (3, 1, 1), {"padding": (1, 0, 0)}, (3, 8, 8)),
    "a cube": ("Conv3d", 32, 32, 3, {"padding": 1, "bias": False}, (3, 9, 7)),
    "cells": ("Conv3d", 16, 32, 1, {}, (3, 8, 8)),
    "groups": ("Conv3d", 32, 32, 3, {"padding": 1, "groups": 4}, (3, 5, 5)),
    "a line": ("Conv1d", 64, 64, 3, {"padding": 1}, (215,)),
    "points of a line": ("Conv1d", 16, 32, 1, {}, (50,)),
    "a line with gaps": ("Conv1d", 16, 16, 3, {"padding": 2, "dilation": 2}, (37,)),
    "channels of a line": ("Conv1d", 16, 16, 3, {"padding": 1, "groups": 16}, (37,)),
    "a line around": ("Conv1d", 8, 8, 3, {"padding": 1, "padding_mode": "circular"}, (9,)),
}


def line_or_video(case: str) -> tuple[Any, torch.Tensor]:
    """The layer of a case, and sixteen items."""
    kind, channels, out, kernel, options, size = LINES_AND_VIDEOS[case]
    layer = getattr(ops.disable_weight_init, kind)(channels, out, kernel, **options)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return layer.requires_grad_(False), torch.randn(16, channels, *size, generator=generator)


@pytest.mark.skipif(not has_equal_products(), reason="here a batch rounds by its size")
@pytest.mark.parametrize("case", [case for case in LINES_AND_VIDEOS if "around" not in case])
def test_an_item_of_a_line_or_video_has_its_bits_alone_and_in_every_batch(case: str) -> None:
    layer, x = line_or_video(case)
    whole = layer(x)
    for first, end in ((0, 1), (15, 16), (3, 5), (0, 15)):
        assert torch.equal(layer(x[first:end].clone()), whole[first:end]), (first, end)


@pytest.mark.parametrize("case", LINES_AND_VIDEOS)
@pytest.mark.parametrize("innermost", [True, False])
def test_a_line_or_video_gives_what_the_library_gives(case: str, innermost: bool) -> None:
    layer, x = line_or_video(case)
    plain = getattr(nn, type(layer).__name__)
    expected = plain._conv_forward(layer, x, layer.weight, layer.bias)
    if innermost and x.ndim == 5:
        x = x.contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(layer(x), expected)
    assert layer(x[:0]).shape == (0, *expected.shape[1:])


@pytest.mark.parametrize("case", ["a cube", "a line"])
def test_misfits_of_lines_and_videos_are_torchs_to_refuse(case: str) -> None:
    layer, x = line_or_video(case)
    with pytest.raises(RuntimeError, match="channels"):
        layer(x[:, :-1])
    unpadded = type(layer)(x.shape[1], 4, 3)
    with pytest.raises(RuntimeError, match=r"[Kk]ernel size"):
        unpadded(x[..., :2])
