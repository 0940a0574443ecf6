"""Convolution weights change their layout, not their values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from comfy.weights.assign import assign_weights
from comfy.weights.layout import arrange_convolutions


@pytest.mark.parametrize("device", ["cpu"])
def test_weights_become_channels_last_and_stay_equal(device: str) -> None:
    network = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 1), nn.Linear(4, 4))
    before = {key: value.clone() for key, value in network.state_dict().items()}
    arrange_convolutions(network, device)
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert network.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_weights_of_a_file_come_into_the_layout_as_they_are_converted(dtype: torch.dtype) -> None:
    network = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 1)).to("meta")
    weights = {k: torch.randn(v.shape).to(dtype) for k, v in network.state_dict().items()}
    arrange_convolutions(network, "cpu")
    assert assign_weights(network, weights).missing == ()
    kernel = network[0].weight
    assert kernel.is_contiguous(memory_format=torch.channels_last)
    assert not kernel.is_contiguous()
    for key, value in network.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, weights[key].float())
    pointer = kernel.data_ptr()
    arrange_convolutions(network, "cpu")
    assert network[0].weight.data_ptr() == pointer
