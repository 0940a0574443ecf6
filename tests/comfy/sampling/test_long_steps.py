"""Steps so long that nothing of the old noise is left: the limit of every formula with noise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.sampling import noise_levels, solvers

ESTIMATE = 0.3
NOISY = [
    "euler_ancestral", "euler_ancestral_cfg_pp", "dpm_2_ancestral", "dpmpp_2s_ancestral",
    "dpmpp_2s_ancestral_cfg_pp", "res_multistep_ancestral", "res_multistep_ancestral_cfg_pp",
    "ddpm", "lcm", "dpmpp_sde", "dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_3m_sde", "seeds_2",
    "seeds_3", "exp_heun_2_x0_sde",
]  # fmt: skip
# These take levels of flow models for variance-exploding ones, as pictures have it.
EXPLODING_ONLY = (
    "ddpm", "dpmpp_2s_ancestral_cfg_pp", "res_multistep_ancestral",
    "res_multistep_ancestral_cfg_pp",
)  # fmt: skip


# These leave the estimate alone on variance-exploding levels, as pictures have it.
WITHOUT_NOISE = ("euler_ancestral", "dpm_2_ancestral")


class Constant:
    """A model whose estimate never changes, on levels of one kind of sampling."""

    def __init__(self, kind: str) -> None:
        sampling = noise_levels.build_model_sampling(kind)
        self.inner_model = SimpleNamespace(inner_model=SimpleNamespace(model_sampling=sampling))

    def __call__(self, x: Tensor, sigma: Tensor, model_options: Any = None, **kw: Any) -> Tensor:
        denoised = torch.full_like(x, ESTIMATE)
        for hook in (model_options or {}).get("sampler_post_cfg_function", ()):
            hook({"denoised": denoised, "uncond_denoised": denoised})
        return denoised


def after(name: str, kind: str, levels: list[float], **options: Any) -> Tensor:
    x = torch.full((1, 1, 2, 2), levels[0])
    return solvers.find(name).function(
        Constant(kind), x, torch.tensor(levels), extra_args={"seed": 1}, disable=True,
        noise_sampler=lambda sigma, sigma_next: torch.ones_like(x), **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("sigma_next", [1.0, 0.03])
def test_the_estimate_is_left_with_fresh_noise(name: str, sigma_next: float) -> None:
    # Stages share a noise of ones, which adds up to a little more than one.
    made = after(name, "EPS", [1e12, sigma_next])
    fresh = 0.0 if name in WITHOUT_NOISE else sigma_next
    torch.testing.assert_close(made, torch.full_like(made, ESTIMATE + fresh), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", [name for name in NOISY if name not in EXPLODING_ONLY])
def test_on_a_flow_model_too(name: str) -> None:
    made = after(name, "FLOW", [1.0, 0.001])
    torch.testing.assert_close(
        made, torch.full_like(made, 0.999 * ESTIMATE + 0.001), rtol=2e-3, atol=0
    )


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("kind", ["EPS", "FLOW"])
@pytest.mark.parametrize("levels", [[1.0, 0.0], [1.0, 1e-5, 0.0], [1.0, 1.0, 0.0]])
def test_a_last_step_leaves_the_estimate(name: str, kind: str, levels: list[float]) -> None:
    made = after(name, kind, levels)
    torch.testing.assert_close(made, torch.full_like(made, ESTIMATE))
