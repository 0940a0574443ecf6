"""Linear layers used in parts: only where a call would do nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.unet import transformer
from comfy.ldm.unet.transformer import GEGLU


def filled(layer: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return layer


@pytest.mark.parametrize("bias", [True, False])
def test_parts_are_the_parts_of_the_whole_and_contiguous(bias: bool) -> None:
    layer = filled(ops.disable_weight_init.Linear(6, 9, bias=bias))
    x = torch.randn(2, 5, 6)
    parts = ops.linear_parts(layer, x, 3)
    torch.testing.assert_close(torch.cat(parts, dim=-1), layer(x))
    assert all(part.is_contiguous() for part in parts)


def test_plain_layers_are_recognised() -> None:
    assert ops.is_plain_linear(nn.Linear(2, 2))
    assert ops.is_plain_linear(ops.disable_weight_init.Linear(2, 2))
    assert not ops.is_plain_linear(ops.manual_cast.Linear(2, 2))


def _with_hook(layer: Any) -> None:
    layer.register_forward_hook(lambda *_: None)


def _with_pre_hook(layer: Any) -> None:
    layer.register_forward_pre_hook(lambda *_: None)


def _with_forward(layer: Any) -> None:
    layer.forward = lambda x: x


def _with_function(layer: Any) -> None:
    layer.weight_function = [lambda weight: weight]


def _with_cast(layer: Any) -> None:
    layer.comfy_cast_weights = True


class _Coded(torch.Tensor):
    """A weight of a class of its own."""


def _with_coded_weight(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(_Coded))


@pytest.mark.parametrize(
    "change",
    [_with_hook, _with_pre_hook, _with_forward, _with_function, _with_cast, _with_coded_weight],
)
def test_layers_whose_call_does_more_are_not_plain(change: Any) -> None:
    layer = filled(ops.disable_weight_init.Linear(2, 2))
    change(layer)
    assert not ops.is_plain_linear(layer)


def test_a_subclass_is_not_plain() -> None:
    class Own(ops.disable_weight_init.Linear):
        pass

    assert not ops.is_plain_linear(Own(2, 2))


@pytest.mark.parametrize("plain", [True, False])
def test_a_gated_unit_is_the_same_whole_and_in_parts(
    plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer, "MANY", 0 if plain else 1 << 60)
    unit = filled(GEGLU(6, 5))
    x = torch.randn(2, 7, 6)
    value, gate = F.linear(x, unit.proj.weight, unit.proj.bias).chunk(2, dim=-1)
    torch.testing.assert_close(unit(x), value * F.gelu(gate))


def test_a_gated_unit_in_parts_can_be_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = []
    for many in (0, 1 << 60):
        monkeypatch.setattr(transformer, "MANY", many)
        unit = filled(GEGLU(6, 5))
        x = torch.linspace(-1, 1, 12).view(2, 6).requires_grad_()
        unit(x).square().sum().backward()
        gradients.append((x.grad, unit.proj.weight.grad))
    torch.testing.assert_close(gradients[0], gradients[1])
