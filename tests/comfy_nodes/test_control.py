"""Nodes chain control networks without touching the conditioning they are given."""

from __future__ import annotations

import pytest
import torch

from comfy.control.base import ControlBase
from comfy.control.networks import ControlNet
from comfy_extras.nodes_controlnet import SetUnionControlNetType
from comfy_nodes.control import ControlNetApply, ControlNetApplyAdvanced

IMAGE = torch.rand(1, 8, 10, 3)


def test_a_second_network_is_chained_behind_the_first() -> None:
    given = [[torch.zeros(1, 1), {"pooled_output": None}]]
    (once,) = ControlNetApply().apply_controlnet(given, ControlBase(), IMAGE, 0.5)
    (twice,) = ControlNetApply().apply_controlnet(once, ControlBase(), IMAGE, 0.7)
    assert "control" not in given[0][1]
    control = twice[0][1]["control"]
    assert (control.strength, control.previous_controlnet.strength) == (0.7, 0.5)
    assert control.cond_hint_original.shape == (1, 3, 8, 10)
    assert twice[0][1]["control_apply_to_uncond"] is True


def test_both_conditionings_share_one_link() -> None:
    positive, negative = [[torch.zeros(1, 1), {}]], [[torch.zeros(1, 1), {}]]
    node = ControlNetApplyAdvanced()
    p, n = node.apply_controlnet(positive, negative, ControlBase(), IMAGE, 1.0, 0.2, 0.8)
    assert p[0][1]["control"] is n[0][1]["control"]
    assert p[0][1]["control"].timestep_percent_range == (0.2, 0.8)
    assert p[0][1]["control_apply_to_uncond"] is False


def test_strength_zero_leaves_the_conditioning_as_it_is() -> None:
    given = [[torch.zeros(1, 1), {}]]
    assert ControlNetApply().apply_controlnet(given, ControlBase(), IMAGE, 0.0)[0] is given


@pytest.mark.parametrize(("kind", "expected"), [("auto", []), ("depth", [1]), ("repaint", [7])])
def test_a_union_network_is_told_the_kind_of_hint(kind: str, expected: list[int]) -> None:
    control = ControlBase()
    changed = SetUnionControlNetType.execute(control, kind).args[0]
    assert changed.extra_args["control_type"] == expected
    assert control.extra_args == {}


def test_a_kind_told_to_a_network_of_one_kind_is_said_to_do_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    SetUnionControlNetType.execute(ControlNet(torch.nn.Identity()), "auto")
    assert not caplog.records
    SetUnionControlNetType.execute(ControlNet(torch.nn.Identity()), "depth")
    assert "no union ControlNet" in caplog.text
