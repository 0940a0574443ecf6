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


def norm(x: torch.Tensor, layer: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    scaled = (x - mean) / (variance + 1e-5).sqrt()
    return scaled * layer[f"{name}.weight"] + layer[f"{name}.bias"]


def gated(
    x: torch.Tensor, objects: torch.Tensor, sd: dict[str, torch.Tensor], heads: int
) -> torch.Tensor:
    """A gated layer after the paper's equations 7 and 8, with a gated feed-forward behind it."""
    objects = objects @ sd["linear.weight"].T + sd["linear.bias"]
    both = norm(torch.cat([x, objects], dim=1), sd, "norm1")
    q, k, v = (
        (both @ sd[f"attn.to_{name}.weight"].T).unflatten(-1, (heads, -1)).transpose(1, 2)
        for name in "qkv"
    )
    seen = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v
    seen = seen.transpose(1, 2).flatten(2) @ sd["attn.to_out.0.weight"].T + sd["attn.to_out.0.bias"]
    x = x + sd["alpha_attn"].tanh() * seen[:, : x.shape[1]]
    hidden = norm(x, sd, "norm2") @ sd["ff.net.0.proj.weight"].T + sd["ff.net.0.proj.bias"]
    value, gate = hidden.chunk(2, dim=-1)
    value = value * gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
    return x + sd["alpha_dense"].tanh() * (value @ sd["ff.net.2.weight"].T + sd["ff.net.2.bias"])


def objects_of(
    boxes: list[tuple[torch.Tensor, tuple[float, ...]]], sd: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Thirty objects [30, C] after the paper's equation 5; boxes are (text, corners)."""
    made = []
    for number in range(30):
        text = sd["position_net.null_positive_feature"]
        place = sd["position_net.null_position_feature"]
        if number < len(boxes):
            text, corners = boxes[number]
            angles = [100 ** (i / 8) * corner for i in range(8) for corner in corners]
            rows = torch.tensor(angles, dtype=torch.float64).reshape(8, 1, 4)
            place = torch.cat([rows.sin(), rows.cos()], dim=1).flatten()
        value = torch.cat([text.double().flatten(), place])
        for layer in (0, 2, 4):
            name = f"position_net.linears.{layer}"
            value = sd[f"{name}.weight"] @ value + sd[f"{name}.bias"]
            value = value if layer == 4 else value * value.sigmoid()
        made.append(value)
    return torch.stack(made)


@pytest.mark.parametrize("key_dim", [CONTEXT, 768])
def test_layers_and_boxes_follow_the_paper(key_dim: int) -> None:
    width, generator = 64, torch.Generator().manual_seed(1)
    layer = GatedSelfAttentionDense(width, key_dim, 8, 8)
    named = {
        f"middle_block.1.transformer_blocks.0.fuser.{k}": v for k, v in layer.state_dict().items()
    }
    positions = PositionNet(key_dim, key_dim)
    named |= {f"position_net.{k}": v for k, v in positions.state_dict().items()}
    sd = {k: torch.randn(v.shape, generator=generator) * 0.2 for k, v in named.items()}
    network = build_gligen(sd)
    heads = 8 if key_dim == 768 else 1
    texts = torch.randn(2, 1, key_dim, generator=generator)
    boxes = [(texts[0], 4, 6, 1, 2), (texts[1], 8, 8, 0, 8)]  # height, width, y, x of 8 x 16 cells
    x = torch.randn(3, 20, width, generator=generator)
    with torch.inference_mode():
        made = network.set_position((3, 4, 8, 16), boxes, "cpu")(x, {"transformer_index": 0})
    exact = {k.rpartition("fuser.")[2]: v.double() for k, v in sd.items()}
    corners = [(2 / 16, 1 / 8, 8 / 16, 5 / 8), (8 / 16, 0.0, 1.0, 1.0)]
    objects = objects_of(list(zip(texts, corners)), exact).expand(3, -1, -1)
    torch.testing.assert_close(
        made.double(), gated(x.double(), objects, exact, heads), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize(("place", "width"), [(7, 32), (0, 48)])
def test_a_file_for_another_network_is_named(place: int, width: int) -> None:
    patch = build_gligen(weights()).set_empty((1, 4, 8, 8), "cpu")
    words = rf"transformer {place} .* width {width}.*layers of the widths \[32, 64"
    with pytest.raises(ValueError, match=words):
        patch(torch.zeros(1, 4, width), {"transformer_index": place})


def test_too_many_boxes_are_refused_with_both_numbers() -> None:
    sd = {k: v for k, v in weights().items() if "blocks.1.1" not in k and "blocks.2.1" not in k}
    sd = {k: v for k, v in sd.items() if "output_blocks.3" not in k}
    gligen = build_gligen(sd)
    with pytest.raises(ValueError, match=r"31.*30"):
        gligen.set_position((1, 4, 8, 8), [(torch.zeros(CONTEXT), 1, 1, 0, 0)] * 31, "cpu")


def test_other_files_are_refused() -> None:
    with pytest.raises(ValueError, match="GLIGEN"):
        build_gligen({"foo": torch.zeros(1)})


def test_a_text_of_another_width_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=rf"clip: expected texts of width {CONTEXT}, .* found 5"):
        build_gligen(weights()).set_position((1, 4, 8, 8), [(torch.zeros(5), 1, 1, 0, 0)], "cpu")
