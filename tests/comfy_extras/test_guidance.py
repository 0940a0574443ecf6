"""Guidance nodes give the recorded estimates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.sampling import conditioning, guidance
from comfy_extras import (
    nodes_apg,
    nodes_cfg,
    nodes_eps,
    nodes_fresca,
    nodes_mahiro,
    nodes_model_advanced,
    nodes_perpneg,
    nodes_tcfg,
)
from tests.comfy.sampling.support import CPU, assert_same_but_rounding, patcher
from tests.comfy.sampling.test_cfg_conditioning import AttentionModel

CASES: dict[str, Callable[[Any, Any], Any]] = {
    "RescaleCFG/0.7": lambda m, _e: nodes_model_advanced.RescaleCFG().patch(m, 0.7),
    "RescaleCFG/1.0": lambda m, _e: nodes_model_advanced.RescaleCFG().patch(m, 1.0),
    "CFGZeroStar": lambda m, _e: nodes_cfg.CFGZeroStar.execute(m),
    "CFGNorm/1.0": lambda m, _e: nodes_cfg.CFGNorm.execute(m, 1.0),
    "CFGNorm/0.5": lambda m, _e: nodes_cfg.CFGNorm.execute(m, 0.5),
    "APG/eta1.0/norm5.0/momentum0.0": lambda m, _e: nodes_apg.APG.execute(m, 1.0, 5.0, 0.0),
    "APG/eta0.0/norm2.5/momentum-0.5": lambda m, _e: nodes_apg.APG.execute(m, 0.0, 2.5, -0.5),
    "APG/eta0.3/norm0.0/momentum0.0": lambda m, _e: nodes_apg.APG.execute(m, 0.3, 0.0, 0.0),
    "Mahiro": lambda m, _e: nodes_mahiro.Mahiro.execute(m),
    "TCFG": lambda m, _e: nodes_tcfg.TCFG.execute(m),
    "FreSca/low1.0/high1.25/cut4": lambda m, _e: nodes_fresca.FreSca.execute(m, 1.0, 1.25, 4),
    "FreSca/low0.7/high1.5/cut20": lambda m, _e: nodes_fresca.FreSca.execute(m, 0.7, 1.5, 20),
    "EpsilonScaling/1.005": lambda m, _e: nodes_eps.EpsilonScaling.execute(m, 1.005),
    "PerpNeg/1.0": lambda m, e: nodes_perpneg.PerpNeg.execute(m, e, 1.0),
}


@pytest.fixture(scope="module")
def recorded(golden_tensors: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    return golden_tensors("cfg_conditioning.safetensors")


@pytest.mark.parametrize("sigma", [5.0, 0.5])
@pytest.mark.parametrize("case", CASES)
def test_guidance_nodes(
    case: str, sigma: float, recorded: dict[str, Tensor], golden_json: Callable[[str], Any]
) -> None:
    facts = golden_json("cfg_conditioning_meta.json")[f"node/{case}/sigma{sigma}"]
    empty = None if facts["empty"] is None else [[recorded[f"in/ctx/{facts['empty']}"], {}]]
    model = AttentionModel()
    view = CASES[case](patcher(model), empty)[0]
    lists = {
        name: conditioning.convert_cond([[recorded[f"in/ctx/{text}"], {}]])
        for name, text in (("positive", "pos77"), ("negative", "neg77"))
    }
    x = recorded["in/x"]
    lists = conditioning.process_conds(model, x, lists, CPU)
    levels = torch.full((x.shape[0],), sigma)
    made = guidance.sampling_function(
        model, x, levels, lists["negative"], lists["positive"], facts["cfg"], view.model_options
    )
    expected = recorded[f"node/{case}/sigma{sigma}/denoised"]
    # A scale of 7.5 amplifies it. The recorded singular vectors of TCFG are those of other
    # processor instructions, far off in the first number of each item; with the same ones
    # (MKL_CBWR=COMPATIBLE) 1e-6 is met.
    assert_same_but_rounding(made, expected, 1e-4 if case == "TCFG" else 5e-6)


def test_the_negative_score_is_the_first_row_that_is_decomposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the other order TCFG keeps 3 % of the recorded numbers bit by bit, so 82 %."""
    seen: list[Tensor] = []
    decompose = torch.linalg.svd

    def noting(matrix: Tensor, **options: Any) -> Any:
        seen.append(matrix)
        return decompose(matrix, **options)

    monkeypatch.setattr(torch.linalg, "svd", noting)
    positive, negative = torch.rand(2, 4, 3, 3), torch.rand(2, 4, 3, 3)
    nodes_tcfg.score_tangential_damping(positive, negative)
    assert torch.equal(seen[0], torch.stack([negative.flatten(1), positive.flatten(1)], dim=1))


def test_momentum_starts_anew_with_the_next_run() -> None:
    memory = nodes_apg.Momentum(0.5)
    one = torch.ones(1)
    assert memory.add(one, 10.0) == 1.0
    assert memory.add(one, 5.0) == 1.5
    assert memory.add(one, 10.0) == 1.0


def test_rescaling_the_score_by_one_changes_nothing() -> None:
    view = nodes_eps.TemporalScoreRescaling.execute(patcher(AttentionModel()), 1.0, 1.0)[0]
    (change,) = view.model_options["sampler_post_cfg_function"]
    x, denoised = torch.ones(1, 4, 2, 2), torch.zeros(1, 4, 2, 2)
    facts = {"input": x, "denoised": denoised, "sigma": torch.tensor([1.0])}
    assert change(facts) is denoised
    view = nodes_eps.TemporalScoreRescaling.execute(patcher(AttentionModel()), 2.0, 1.0)[0]
    (change,) = view.model_options["sampler_post_cfg_function"]
    # At sigma 1, signal 1: ratio (1 + 1) / (1 / 2 + 1) = 4 / 3 of the way from x to the estimate.
    torch.testing.assert_close(change(facts), x * (1 - 4 / 3))
