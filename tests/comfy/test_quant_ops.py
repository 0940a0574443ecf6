"""Kernels that packs ask for under the name of another package's."""

from __future__ import annotations

import torch

from comfy import quant_ops

# What comfy-kitchen 0.2.40 (Apache-2.0) gives for these inputs.
TURNED = (
    [0.0, -0.08756444, 0.63198680, 2.52414060, -0.21320041, -0.16370744, 0.75381553, 2.90485549],
    [-0.05710725, -0.37310073, -1.61803865, -4.15740776, -0.01142144, -0.49492955, -1.96829653,
     -4.79700947],
)  # fmt: skip


def inputs(device: str = "cpu") -> list[torch.Tensor]:
    q = (torch.arange(8.0, device=device) / 4 - 1).reshape(1, 1, 1, 8)
    rotations = (torch.arange(16.0, device=device) / 8).reshape(1, 1, 1, 4, 2, 2)
    return [q, q.flip(-1), rotations, torch.linspace(0.5, 1.5, 8, device=device)]


def test_heads_are_normed_and_turned_as_the_package_does_it() -> None:
    for got, wanted in zip(quant_ops.rms_rope_split_half(*inputs()), TURNED):
        torch.testing.assert_close(got.flatten(), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


def test_only_the_first_channels_turn_where_that_is_asked() -> None:
    q, k, rotations, scale = inputs()
    whole = quant_ops.rms_rope_split_half(q, k, rotations[..., :2, :, :], scale, rot_dim=4)[0]
    plain = torch.nn.functional.rms_norm(q, (8,), scale, 1e-6)
    assert torch.equal(whole[..., 4:], plain[..., 4:])
    assert not torch.equal(whole[..., :4], plain[..., :4])


def test_the_one_in_place_writes_where_it_reads() -> None:
    q, k, rotations, scale = inputs()
    made = quant_ops.rms_rope_split_half(q, k, rotations, scale)
    again = quant_ops.rms_rope_split_half_(q, k, rotations, scale)
    assert again[0] is q
    assert torch.equal(q, made[0])
    assert torch.equal(k, made[1])


def test_the_name_of_the_package_has_the_functions() -> None:
    from comfy.quant_ops import ck

    assert callable(ck.rms_rope_split_half)
    assert callable(ck.rms_rope_split_half_)
