"""Solvers with options the menu does not offer, through the custom-sampler path."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.sampling import noise, run, samplers
from comfy.sampling.solvers import er_sde, sa_solver, upscale
from tests.comfy.sampling.support import NEGATIVE, POSITIVE, conditioning

SIMPLE = {
    "SamplerDPMPP_3M_SDE": ("dpmpp_3m_sde", ()),
    "SamplerDPMPP_SDE": ("dpmpp_sde", ("r",)),
    "SamplerDPMPP_2S_Ancestral": ("dpmpp_2s_ancestral", ()),
    "SamplerEulerAncestral": ("euler_ancestral", ()),
    "SamplerEulerAncestralCFGPP": ("euler_ancestral_cfg_pp", ()),
}


WITHIN = 1.2e-5
"""Three times and more of what is seen of most cases, on processors that round differently: the
rounding of a latent, amplified."""
AMPLIFIED = {
    # The next step's length hangs on the error of the last; of the estimates on the way too.
    "/p0.2/i0.8/d0.1/": (1e-4, 8e-3),
    "eps_sd15/SamplerDPMAdaptative/order3/rtol0.05/atol0.0078/h0.05/p0.0/i1.0/d0.0/safety0.81/eta0.5":
        (2e-3, 2.5e-3),
    "SamplerDPMAdaptative/order3/": (2.5e-5, 4e-5),
    "SamplerDPMPP_SDE/": (2.5e-5, 2.5e-5),
}  # fmt: skip
"""Part of a key: tolerance of the result, of the estimates on the way."""


def tolerances(key: str) -> tuple[float, float]:
    return next((within for part, within in AMPLIFIED.items() if part in key), (WITHIN, WITHIN))


@pytest.fixture(scope="module")
def recorded(golden_tensors: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    return golden_tensors("sampler_nodes.safetensors")


def named_numbers(parts: list[str]) -> dict[str, float]:
    found = (re.fullmatch(r"([a-z_]+?)(-?[\d.]+)", part) for part in parts)
    return {match[1]: float(match[2]) for match in found if match}


def er_sde_options(kind: str, numbers: dict[str, float]) -> dict[str, Any]:
    eta, s_noise = numbers["eta"], numbers["s_noise"]
    if kind == "ODE":
        eta = s_noise = 0.0
    reverse: Callable[[Tensor], Tensor] = lambda level: level ** (eta + 1)  # noqa: E731
    scaler = er_sde.default_noise_scaler if kind == "ER-SDE" else reverse
    stage = int(numbers["max_stage"])
    return {"s_noise": s_noise, "noise_scaler": scaler, "max_stage": stage}


def build(case: dict[str, Any], model: Any) -> samplers.KSAMPLER:
    if "sampler" in case:
        return samplers.ksampler(case["sampler"], case["options"])
    node, *parts = case["node"].split("/")
    numbers = named_numbers(parts)
    shared = {name: numbers[name] for name in ("eta", "s_noise") if name in numbers}
    if node in SIMPLE:
        name, more = SIMPLE[node]
        return samplers.ksampler(name, {**shared, **{key: numbers[key] for key in more}})
    if node == "SamplerDPMPP_2M_SDE":
        return samplers.ksampler("dpmpp_2m_sde", {**shared, "solver_type": parts[0]})
    if node == "SamplerSEEDS2":
        options = {**shared, "solver_type": parts[0], "r": numbers["r"]}
        return samplers.ksampler("seeds_2", options)
    if node == "SamplerLMS":
        return samplers.ksampler("lms", {"order": int(numbers["order"])})
    if node == "SamplerDPMAdaptative":
        names = {"p": "pcoeff", "i": "icoeff", "d": "dcoeff", "h": "h_init"}
        names |= {"safety": "accept_safety", "rtol": "rtol", "atol": "atol"}
        options = {names[key]: numbers[key] for key in names}
        options["order"] = int(numbers["order"])
        return samplers.ksampler("dpm_adaptive", {**shared, **options})
    if node == "SamplerER_SDE":
        return samplers.ksampler("er_sde", er_sde_options(parts[0], numbers))
    if node == "SamplerSASolver":
        to_sigma = model.get_model_object("model_sampling").percent_to_sigma
        tau = sa_solver.get_tau_interval_func(
            to_sigma(numbers["start"]), to_sigma(numbers["end"]), numbers["eta"]
        )
        options = {
            "tau_func": tau, "s_noise": numbers["s_noise"],
            "predictor_order": int(numbers["pred"]), "corrector_order": int(numbers["corr"]),
            "use_pece": bool(numbers["pece"]), "simple_order_2": parts[-1].endswith("21"),
        }  # fmt: skip
        return samplers.ksampler("sa_solver", options)
    if node == "SamplerEulerCFGpp":
        if parts[0] == "alternative":
            return samplers.KSAMPLER(upscale.sample_euler_pp)
        return samplers.ksampler("euler_cfg_pp")
    assert node == "SamplerLCMUpscale", node
    steps = int(numbers["steps"])
    options = {
        "total_upscale": numbers["ratio"],
        "upscale_steps": None if steps < 0 else steps,
        "upscale_method": parts[-1],
    }
    return samplers.KSAMPLER(upscale.sample_lcm_upscale, options)


def test_options_repeat_their_recorded_runs(
    closed_form: Callable[..., Any],
    recorded: dict[str, Tensor],
    golden_json: Callable[[str], Any],
) -> None:
    compared = 0
    for key, case in golden_json("sampler_nodes_meta.json").items():
        if "node" not in case and "sampler" not in case:
            continue
        model, latent, steps = closed_form(case["kind"]), torch.zeros(1, 4, 8, 8), []
        made = run.sample_custom(
            model, noise.prepare_noise(latent, 42), 3.0, build(case, model),
            recorded[f"sigmas/{case['kind']}"], conditioning(POSITIVE), conditioning(NEGATIVE),
            latent, disable_pbar=True,
            callback=lambda i, x0, x, total, steps=steps: steps.append(x0[0].clone()),
            seed=42,
        )  # fmt: skip
        within, on_the_way = tolerances(key)
        torch.testing.assert_close(made, recorded[f"{key}/final"], rtol=0, atol=within, msg=key)
        assert len(steps) == case["callbacks"], key
        if f"{key}/x0" in recorded:
            estimates = recorded[f"{key}/x0"]
            torch.testing.assert_close(
                torch.stack(steps), estimates, rtol=0, atol=on_the_way, msg=key
            )
        compared += 1
    assert compared > 100
