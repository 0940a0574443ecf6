"""Layers: same results as torch's, weights left alone, cast and streamed at use, interruptible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from comfy import interrupt, ops
from comfy.ops.streaming import StreamPlan

LAYERS: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = {
    "Linear": ((6, 4), {}, (2, 6)),
    "Conv1d": ((4, 6, 3), {"padding": 1}, (2, 4, 8)),
    "Conv2d": ((4, 6, 3), {"padding": 1, "stride": 2}, (2, 4, 8, 8)),
    "Conv3d": ((4, 6, 3), {"padding": 1}, (2, 4, 3, 4, 4)),
    "ConvTranspose1d": ((4, 6, 3), {"stride": 2, "padding": 1}, (2, 4, 8)),
    "ConvTranspose2d": ((4, 6, 2), {"stride": 2}, (2, 4, 5, 5)),
    "ConvTranspose3d": ((4, 6, 2), {"stride": 2}, (1, 4, 3, 4, 4)),
    "GroupNorm": ((2, 4), {}, (2, 4, 5)),
    "LayerNorm": ((6,), {}, (2, 6)),
    "RMSNorm": ((6,), {"eps": 1e-6}, (2, 6)),
}


def filled(layer: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return layer


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("namespace", [ops.disable_weight_init, ops.manual_cast])
def test_a_layer_computes_what_torch_computes(name: str, namespace: Any) -> None:
    positional, named, shape = LAYERS[name]
    ours = filled(getattr(namespace, name)(*positional, **named))
    theirs = getattr(nn, name)(*positional, **named)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(shape)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("name", LAYERS)
def test_a_casting_layer_follows_its_input(name: str) -> None:
    positional, named, shape = LAYERS[name]
    layer = filled(getattr(ops.manual_cast, name)(*positional, **named, dtype=torch.bfloat16))
    wide = filled(getattr(ops.manual_cast, name)(*positional, **named))
    wide.load_state_dict({k: v.float() for k, v in layer.state_dict().items()})
    x = torch.randn(shape)
    assert layer(x).dtype == torch.float32
    assert torch.equal(layer(x), wide(x))
    assert layer.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", LAYERS)
def test_weight_functions_change_what_is_used_not_what_is_stored(name: str) -> None:
    positional, named, shape = LAYERS[name]
    layer: Any = filled(getattr(ops.disable_weight_init, name)(*positional, **named))
    doubled: Any = filled(getattr(ops.disable_weight_init, name)(*positional, **named))
    stored = layer.weight.clone()
    layer.weight_function = [lambda weight: weight * 2]
    doubled.weight.data *= 2
    x = torch.randn(shape)
    assert torch.equal(layer(x), doubled(x))
    assert torch.equal(layer.weight, stored)
    if getattr(layer, "bias", None) is not None:
        layer.bias_function = [lambda bias: bias + 1]
        doubled.bias.data += 1
        assert torch.equal(layer(x), doubled(x))


@pytest.mark.parametrize("kind", ["LayerNorm", "GroupNorm", "RMSNorm"])
def test_norms_without_parameters_work_while_casting(kind: str) -> None:
    positional, _, shape = LAYERS[kind]
    affine = {"affine": False} if kind == "GroupNorm" else {"elementwise_affine": False}
    layer = getattr(ops.manual_cast, kind)(*positional, **affine)
    assert layer(torch.randn(shape)).shape == torch.Size(shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_embedding_rows_come_in_the_type_asked_for(dtype: torch.dtype) -> None:
    layer = ops.manual_cast.Embedding(5, 4, dtype=torch.float16)
    layer.weight.data = torch.randn(5, 4).half()
    layer.weight = nn.Parameter(layer.weight.data.to(dtype), requires_grad=False)
    rows = layer(torch.tensor([1, 3]), out_dtype=torch.float32)
    assert rows.dtype == torch.float32
    assert torch.equal(rows, layer.weight.data.float()[[1, 3]])


def test_layers_are_built_without_initialising_weights(monkeypatch: Any) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a weight was initialised")

    for name in ("kaiming_uniform_", "uniform_", "normal_", "ones_", "zeros_"):
        monkeypatch.setattr(nn.init, name, forbidden)
    for name, (positional, named, _) in LAYERS.items():
        getattr(ops.disable_weight_init, name)(*positional, **named)
    ops.manual_cast.Embedding(5, 4)


def test_a_cancelled_prompt_stops_at_the_next_layer() -> None:
    layer = filled(ops.disable_weight_init.Linear(2, 2))
    interrupt.interrupt_current_processing()
    try:
        with pytest.raises(interrupt.InterruptProcessingException):
            layer(torch.ones(1, 2))
    finally:
        interrupt.interrupt_current_processing(False)
    layer(torch.ones(1, 2))


def test_convolutions_by_number_of_axes() -> None:
    assert isinstance(ops.manual_cast.conv_nd(2, 1, 1, 1), ops.manual_cast.Conv2d)
    assert isinstance(ops.manual_cast.conv_nd(3, 1, 1, 1), ops.manual_cast.Conv3d)
    with pytest.raises(ValueError, match="supported: 2, 3"):
        ops.manual_cast.conv_nd(4, 1, 1, 1)


def test_operations_are_chosen_by_stored_and_computing_type() -> None:
    same = ops.pick_operations(torch.float16, torch.float16)
    assert same is ops.disable_weight_init
    assert ops.pick_operations(torch.float16, None) is ops.disable_weight_init
    assert ops.pick_operations(torch.float16, torch.float32) is ops.manual_cast


def test_a_plan_starts_the_next_layer_and_forgets_what_did_not_come(accelerator: Any) -> None:
    accelerator.set_async(True)
    device = torch.device(f"{accelerator.NAME}:0")
    layers = [filled(ops.disable_weight_init.Linear(8, 8, bias=False)) for _ in range(4)]
    plan = StreamPlan.for_device(device)
    for _ in range(2):
        for layer in layers:
            weight, _ = plan.take(layer)
            assert torch.equal(weight.cpu(), layer.weight)
    assert not plan.ahead  # nothing is brought for a pass that may never come
    plan.take(layers[0])
    assert list(plan.ahead) == [id(layers[1])]
    for layer in (layers[2], layers[3], layers[1]):
        plan.take(layer)
    assert len(plan.ahead) <= 2
    plan.close()
    assert torch.accelerator.memory_allocated(0) <= layers[0].weight.nbytes
