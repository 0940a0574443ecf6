"""Another guidance scale in a part of the sampling: whole runs beside those of other scales."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.patching.wrappers import WrappersMP
from comfy_extras import nodes_cfg
from comfy_extras import nodes_custom_sampler as nodes
from tests.comfy.sampling.support import (
    ClosedFormModel,
    patcher,
)
from tests.comfy_extras.test_guider_lists import basic, dual, perpendicular, plain

SIGMAS = [12.0, 6.0, 3.0, 1.5, 0.7, 0.0]
BOTH, POSITIVE_ONLY = [1, 0], [0]


def percent_of(sigma: float) -> float:
    """Where in the sampling a level lies, just before it."""
    return 1 - float(ClosedFormModel().model_sampling.timestep(torch.tensor(sigma))) / 999 - 1e-3


def override(model: Any, cfg: float, start: float = 0.0, end: float = 1.0) -> Any:
    return nodes_cfg.CFGOverride.execute(model, cfg, start, end)[0]


def run(guider: Any, sigmas: list[float] = SIGMAS) -> Tensor:
    latent = torch.zeros(1, 4, 3, 3)
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(1))
    sampler = nodes.KSamplerSelect.execute("euler")[0]
    made: Tensor = guider.sample(
        noise, latent, sampler, torch.tensor(sigmas), disable_pbar=True, seed=0
    )
    return made


def lists_of(guider: Any) -> list[list[int]]:
    """Which lists each step of a run asks the model for."""
    run(guider)
    return [call["cond_or_uncond"] for call in guider.model_patcher.model.calls]


@pytest.mark.parametrize("make", [plain, perpendicular])
@pytest.mark.parametrize("cfg", [0.0, 1.0, 4.0])
def test_over_all_levels_it_is_the_scale(
    make: Callable[[float], Callable[[Any], Any]], cfg: float
) -> None:
    made = run(make(7.0)(override(patcher(ClosedFormModel()), cfg)))
    assert torch.equal(made, run(make(cfg)(patcher(ClosedFormModel()))))


def test_outside_of_its_levels_the_scale_is_the_guiders() -> None:
    middle = percent_of(6.0), percent_of(1.5)
    model = override(patcher(ClosedFormModel()), 1.0, middle[0], middle[1] + 2e-3)
    guider = plain(7.0)(model)
    assert lists_of(guider) == [BOTH, *[POSITIVE_ONLY] * 3, BOTH]
    assert guider.cfg == 7.0
    early = plain(7.0)(override(patcher(ClosedFormModel()), 2.0, 0.0, percent_of(3.0)))
    for levels, cfg in ((SIGMAS[:3], 2.0), (SIGMAS[2:], 7.0)):
        expected = run(plain(cfg)(patcher(ClosedFormModel())), levels)
        assert torch.equal(run(early, levels), expected)


def test_where_several_overlap_the_one_nearest_the_sampler_counts() -> None:
    half = percent_of(3.0)
    model = override(override(patcher(ClosedFormModel()), 1.0), 5.0, half, 1.0)
    assert lists_of(plain(7.0)(model)) == [*[POSITIVE_ONLY] * 2, *[BOTH] * 3]
    model = override(override(patcher(ClosedFormModel()), 5.0, half, 1.0), 1.0)
    assert lists_of(plain(7.0)(model)) == [POSITIVE_ONLY] * 5


def test_the_model_before_the_node_is_as_it_was() -> None:
    before = patcher(ClosedFormModel())
    override(before, 1.0)
    assert lists_of(plain(7.0)(before)) == [BOTH] * 5


def test_a_run_that_fails_leaves_the_scale() -> None:
    class Failing(ClosedFormModel):
        def apply_model(self, *args: Any, **kwargs: Any) -> Tensor:
            raise OSError("no more")

    guider = plain(7.0)(override(patcher(Failing()), 1.0))
    with pytest.raises(OSError, match="no more"):
        run(guider)
    assert guider.cfg == 7.0


@pytest.mark.parametrize(
    ("make", "reason"),
    [(basic, "no negative conditioning"), (dual(3.0, 2.0, "regular"), "several scales of its own")],
)
def test_guiders_that_it_cannot_act_on_are_left_alone(
    make: Callable[[Any], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    plainly = run(make(patcher(ClosedFormModel())))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(run(make(override(patcher(ClosedFormModel()), 5.0))), plainly)
    assert [reason in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("override_first", [False, True])
def test_nodes_that_ask_for_the_scale_are_told_this_one(override_first: bool) -> None:
    asked: list[float] = []

    def asking(executor: Any, *args: Any) -> Tensor:
        asked.append(executor.class_obj.cfg)
        result: Tensor = executor(*args)
        return result

    model = patcher(ClosedFormModel())
    if override_first:
        model = override(model, 2.0, percent_of(3.0), 1.0)
    model = model.clone()
    model.add_wrapper(WrappersMP.PREDICT_NOISE, asking)
    if not override_first:
        model = override(model, 2.0, percent_of(3.0), 1.0)
    run(plain(7.0)(model))
    assert asked == [7.0, 7.0, 2.0, 2.0, 2.0]
