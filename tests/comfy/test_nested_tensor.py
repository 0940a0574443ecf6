"""What a latent of several kinds says where one of a single kind is expected."""

from __future__ import annotations

import copy

import pytest
import torch

from comfy.nested_tensor import NestedTensor


def test_a_node_that_takes_one_kind_is_told_to_take_them_apart() -> None:
    both = NestedTensor([torch.zeros(1, 4, 2, 2, 2), torch.zeros(1, 4, 8)])
    with pytest.raises(AttributeError, match="'movedim': expected the latent of one kind"):
        both.movedim(0, 1)
    assert not hasattr(both, "device_mesh")


def test_it_can_be_copied() -> None:
    both = NestedTensor([torch.ones(1), torch.zeros(2)])
    assert [part.shape for part in copy.deepcopy(both).tensors] == [(1,), (2,)]
