"""What each guider asks of the model: which lists it evaluates at which scales, in which order, and
as what kind of text the model takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from comfy.sampling import guidance
from comfy_extras import nodes_custom_sampler as nodes
from comfy_extras import nodes_perpneg
from tests.comfy.sampling.support import NEGATIVE, POSITIVE, ClosedFormModel, conditioning, patcher

MIDDLE = [0.3, 0.3, -0.2, 0.7]


class NotingModel(ClosedFormModel):
    """Notes what kind of text an entry is said to be."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[float, str] = {}

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        self.kinds[round(float(kwargs["cross_attn"].flatten()[0]), 3)] = kwargs["prompt_type"]
        return super().extra_conds(**kwargs)


def run_of(guider: Any) -> NotingModel:
    """One step with the guider; gives the model, which has noted the calls."""
    nothing = torch.zeros(1, 4, 3, 3)
    sampler = nodes.KSamplerSelect.execute("euler")[0]
    guider.sample(nothing, nothing, sampler, torch.tensor([2.0, 0.0]), disable_pbar=True, seed=0)
    model: NotingModel = guider.model_patcher.model
    return model


def noting(both_at_one: bool = False) -> Any:
    view = patcher(NotingModel())
    if both_at_one:
        view.disable_model_cfg1_optimization()
    return view


TEXTS = [conditioning(place) for place in (POSITIVE, MIDDLE, NEGATIVE)]
FIRST, SECOND, THIRD = (round(place[0], 3) for place in (POSITIVE, MIDDLE, NEGATIVE))


def basic(model: Any) -> Any:
    return nodes.BasicGuider.execute(model, TEXTS[0])[0]


def plain(cfg: float) -> Callable[[Any], Any]:
    return lambda model: nodes.CFGGuider.execute(model, TEXTS[0], TEXTS[2], cfg)[0]


def dual(first: float, second: float, style: str) -> Callable[[Any], Any]:
    return lambda model: nodes.DualCFGGuider.execute(model, *TEXTS, first, second, style)[0]


def perpendicular(cfg: float) -> Callable[[Any], Any]:
    lists = (TEXTS[0], TEXTS[2], TEXTS[1])
    return lambda model: nodes_perpneg.PerpNegGuider.execute(model, *lists, cfg, 1.0)[0]


CALLS = [
    (basic, [0], [0]),
    (plain(1.0), [0], [1, 0]),
    (plain(1.0 + 1e-10), [0], [1, 0]),
    (plain(0.0), [1, 0], [1, 0]),
    (plain(7.0), [1, 0], [1, 0]),
    (dual(1.0, 1.0, "regular"), [2], [2, 1, 0]),
    (dual(3.0, 1.0, "regular"), [2, 1], [2, 1, 0]),
    (dual(1.0, 3.0, "regular"), [2, 1, 0], [2, 1, 0]),
    (dual(0.0, 0.0, "regular"), [2, 1, 0], [2, 1, 0]),
    (dual(1.0, 1.0, "nested"), [2, 1, 0], [2, 1, 0]),
    (perpendicular(1.0), [2, 1, 0], [2, 1, 0]),
]


@pytest.mark.parametrize("both_at_one", [False, True])
@pytest.mark.parametrize("row", CALLS)
def test_lists_that_cannot_matter_are_left_out_of_the_one_call_of_a_step(
    row: Any, both_at_one: bool
) -> None:
    guider, usual, asked_for = row
    model = run_of(guider(noting(both_at_one)))
    assert [call["cond_or_uncond"] for call in model.calls] == [asked_for if both_at_one else usual]


def test_models_take_all_but_the_positive_list_for_negative_texts() -> None:
    """The SDXL refiner scores them lower; a guider and the node before it must agree."""
    model = run_of(dual(2.0, 3.0, "regular")(noting()))
    assert model.kinds == {FIRST: "positive", SECOND: "negative", THIRD: "negative"}
    model = run_of(perpendicular(3.0)(noting()))
    assert model.kinds == {FIRST: "positive", SECOND: "negative", THIRD: "negative"}
    view = nodes_perpneg.PerpNeg.execute(noting(), TEXTS[1], 1.0)[0]
    guider = guidance.CFGGuider(view)
    guider.set_conds(TEXTS[0], TEXTS[2])
    guider.set_cfg(3.0)
    assert run_of(guider).kinds == model.kinds
