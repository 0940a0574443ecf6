"""Whole runs with guidance nodes and with conditioning lists repeat the recorded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import latent_formats
from comfy.sampling import noise, run, samplers
from comfy_extras import nodes_custom_sampler as nodes
from comfy_extras import nodes_eps, nodes_perpneg
from tests.comfy.sampling.support import assert_same_but_rounding, patcher
from tests.comfy.sampling.test_cfg_conditioning import CFG, AttentionModel, entries
from tests.comfy_extras.test_guidance import CASES

LISTS = (
    "plain",
    "range_active",
    "default_cond",
    "area_overlap3",
    "mask_soft_strength0.6_plus_base",
)


@pytest.fixture(scope="module")
def recorded(golden_tensors: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    return golden_tensors("cfg_conditioning.safetensors")


def attention_model() -> Any:
    return patcher(AttentionModel(latent_format=latent_formats.SD15()))


def text(recorded: dict[str, Tensor], name: str) -> list[Any]:
    return [[recorded[f"in/ctx/{name}"], {}]]


def sampled(
    model: Any, recorded: dict[str, Tensor], positive: Any, negative: Any, batch: int = 2
) -> Tensor:
    latent = torch.zeros(batch, 4, 16, 24)
    return run.sample_custom(
        model, noise.prepare_noise(latent, 42), CFG, samplers.ksampler("euler"),
        recorded["multi/sigmas"], positive, negative, latent, disable_pbar=True, seed=42,
    )  # fmt: skip


def agrees(made: Tensor, expected: Tensor, share: float = 1e-5) -> None:
    # A guidance scale of 7.5 amplifies rounding each step.
    assert_same_but_rounding(made, expected, share)


@pytest.mark.parametrize("name", LISTS)
def test_lists(name: str, recorded: dict[str, Tensor], golden_json: Callable[[str], Any]) -> None:
    case = golden_json("cfg_conditioning_meta.json")[f"case/{name}/sigma5.0"]
    lists = (entries(case[side], recorded) for side in ("positive", "negative"))
    agrees(sampled(attention_model(), recorded, *lists), recorded[f"multi/{name}/final"])


@pytest.mark.parametrize("case", CASES)
def test_guidance_nodes(case: str, recorded: dict[str, Tensor]) -> None:
    view = CASES[case](attention_model(), text(recorded, "p2_77"))[0]
    made = sampled(view, recorded, text(recorded, "pos77"), text(recorded, "neg77"))
    share = 4e-5 if case == "TCFG" else 1e-5  # see the test of its estimates
    agrees(made, recorded[f"multi/{case}/final"], share)


def test_rescaling_of_the_score(recorded: dict[str, Tensor]) -> None:
    view = nodes_eps.TemporalScoreRescaling.execute(attention_model(), 0.95, 1.0)[0]
    made = sampled(view, recorded, text(recorded, "pos77"), text(recorded, "neg77"), batch=1)
    agrees(made, recorded["multi/TemporalScoreRescaling/k0.95/sigma1.0/final"])


@pytest.mark.parametrize("neg_scale", [0.5, 1.0])
def test_perpendicular_guider(neg_scale: float, recorded: dict[str, Tensor]) -> None:
    texts = (text(recorded, name) for name in ("pos77", "neg77", "p2_77"))
    guider = nodes_perpneg.PerpNegGuider.execute(attention_model(), *texts, CFG, neg_scale)[0]
    output = nodes.SamplerCustomAdvanced.execute(
        noise=nodes.RandomNoise.execute(42)[0],
        guider=guider,
        sampler=nodes.KSamplerSelect.execute("euler")[0],
        sigmas=recorded["multi/sigmas"],
        latent_image={"samples": torch.zeros(2, 4, 16, 24)},
    )
    expected = recorded[f"multi/PerpNegGuider/neg_scale{neg_scale}/final"]
    agrees(output[0]["samples"], expected)
