"""Levels at which solvers ask for estimates, and those they are given twice or too low."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.sampling import schedules, solvers
from tests.comfy.sampling.support import EDM, SD3, SMALL, Guided


def asked_levels(name: str, kind: tuple[str, dict[str, Any]], sigmas: Tensor) -> Tensor:
    """Levels at which a solver asks for estimates."""
    model, asked = Guided(*kind), []

    class Listening:
        inner_model = model.inner_model

        def __call__(self, x: Tensor, sigma: Tensor, **kwargs: Any) -> Tensor:
            asked.append(sigma[0])
            return model(x, sigma)

    solvers.find(name).function(
        Listening(), torch.randn(SMALL), sigmas, disable=True, extra_args={"seed": 1}
    )
    return torch.stack(asked)


@pytest.mark.parametrize("kind", [SD3, EDM])
@pytest.mark.parametrize("name", ["exp_heun_2_x0", "exp_heun_2_x0_sde"])
def test_a_stage_at_the_end_of_a_step_is_asked_at_the_level_of_its_half_log_snr(
    name: str, kind: tuple[str, dict[str, Any]]
) -> None:
    """Often the next digit: a mask with a threshold in time then takes in other cells."""
    model = Guided(*kind)
    sigmas = schedules.calculate_sigmas(model.sampling, "kl_optimal", 12)[1:-1]
    lambdas = model.half_log_snr(sigmas)
    ends = (-lambdas).sigmoid() if model.flow else (-lambdas).exp()
    assert not torch.equal(ends, sigmas)
    expected = torch.stack([sigmas[:-1], ends[1:]], dim=1).flatten()
    assert torch.equal(asked_levels(name, kind, sigmas), expected)


def test_halfway_in_a_step_of_a_flow_is_a_level_of_single_precision() -> None:
    sigmas = schedules.calculate_sigmas(Guided(*SD3).sampling, "simple", 12)[1:]
    expected = []
    for sigma, after in pairwise(sigmas[:-1]):
        down = after * (1 + (after / sigma - 1))
        start, end = (((1 - level) / level).log() for level in (sigma, down))
        expected += [sigma, ((start + (end - start) / 2).exp() + 1) ** -1]
    expected.append(sigmas[-2])
    assert torch.equal(asked_levels("dpmpp_2s_ancestral", SD3, sigmas), torch.stack(expected))


@pytest.mark.parametrize("name", ["res_multistep_ancestral", "res_multistep_ancestral_cfg_pp"])
def test_a_level_given_twice_draws_but_does_not_move(name: str) -> None:
    def run(levels: list[float]) -> tuple[Tensor, int]:
        drawn: list[float] = []

        def draw(sigma: Tensor, sigma_next: Tensor) -> Tensor:
            drawn.append(float(sigma))
            return torch.full(SMALL, 0.1 if sigma == sigma_next else 1.0)

        def model(x: Tensor, sigma: Tensor, model_options: Any = None, **kwargs: Any) -> Tensor:
            denoised = x / (1 + sigma.reshape(-1, 1, 1, 1) ** 2)
            for hook in (model_options or {}).get("sampler_post_cfg_function", ()):
                hook({"denoised": denoised, "uncond_denoised": denoised})
            return denoised

        made = solvers.find(name).function(
            model, torch.full(SMALL, 9.0), torch.tensor(levels), disable=True, noise_sampler=draw
        )
        return made, len(drawn)

    plain, draws = run([9.0, 4.0, 1.0, 0.2, 0.0])
    twice, more = run([9.0, 9.0, 4.0, 1.0, 1.0, 0.2, 0.0])
    torch.testing.assert_close(twice, plain)
    assert (draws, more) == (3, 5)


@pytest.mark.parametrize(
    ("before", "end"), [(0.03, 1e-3), (1.5e-3, 1e-3), (4e-4, 1e-3), (1e-4, 5e-5)]
)
def test_uni_pc_ends_at_a_thousandth(before: float, end: float) -> None:
    sigmas = torch.tensor([1.0, 0.2, before, 0.0])
    solvers.find("uni_pc").function(
        lambda x, sigma: x * 0.5, torch.ones(SMALL), sigmas, disable=True
    )
    assert sigmas[-1].item() == pytest.approx(end)
