"""What is saved of the machine and the settings a picture was made with."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from comfy.devices.policies import MemoryPolicy, PrecisionPolicy
from comfy.devices.runtime import build_runtime, get_runtime, install_runtime
from comfy.sampling.environment import environment


@pytest.fixture(autouse=True)
def runtime():
    before = get_runtime()
    yield
    install_runtime(before)


def made_with(**precision):
    install_runtime(build_runtime(MemoryPolicy(cpu=True), PrecisionPolicy(**precision)))
    return json.loads(json.dumps(environment()))


def test_it_names_versions_device_and_back_end() -> None:
    found = made_with(deterministic=True)
    assert found["torch"] == torch.__version__
    assert found["device"] == "cpu"
    assert found["attention"] == "pytorch"
    assert found["deterministic"] is True
    assert found["precision"] == {}


OTHER = {"unet_dtype": torch.bfloat16, "vae_dtype": torch.float32, "fast": frozenset({"cpu_bf16"})}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(PrecisionPolicy)])
def test_every_setting_of_number_types_leaves_a_trace(name: str) -> None:
    usual = getattr(PrecisionPolicy(), name)
    value = OTHER.get(name, torch.float16 if usual is None else not usual)
    if name == "attention":
        return  # told by its own name, from the choice in force
    assert made_with(**{name: value}) != made_with()


def test_settings_are_told_in_words() -> None:
    found = made_with(unet_dtype=torch.bfloat16, tune_cpu=False, fast=frozenset({"b", "a"}))
    assert found["precision"] == {"unet_dtype": "bfloat16", "tune_cpu": False, "fast": ["a", "b"]}
