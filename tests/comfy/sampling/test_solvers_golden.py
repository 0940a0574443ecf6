"""Every sampler of the menu against recorded runs with a closed-form estimate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.sampling import noise, run, solvers
from tests.comfy.sampling.support import NEGATIVE, POSITIVE, conditioning

SMALL = (1, 4, 8, 8)


WITHIN = 1e-5
"""Three times and more of what is seen of most samplers, on processors that round differently: the
rounding of a latent and of the estimate, amplified by guidance near clean levels."""
AMPLIFIED = {
    # The network's last digit in the estimate at a step's middle or end (sampler_sensitivity.json);
    # of heun's at a level of 0.3 after one of 700, where latents have four digits after the point.
    3.5e-4: ["heun"],
    2e-4: ["dpm_2_ancestral"],
    # Estimates were taken from the noise at a level of 80, where that has as few.
    1.5e-4: ["uni_pc"],
    # A motion that is asked a millionth of a level away, and differences of three estimates.
    1e-4: ["dpmpp_sde", "dpmpp_sde_gpu", "dpmpp_3m_sde", "dpmpp_3m_sde_gpu"],
    # Differences of two estimates.
    8e-5: ["res_multistep_ancestral"],
    6e-5: ["res_multistep_ancestral_cfg_pp"],
    5e-5: [
        "dpm_adaptive", "dpmpp_2m_cfg_pp", "dpmpp_2m_sde_heun", "dpmpp_2m_sde_heun_gpu", "seeds_3",
    ],
    3.5e-5: [
        "dpmpp_2s_ancestral", "dpmpp_2s_ancestral_cfg_pp", "res_multistep_cfg_pp", "seeds_2",
    ],
    2e-5: [
        "ddpm", "deis", "dpmpp_2m", "dpmpp_2m_sde", "dpmpp_2m_sde_gpu", "er_sde",
        "exp_heun_2_x0_sde", "res_multistep", "sa_solver", "sa_solver_pece", "uni_pc_bh2",
    ],
}  # fmt: skip
TOLERANCES = {name: within for within, names in AMPLIFIED.items() for name in names}
ESTIMATES_WITHIN = {"uni_pc": 4e-3}


def tolerance(sampler: str) -> float:
    return TOLERANCES.get(sampler, WITHIN)


@pytest.fixture(scope="module")
def recorded(golden_tensors: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    return golden_tensors("samplers.safetensors")


def start_latent(case: dict[str, Any], key: str, recorded: dict[str, Tensor]) -> Tensor:
    if case["latent"] == "zeros":
        return torch.zeros(SMALL)
    if case["latent"] == "advanced_first final":
        return recorded[key.replace("advanced_second", "advanced_first") + "/final"]
    return recorded["input/latent_image_seed7"]


@pytest.mark.parametrize("sampler", solvers.MENU_NAMES)
def test_a_sampler_repeats_its_recorded_runs(
    sampler: str,
    closed_form: Callable[..., Any],
    recorded: dict[str, Tensor],
    golden_json: Callable[[str], Any],
) -> None:
    cases = {k: c for k, c in golden_json("samplers_meta.json").items() if c["sampler"] == sampler}
    assert cases
    for key, case in cases.items():
        latent = start_latent(case, key, recorded)
        start = torch.zeros(SMALL) if "noise" in case else noise.prepare_noise(latent, case["seed"])
        seen: list[Tensor] = []
        made = run.sample(
            closed_form(case["kind"]), start, case["steps"], case["cfg"], sampler,
            case.get("scheduler") or ("karras" if "eps" in case["kind"] else "simple"),
            conditioning(POSITIVE), conditioning(NEGATIVE), latent,
            denoise=case.get("denoise", 1.0), start_step=case.get("start_step"),
            last_step=case.get("last_step"), force_full_denoise=key.startswith("advanced_full"),
            callback=lambda i, x0, x, total, seen=seen: seen.append(x0[0].clone()),
            disable_pbar=True, seed=case["seed"],
        )  # fmt: skip
        within = {"rtol": 0, "atol": tolerance(sampler)}
        torch.testing.assert_close(made, recorded[f"{key}/final"], msg=key, **within)
        assert len(seen) == case["callbacks"], key
        if f"{key}/x0" in recorded:
            estimates = {"rtol": 0, "atol": ESTIMATES_WITHIN.get(sampler, tolerance(sampler))}
            torch.testing.assert_close(
                torch.stack(seen), recorded[f"{key}/x0"], msg=key, **estimates
            )


def test_the_menu_has_the_recorded_names(spec_folder: Any) -> None:
    import json

    info = json.loads((spec_folder / "object_info.json").read_text(encoding="utf-8"))
    assert list(solvers.MENU_NAMES) == info["KSampler"]["input"]["required"]["sampler_name"][0]


def test_an_unknown_sampler_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown sampler 'eulr'; known: euler, "):
        solvers.find("eulr")
