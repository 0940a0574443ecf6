"""What a control network adds to a picture does not depend on what shares its call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comfy.control.base import ControlBase
from comfy.control.networks import ControlNet, T2IAdapter
from comfy.sampling import noise_levels

CPU = torch.device("cpu")


class MeanOfHint(nn.Module):
    """Residuals that say which hint they come from, after a ControlNet's or an adapter's manner."""

    dtype = torch.float32
    unshuffle_amount = 8

    def forward(self, x: Tensor, hint: Tensor | None = None, **kwargs: Any) -> dict[str, list]:
        shown = (x if hint is None else hint).mean(dim=(1, 2, 3), keepdim=True)
        return {"input": [None, shown], "middle": [2 * shown], "output": []}


def links(kind: str, values: list[float]) -> ControlBase:
    """A control network with a hint for each value."""
    network = MeanOfHint()
    control: Any
    if kind == "adapter":
        control = T2IAdapter(network, 3, 8, "nearest-exact", device=CPU)
    else:
        control = ControlNet(network, load_device=CPU)
        control.model_sampling_current = noise_levels.build_model_sampling("EPS", None)
    hints = torch.tensor(values).reshape(-1, 1, 1, 1).expand(-1, 3, 40, 24)
    return control.set_cond_hint(hints)


def shown(control: ControlBase, pictures: int, conds: int, size: int = 4) -> list[float]:
    """The hint that each item of a call sees."""
    x = torch.zeros(pictures * conds, 4, size, size)
    made = control.get_control(x, torch.ones(len(x)), {"c_crossattn": x}, conds, {})
    assert made is not None
    assert made["input"][0] is None
    seen = made["input"][1]
    assert torch.equal(made["middle"][0], 2 * seen)
    return (seen + torch.zeros(len(x), 1, 1, 1)).flatten().tolist()


@pytest.mark.parametrize("kind", ["network", "adapter"])
@pytest.mark.parametrize(
    ("hints", "pictures", "expected"),
    [
        ([0.25], 2, [0.25, 0.25]),
        ([0.25, 0.5], 1, [0.25]),
        ([0.25, 0.5], 2, [0.25, 0.5]),
        ([0.25, 0.5], 3, [0.25, 0.5, 0.25]),
        ([0.25, 0.5, 1.0, 0.75], 2, [0.25, 0.5]),
    ],
)
def test_each_picture_sees_its_hint_whatever_the_calls(
    kind: str, hints: list[float], pictures: int, expected: list[float]
) -> None:
    control = links(kind, hints)
    for conds, size in ((2, 4), (1, 4), (3, 4), (2, 6), (1, 4)):  # sizes change with areas
        assert shown(control, pictures, conds, size) == expected * conds


@pytest.mark.parametrize("earlier", ["network", "adapter"])
def test_a_chain_mixes_kinds_and_numbers_of_hints(earlier: str) -> None:
    last = links("adapter" if earlier == "network" else "network", [0.25])
    last.set_previous_controlnet(links(earlier, [0.5, 0.75]))
    for conds in (1, 2):
        assert shown(last, 2, conds) == [0.75, 1.0] * conds
