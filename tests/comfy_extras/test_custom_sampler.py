"""Runs put together from nodes repeat the recorded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy_extras import nodes_advanced_samplers as advanced
from comfy_extras import nodes_custom_sampler as nodes
from tests.comfy.sampling.support import (
    NEGATIVE,
    POSITIVE,
    ClosedFormModel,
    conditioning,
    patcher,
)

KINDS = ("eps_sd15", "sd3_shift3")
SECOND = [0.3, 0.3, -0.4, 0.1]
WITHIN = 2.5e-5  # of the final latent; the step size of the adaptive solver amplifies more


@pytest.fixture(scope="module")
def recorded(golden_tensors: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    return golden_tensors("sampler_nodes.safetensors")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(kind: str, golden_json: Callable[[str], Any]) -> Any:
    row = golden_json("schedules_meta.json")["kind_definition"][kind]
    return patcher(ClosedFormModel(row["sampling_type"], row["sampling_settings"]))


def empty() -> dict[str, Tensor]:
    return {"samples": torch.zeros(1, 4, 8, 8)}


def first(output: Any) -> Any:
    return output[0]


SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "SamplerDPMPP_2M_SDE/heun/eta0.6/s_noise0.9": lambda _m: nodes.SamplerDPMPP_2M_SDE.execute(
        "heun", 0.6, 0.9, "cpu"
    ),
    "SamplerDPMPP_3M_SDE/eta0.6/s_noise0.9": lambda _m: nodes.SamplerDPMPP_3M_SDE.execute(
        0.6, 0.9, "gpu"
    ),
    "SamplerDPMPP_SDE/eta0.6/s_noise0.9/r0.8": lambda _m: nodes.SamplerDPMPP_SDE.execute(
        0.6, 0.9, 0.8, "cpu"
    ),
    "SamplerDPMPP_2S_Ancestral/eta0.6/s_noise0.9": lambda _m: (
        nodes.SamplerDPMPP_2S_Ancestral.execute(0.6, 0.9)
    ),
    "SamplerEulerAncestral/eta0.6/s_noise0.9": lambda _m: nodes.SamplerEulerAncestral.execute(
        0.6, 0.9
    ),
    "SamplerEulerAncestralCFGPP/eta0.6/s_noise0.9": lambda _m: (
        nodes.SamplerEulerAncestralCFGPP.execute(0.6, 0.9)
    ),
    "SamplerLMS/order3": lambda _m: nodes.SamplerLMS.execute(3),
    "SamplerER_SDE/ER-SDE/max_stage2/eta0.8/s_noise0.9": lambda _m: nodes.SamplerER_SDE.execute(
        "ER-SDE", 2, 0.8, 0.9
    ),
    "SamplerER_SDE/Reverse-time SDE/max_stage3/eta0.8/s_noise0.9": lambda _m: (
        nodes.SamplerER_SDE.execute("Reverse-time SDE", 3, 0.8, 0.9)
    ),
    "SamplerER_SDE/ODE/max_stage1/eta0.8/s_noise0.9": lambda _m: nodes.SamplerER_SDE.execute(
        "ODE", 1, 0.8, 0.9
    ),
    "SamplerSASolver/eta0.7/start0.1/end0.9/s_noise0.9/pred2/corr0/pece0/simple21": lambda m: (
        nodes.SamplerSASolver.execute(m, 0.7, 0.1, 0.9, 0.9, 2, 0, False, True)
    ),
    "SamplerSEEDS2/phi_2/eta0.6/s_noise0.9/r0.8": lambda _m: nodes.SamplerSEEDS2.execute(
        "phi_2", 0.6, 0.9, 0.8
    ),
    "SamplerEulerCFGpp/regular": lambda _m: advanced.SamplerEulerCFGpp.execute("regular"),
    "SamplerEulerCFGpp/alternative": lambda _m: advanced.SamplerEulerCFGpp.execute("alternative"),
    "SamplerLCMUpscale/ratio2.0/steps3/bilinear": lambda _m: advanced.SamplerLCMUpscale.execute(
        2.0, 3, "bilinear"
    ),
}


@pytest.mark.parametrize("case", SAMPLERS)
def test_sampler_nodes(case: str, kind: str, model: Any, recorded: dict[str, Tensor]) -> None:
    output = nodes.SamplerCustom.execute(
        model=model,
        add_noise=True,
        noise_seed=42,
        cfg=3.0,
        positive=conditioning(POSITIVE),
        negative=conditioning(NEGATIVE),
        sampler=first(SAMPLERS[case](model)),
        sigmas=recorded[f"sigmas/{kind}"],
        latent_image=empty(),
    )
    expected = recorded[f"{kind}/{case}/final"]
    torch.testing.assert_close(output[0]["samples"], expected, rtol=0, atol=WITHIN)
    estimates = recorded.get(f"{kind}/{case}/x0")
    if estimates is not None:  # not recorded where the size changes on the way
        torch.testing.assert_close(output[1]["samples"], estimates[-1:], rtol=0, atol=WITHIN)


def test_the_adaptive_sampler(kind: str, model: Any, recorded: dict[str, Tensor]) -> None:
    options = {
        "rtol": 0.05, "atol": 0.0078, "h_init": 0.05, "pcoeff": 0.0, "icoeff": 1.0, "dcoeff": 0.0,
        "accept_safety": 0.81, "eta": 0.5, "s_noise": 0.9,
    }  # fmt: skip
    sampler = first(nodes.SamplerDPMAdaptative.execute(order=3, **options))
    output = run(model, guider=cfg_guider(model), sampler=sampler, kind=kind, recorded=recorded)
    name = "order3/rtol0.05/atol0.0078/h0.05/p0.0/i1.0/d0.0/safety0.81/eta0.5/s_noise0.9"
    expected = recorded[f"{kind}/SamplerDPMAdaptative/{name}/final"]
    torch.testing.assert_close(output[0]["samples"], expected, rtol=0, atol=8e-4)


def cfg_guider(model: Any) -> Any:
    positive, negative = conditioning(POSITIVE), conditioning(NEGATIVE)
    return first(nodes.CFGGuider.execute(model, positive, negative, 3.0))


def run(model: Any, guider: Any, kind: str, recorded: Any, sampler: Any = None) -> Any:
    return nodes.SamplerCustomAdvanced.execute(
        noise=first(nodes.RandomNoise.execute(42)),
        guider=guider,
        sampler=sampler or first(nodes.KSamplerSelect.execute("euler")),
        sigmas=recorded[f"sigmas/{kind}"],
        latent_image=empty(),
    )


@pytest.mark.parametrize("style", ["regular", "nested"])
def test_guidance_by_two_texts(
    style: str, kind: str, model: Any, recorded: dict[str, Tensor]
) -> None:
    texts = (conditioning(POSITIVE), conditioning(SECOND), conditioning(NEGATIVE))
    guider = first(nodes.DualCFGGuider.execute(model, *texts, 4.0, 2.5, style))
    output = run(model, guider, kind, recorded)
    expected = recorded[f"{kind}/DualCFGGuider/{style}/final"]
    torch.testing.assert_close(output[0]["samples"], expected, rtol=0, atol=WITHIN)


def test_guidance_by_one_text(kind: str, model: Any, recorded: dict[str, Tensor]) -> None:
    guider = first(nodes.BasicGuider.execute(model, conditioning(POSITIVE)))
    output = run(model, guider, kind, recorded)
    expected = recorded[f"{kind}/BasicGuider/final"]
    torch.testing.assert_close(output[0]["samples"], expected, rtol=0, atol=WITHIN)


def test_adding_noise(kind: str, model: Any, recorded: dict[str, Tensor]) -> None:
    generator = torch.manual_seed(7)
    latent = {"samples": torch.randn(1, 4, 8, 8, generator=generator)}
    sigmas = recorded[f"sigmas/{kind}"]
    noise = first(nodes.RandomNoise.execute(42))
    for name, levels in (("sigmas_0_2", sigmas[0:3]), ("sigmas_2_end", sigmas[2:])):
        output = nodes.AddNoise.execute(model, noise, levels, latent)
        expected = recorded[f"{kind}/AddNoise/latent_seed7/{name}"]
        torch.testing.assert_close(output[0]["samples"], expected, rtol=0, atol=1e-4, msg=name)


def test_without_noise_the_latent_is_the_start(model: Any) -> None:
    source = first(nodes.DisableNoise.execute())
    assert source.seed == 0
    assert source.generate_noise({"samples": torch.ones(1, 4, 2, 2)}).abs().sum() == 0


@pytest.mark.parametrize("add_noise", [True, False])
def test_a_nested_latent_goes_through_the_nodes(add_noise: bool) -> None:
    from comfy import latent_formats
    from comfy.nested_tensor import NestedTensor
    from tests.comfy.sampling.test_every_run import AnyShapeModel

    space = latent_formats.LatentFormat()
    space.latent_rgb_factors = latent_formats.Wan21().latent_rgb_factors
    model = patcher(AnyShapeModel("FLOW", {"shift": 3.0}, space))
    shapes = [(1, 16, 3, 4, 6), (1, 8, 5)]
    latent = {"samples": NestedTensor([torch.full(shape, 0.2) for shape in shapes])}
    source = nodes.RandomNoise.execute(3) if add_noise else nodes.DisableNoise.execute()
    guider = first(nodes.CFGGuider.execute(model, conditioning([0.1]), conditioning([0.0]), 2.0))
    output = nodes.SamplerCustomAdvanced.execute(
        noise=first(source),
        guider=guider,
        sampler=first(nodes.KSamplerSelect.execute("euler")),
        sigmas=torch.tensor([0.9, 0.5, 0.0]),
        latent_image=latent,
    )
    for result in (output[0], output[1]):
        members = result["samples"].unbind()
        assert [tuple(member.shape) for member in members] == shapes
        assert all(torch.isfinite(member).all() for member in members)
