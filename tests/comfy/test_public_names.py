"""Public modules: names can be read, and assigning to them reaches their owners."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest

from comfy.public import write_through

MODULES = (
    "comfy.utils", "comfy.model_management", "comfy.model_patcher", "comfy.ops", "comfy.lora",
    "comfy.patcher_extension", "comfy.hooks", "comfy.float",
)  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_names_of_a_module_can_be_listed_and_read(module: str) -> None:
    public = importlib.import_module(module)
    for name in public.__all__:
        getattr(public, name)
    assert set(public.__all__) <= set(dir(public))


REPLACEABLE = {
    "comfy.model_management.get_torch_device": "comfy.devices.placement.get_torch_device",
    "comfy.model_management.text_encoder_device": "comfy.devices.placement.text_encoder_device",
    "comfy.model_management.unet_offload_device": "comfy.devices.placement.unet_offload_device",
    "comfy.model_management.soft_empty_cache": "comfy.devices.memory.soft_empty_cache",
    "comfy.model_management.load_models_gpu": "comfy.devices.residency.load_models_gpu",
    "comfy.model_management.current_stream": "comfy.devices.casting.current_stream",
    "comfy.model_management.unet_dtype": "comfy.devices.precision.unet_dtype",
    "comfy.lora.calculate_weight": "comfy.weights.arithmetic.calculate_weight",
    "comfy.utils.load_torch_file": "comfy.weights.state_dict.load_torch_file",
    "comfy.utils.PROGRESS_BAR_ENABLED": "comfy.progress.PROGRESS_BAR_ENABLED",
    "comfy.utils.UNET_MAP_BASIC": "comfy.weights.diffusers_unet.UNET_MAP_BASIC",
}


@pytest.mark.parametrize("name", REPLACEABLE)
def test_assigning_to_a_public_name_reaches_its_owner(name: str, monkeypatch: Any) -> None:
    owner_name, _, attribute = REPLACEABLE[name].rpartition(".")
    owner = importlib.import_module(owner_name)
    monkeypatch.setattr(owner, attribute, getattr(owner, attribute))
    module, _, public_name = name.rpartition(".")
    replacement = object()
    setattr(importlib.import_module(module), public_name, replacement)
    assert getattr(owner, attribute) is replacement
    assert getattr(importlib.import_module(module), public_name) is replacement


def test_deleting_a_replacement_brings_the_owner_s_function_back() -> None:
    public = importlib.import_module("comfy.model_management")
    owner = importlib.import_module("comfy.devices.placement")
    original = owner.get_torch_device
    public.get_torch_device = lambda: "replaced"
    assert owner.get_torch_device() == "replaced"
    del public.get_torch_device
    assert public.get_torch_device is owner.get_torch_device is original


def test_the_list_of_loaded_models_is_the_planners_own() -> None:
    from comfy import model_management
    from comfy.devices import residency

    assert model_management.current_loaded_models is residency.current_loaded_models


def test_new_names_stay_on_the_public_module_and_survive_a_reload() -> None:
    module = importlib.import_module("comfy.float")
    module.added_by_a_pack = 1  # type: ignore[attr-defined]
    importlib.reload(module)
    assert module.added_by_a_pack == 1  # type: ignore[attr-defined]
    del module.added_by_a_pack  # type: ignore[attr-defined]
    assert callable(module.stochastic_rounding)


def test_an_owner_that_lacks_the_name_is_refused() -> None:
    public = types.ModuleType("public_for_test")
    public.number = 3  # type: ignore[attr-defined]
    sys.modules["public_for_test"] = public
    try:
        with pytest.raises(ValueError, match="number"):
            write_through("public_for_test", number="comfy.progress")
    finally:
        del sys.modules["public_for_test"]


def test_progress_goes_to_the_hook_that_was_installed() -> None:
    from comfy import utils

    told: list[Any] = []
    utils.set_progress_bar_global_hook(
        lambda value, total, preview, node_id=None: told.append((value, total, preview, node_id))
    )
    try:
        bar = utils.ProgressBar(4, node_id="7")
        bar.update(1)
        bar.update_absolute(9, 5, "picture")
    finally:
        utils.set_progress_bar_global_hook(None)
    assert told == [(1, 4, None, "7"), (5, 5, "picture", "7")]
    utils.ProgressBar(2).update(1)
