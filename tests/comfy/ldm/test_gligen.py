"""GLIGEN: layers in the UNet's order, gates, boxes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from comfy.ldm.gligen.model import GatedSelfAttentionDense, PositionNet, box_waves, build_gligen
from comfy.ldm.unet.model import UNetModel
from tests.support.golden_nets import read_golden_net

CONTEXT = 24
PLACES = {
    "input_blocks.1.1": 32,
    "input_blocks.3.1": 64,
    "middle_block.1": 64,
    "output_blocks.0.1": 64,
    "output_blocks.1.1": 64,
    "output_blocks.2.1": 32,
    "output_blocks.3.1": 32,
}


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    sd = {}
    for place, width in reversed(PLACES.items()):
        layer = GatedSelfAttentionDense(width, CONTEXT, 1, width)
        for name, value in layer.state_dict().items():
            filled = torch.randn(value.shape) * 0.05
            sd[f"{place}.transformer_blocks.0.fuser.{name}"] = filled
    for name, value in PositionNet(CONTEXT, CONTEXT).state_dict().items():
        sd[f"position_net.{name}"] = torch.randn(value.shape) * 0.1
    return sd


def test_waves_are_sines_and_cosines_of_growing_frequency() -> None:
    waves = box_waves(torch.tensor([[[0.5, 0.0, 0.0, 0.0]]]))[0, 0]
    assert waves.shape == (64,)
    assert waves[0] == pytest.approx(math.sin(0.5))
    assert waves[8] == pytest.approx(math.sin(0.5 * 100 ** (1 / 8)))


def test_a_closed_gate_lets_the_features_pass_unchanged() -> None:
    layer = GatedSelfAttentionDense(64, CONTEXT, 1, 64)
    x = torch.randn(2, 9, 64)
    for parameter in layer.parameters():
        parameter.data.normal_()
    layer.alpha_attn.data.zero_()
    layer.alpha_dense.data.zero_()
    assert torch.equal(layer(x, torch.randn(2, 30, CONTEXT)), x)


def test_absent_boxes_do_not_matter() -> None:
    net = PositionNet(CONTEXT, CONTEXT)
    for parameter in net.parameters():
        parameter.data.normal_()
    masks = torch.tensor([[1.0, 0.0]])
    boxes, texts = torch.rand(1, 2, 4), torch.randn(1, 2, CONTEXT)
    other_boxes, other_texts = boxes.clone(), texts.clone()
    other_boxes[:, 1], other_texts[:, 1] = 0.9, 5.0
    assert torch.equal(net(boxes, masks, texts), net(other_boxes, masks, other_texts))


@torch.inference_mode()
def test_boxes_steer_a_unet_through_its_middle_patch(golden_folder: Path) -> None:
    recorded = read_golden_net(golden_folder / "nets/unet_sd1.safetensors")
    unet = UNetModel(**recorded.constructor)
    unet.load_state_dict(recorded.weights)
    sd = {
        key: value
        for key, value in weights().items()
        if not any(key.startswith(place) and width < 64 for place, width in PLACES.items())
    }
    gligen = build_gligen(sd)
    assert [layer.linear.out_features for layer in gligen.module_list] == [64] * 4
    patch = gligen.set_position((2, 4, 8, 8), [(torch.randn(1, CONTEXT), 4, 4, 0, 2)], "cpu")
    x = torch.randn(2, 16, 64)
    moved = patch(x, {"transformer_index": 1})
    empty = gligen.set_empty((2, 4, 8, 8), "cpu")(x, {"transformer_index": 1})
    assert moved.shape == x.shape
    assert not torch.equal(moved, empty)


def test_too_many_boxes_are_refused_with_both_numbers() -> None:
    sd = {k: v for k, v in weights().items() if "blocks.1.1" not in k and "blocks.2.1" not in k}
    sd = {k: v for k, v in sd.items() if "output_blocks.3" not in k}
    gligen = build_gligen(sd)
    with pytest.raises(ValueError, match=r"31.*30"):
        gligen.set_position((1, 4, 8, 8), [(torch.zeros(CONTEXT), 1, 1, 0, 0)] * 31, "cpu")


def test_other_files_are_refused() -> None:
    with pytest.raises(ValueError, match="GLIGEN"):
        build_gligen({"foo": torch.zeros(1)})
