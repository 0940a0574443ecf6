"""Nodes that replace the sampling object give the recorded levels."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.sampling import schedules
from comfy_extras import nodes_model_advanced as nodes
from tests.comfy.sampling.support import ClosedFormModel, patcher


@pytest.fixture(scope="module")
def recorded(golden_tensors: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    return golden_tensors("schedules_nodes.safetensors")


@pytest.fixture
def model() -> Any:
    base = ClosedFormModel()
    base.model_config = SimpleNamespace(sampling_settings={})
    return patcher(base)


def numbers(part: str) -> float:
    return float(re.sub(r"^[a-z]+", "", part))


NODES: dict[str, Callable[[Any, list[str]], Any]] = {
    "ModelSamplingDiscrete": lambda m, p: nodes.ModelSamplingDiscrete().patch(
        m, p[0], p[1] == "zsnr1"
    ),
    "ModelSamplingContinuousEDM": lambda m, p: nodes.ModelSamplingContinuousEDM().patch(
        m, p[0], 120.0, 0.002
    ),
    "ModelSamplingContinuousV": lambda m, _p: nodes.ModelSamplingContinuousV().patch(
        m, "v_prediction", 500.0, 0.03
    ),
    "ModelSamplingStableCascade": lambda m, _p: nodes.ModelSamplingStableCascade().patch(m, 2.0),
    "ModelSamplingSD3": lambda m, p: nodes.ModelSamplingSD3().patch(m, numbers(p[0])),
    "ModelSamplingAuraFlow": lambda m, p: nodes.ModelSamplingAuraFlow().patch_aura(
        m, numbers(p[0])
    ),
    "ModelSamplingFlux": lambda m, p: nodes.ModelSamplingFlux().patch(
        m, numbers(p[0]), numbers(p[1]), int(numbers(p[2])), int(numbers(p[3]))
    ),
}


@pytest.mark.parametrize("node", NODES)
def test_levels(node: str, model: Any, recorded: dict[str, Tensor]) -> None:
    compared = 0
    before = model.get_model_object("model_sampling")
    for key, expected in recorded.items():
        name, *parts = key.split("/")
        if name != node:
            continue
        sampling = NODES[node](model, parts)[0].get_model_object("model_sampling")
        levels = sampling.sigmas
        made = levels if len(levels) == len(expected) else torch.cat([levels[:4], levels[-4:]])
        if parts[-1] != "table":
            made = schedules.calculate_sigmas(sampling, parts[-2], 8)
        torch.testing.assert_close(
            made.float().cpu(), expected, rtol=1e-5, atol=1e-6, equal_nan=True, msg=key
        )
        compared += 1
    assert compared > 3
    assert model.get_model_object("model_sampling") is before


def test_the_shift_of_flux_follows_the_size(model: Any, golden_json: Callable[[str], Any]) -> None:
    for key, facts in golden_json("schedules_meta.json")["sampling_nodes"].items():
        name, *parts = key.split("/")
        sampling = NODES[name](model, parts)[0].get_model_object("model_sampling")
        for attribute in ("shift", "sigma_data"):
            if attribute in facts:
                assert getattr(sampling, attribute) == pytest.approx(facts[attribute]), key
