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


WITHIN = 2.5e-5
"""Three to four times what is seen of most samplers: the rounding of a latent and of the estimate,
amplified by guidance near clean levels."""
AMPLIFIED = {
    # The network's last digit in the estimate at the midpoint (sampler_sensitivity.json) ...
    "dpm_2_ancestral": 2e-4, "heun": 8e-5, "res_multistep_ancestral": 8e-5,
    "res_multistep_ancestral_cfg_pp": 6e-5, "dpmpp_2m_cfg_pp": 5e-5, "ipndm_v": 4e-5,
    "dpmpp_2m_sde_heun": 4e-5, "dpmpp_2m_sde_heun_gpu": 4e-5, "seeds_3": 5e-5,
    "res_multistep_cfg_pp": 4e-5, "dpm_adaptive": 4e-5,
    # ... in the difference of three estimates ...
    "dpmpp_3m_sde": 1e-4, "dpmpp_3m_sde_gpu": 1e-4,
    # ... and of a motion that is asked a millionth of a level away.
    "dpmpp_sde": 5e-5, "dpmpp_sde_gpu": 5e-5,
    # Estimates were taken from the noise at a level of 80, where that has four digits after the
    # point.
    "uni_pc": 1.5e-4,
}  # fmt: skip
ESTIMATES_WITHIN = {"uni_pc": 4e-3}


def tolerance(sampler: str) -> float:
    return AMPLIFIED.get(sampler, WITHIN)


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
