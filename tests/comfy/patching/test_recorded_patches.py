"""Which weights changes are recorded for: those of the state dict, whoever makes it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import comfy.ops
from comfy.model_patcher import ModelPatcher
from comfy.ops.encoded import encode_layer
from comfy.patching.recorded_patches import StateDictKeys, is_listed

CPU = torch.device("cpu")


class Network(nn.Module):
    """What a module can hold under a name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(comfy.ops.disable_weight_init.Linear(2, 2) for _ in range(3))
        self.layers[1].bias = None
        self.inner = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
        self.missing = None
        self.register_buffer("kept", torch.ones(1))
        self.register_buffer("left_out", torch.ones(1), persistent=False)
        self.register_buffer("empty", None)
        self.plain = torch.ones(1)


class OwnListing(nn.Linear):
    """Lists one weight under another name."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        listed = super().state_dict(*args, **kwargs)
        listed[kwargs.get("prefix", "") + "renamed"] = listed.pop(
            kwargs.get("prefix", "") + "weight"
        )
        return listed


class OwnSaving(nn.Linear):
    """Saves one value more."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "more.than.weights"] = torch.ones(1)


class WithExtraState(nn.Linear):
    """Saves something beside the weights."""

    def get_extra_state(self) -> Any:
        return {"a": 1}


def without_weight(_module: Any, state: Any, prefix: str, _metadata: Any) -> None:
    del state[prefix + "weight"]


def hooked(network: Network) -> None:
    network.inner[0].register_state_dict_post_hook(without_weight)


def hooked_before(network: Network) -> None:
    def drop_layer(module: Any, _prefix: str, _keep: bool) -> None:
        module._parameters.pop("weight", None)

    network.inner[0].register_state_dict_pre_hook(drop_layer)


def put(module: nn.Module) -> Callable[[Network], None]:
    def change(network: Network) -> None:
        network.inner[0] = module

    return change


def with_listing_of_its_own(network: Network) -> None:
    network.inner.state_dict = lambda **kwargs: {"own": torch.ones(1)}


def encoded(network: Network) -> None:
    code: Any = object()
    meta = torch.empty(1, device="meta")
    parts, notes = {"weight_scale": meta}, {"note": meta}
    encode_layer(network.layers[0], code, torch.empty(2, 1, dtype=torch.uint8), parts, notes)


def parametrised(network: Network) -> None:
    nn.utils.parametrizations.weight_norm(network.inner[0])


def with_a_plain_tensor(network: Network) -> None:
    del network.layers[0]._parameters["weight"]
    network.layers[0].weight = torch.ones(2, 2)


def traced(network: Network) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network.inner[0] = torch.jit.trace(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2))
        network.layers[0] = torch.jit.script(nn.Linear(2, 2))


def unchanged(network: Network) -> None:
    pass


CHANGES = {
    "plain": unchanged, "own listing": put(OwnListing(2, 2)), "own saving": put(OwnSaving(2, 2)),
    "extra state": put(WithExtraState(2, 2)), "compiled": put(torch.compile(nn.Linear(2, 2))),
    "hooked": hooked, "hooked before": hooked_before, "encoded": encoded,
    "parametrised": parametrised, "plain tensor": with_a_plain_tensor,
    "traced": traced, "listing of an object": with_listing_of_its_own,
}  # fmt: skip


def asked(model: nn.Module) -> set[str]:
    """Keys of the state dict, and names that only look like them."""
    names = {"", ".", "inner", "inner.", "nothing", "inner.0.nothing", "missing.weight"}
    names |= {"inner.0._extra_state", "_extra_state", "inner.0.forward", "left_out.data"}
    for path, module in model.named_modules():
        tables = (module._parameters, module._buffers, module.__dict__)
        names |= {f"{path}.{name}".removeprefix(".") for table in tables for name in table.keys()}  # noqa: SIM118
    return names | set(model.state_dict(keep_vars=True))


@pytest.mark.parametrize("name", CHANGES)
def test_keys_are_those_of_the_state_dict(name: str) -> None:
    network = Network()
    CHANGES[name](network)
    names, listed = asked(network), set(network.state_dict(keep_vars=True))
    assert {key for key in names if key in StateDictKeys(network)} == listed


def test_a_compiled_model_has_the_keys_of_its_module_below_it() -> None:
    model: Any = torch.compile(Network())
    names, listed = asked(model), set(model.state_dict(keep_vars=True))
    assert {key for key in names if key in StateDictKeys(model)} == listed
    assert "_orig_mod.layers.0.weight" in listed


@pytest.mark.parametrize("name", ["plain", "encoded", "parametrised", "compiled"])
def test_no_keys_are_listed_where_modules_tell(name: str) -> None:
    network = Network()
    CHANGES[name](network)
    told = {key: is_listed(network, key) for key in network.state_dict(keep_vars=True)}
    assert told == dict.fromkeys(told, True)


@pytest.mark.parametrize("hooks", [False, True])
def test_changes_are_recorded_by_key_and_part_of_a_weight(hooks: bool) -> None:
    patcher = ModelPatcher(Network(), CPU, CPU)
    half = (0, 0, 1)
    patches = {
        "layers.0.weight": "a", ("layers.0.weight", half): "b", "layers.1.bias": "none",
        ("inner.0.weight", half, len): "c", ("nothing", half): "d", "kept": "e",
    }  # fmt: skip

    class Hook:
        hook_ref = "hook"

    if hooks:
        taken = patcher.add_hook_patches(Hook(), patches, 0.5, 0.25)
        table = patcher.hook_patches["hook"]
    else:
        taken = patcher.add_patches(patches, 0.5, 0.25)
        table = patcher.patches
    keys = list(patches)
    assert taken == [keys[0], keys[1], keys[3], keys[5]]
    assert table == {
        "layers.0.weight": [(0.5, "a", 0.25, None, None), (0.5, "b", 0.25, half, None)],
        "inner.0.weight": [(0.5, "c", 0.25, half, len)],
        "kept": [(0.5, "e", 0.25, None, None)],
    }
