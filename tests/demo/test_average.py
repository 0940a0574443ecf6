"""Averaging the weights of several runs."""

import torch

from tools.demo_model.average import mean_weights


def test_each_tensor_is_the_mean_of_its_namesakes() -> None:
    states = [{"w": torch.tensor([0.0, 4.0])}, {"w": torch.tensor([2.0, 0.0])}]
    assert mean_weights(states)["w"].tolist() == [1.0, 2.0]
