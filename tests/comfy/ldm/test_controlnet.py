"""ControlNets and T2I adapters against recorded tiny networks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from comfy.ldm.t2i_adapter.model import Adapter, Adapter_light
from comfy.ldm.unet.controlnet import ControlNet
from tests.support.golden_nets import assert_close_to_golden, read_golden_net


@torch.inference_mode()
def test_controlnet_agrees_with_the_reference(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/controlnet_sd1.safetensors")
    model = ControlNet(**net.constructor)
    model.load_state_dict(net.weights)
    given = net.inputs
    control = model(given["x"], given["hint"], given["t"], given["context"])
    assert {part: len(values) for part, values in control.items()} == {"middle": 1, "output": 4}
    for part, values in control.items():
        for number, value in enumerate(values):
            assert_close_to_golden(value, net.outputs[f"control/{part}/{number}"])


def small_union() -> ControlNet:
    model = ControlNet(
        hint_channels=3,
        union_controlnet_num_control_type=6,
        in_channels=4,
        model_channels=320,
        num_res_blocks=[1],
        channel_mult=[1],
        transformer_depth=[1],
        transformer_depth_middle=1,
        context_dim=16,
        num_heads=8,
    )
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    return model


@torch.inference_mode()
def test_union_controlnet_takes_several_kinds_of_hint() -> None:
    model = small_union()
    hints = torch.rand(2, 1, 3, 64, 64)
    given = (torch.randn(1, 4, 8, 8), hints, torch.tensor([5.0]), torch.randn(1, 3, 16))
    both = model(*given, control_type=[1, 3])["middle"][0]
    other = model(*given, control_type=[1, 4])["middle"][0]
    assert both.isfinite().all()
    assert not torch.allclose(both, other)


@torch.inference_mode()
def test_a_union_controlnet_that_is_not_told_sees_the_hint_as_one_of_a_single_kind_does() -> None:
    model = small_union()
    x, t, text = torch.randn(2, 4, 8, 8), torch.tensor([5.0, 5.0]), torch.randn(2, 3, 16)
    hint = torch.rand(2, 3, 64, 64)
    told = model(x, hint, t, text, control_type=[])["output"][0]
    first = model.input_blocks[0][0](x) + model.input_hint_block(hint, None, None)
    torch.testing.assert_close(told, model.zero_convs[0][0](first))
    assert torch.equal(told, model(x, hint, t, text)["output"][0])


@pytest.mark.parametrize(
    ("name", "kind"), [("full", Adapter), ("xl", Adapter), ("light", Adapter_light)]
)
@torch.inference_mode()
def test_adapters_agree_with_the_reference(name: str, kind: type, golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / f"nets/t2i_adapter_{name}.safetensors")
    model = kind(**net.constructor)
    model.load_state_dict(net.weights)
    features = model(net.inputs["x"])
    empty = json.loads(net.note.removeprefix("None positions: "))
    assert {part: [v is None for v in values] for part, values in features.items()} == empty
    for part, values in features.items():
        for number, value in enumerate(values):
            if value is not None:
                assert_close_to_golden(value, net.outputs[f"{part}/{number}"])
