"""T5 and UMT5 encoders against recorded tiny networks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comfy.ldm.t5.model import T5, T5Config, distance_buckets
from tests.support.golden_nets import assert_close_to_golden, read_golden_net


@pytest.mark.parametrize("name", ["t5_gated_gelu", "t5_relu", "umt5_gated_gelu"])
@torch.inference_mode()
def test_encoders_agree_with_the_reference(name: str, golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / f"text_encoders/{name}.safetensors")
    model = T5(net.constructor, torch.float32)
    model.load_state_dict(net.weights)
    given = net.inputs
    last, between = model(given["ids"], intermediate_output=-2)
    assert_close_to_golden(last, net.outputs["last_nomask"])
    assert_close_to_golden(between, net.outputs["intermediate_-2"])
    assert_close_to_golden(model(given["ids"], given["mask"])[0], net.outputs["last_mask"])
    assert_close_to_golden(model(given["ids_long"])[0], net.outputs["last_long150"])


def test_near_distances_have_a_bucket_each_and_far_ones_share() -> None:
    assert distance_buckets(torch.tensor([0, -1, -7, 1, 7])).tolist() == [0, 1, 7, 17, 23]
    assert distance_buckets(torch.tensor([-127, -128, -5000, 5000])).tolist() == [15, 15, 15, 31]


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'swish'.*relu"):
        T5Config(dense_act_fn="swish")
