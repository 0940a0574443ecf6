"""Code outside takes layers out of a loaded module, or a module with borrowed layers away.

A layer's weights are then its own again, wherever it is, and no other layer gets them.
"""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from comfy import ops
from comfy.devices import residency
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.patcher import ModelPatcher
from comfy.weights import pages
from comfy.weights.adapters import LoRAAdapter
from tests.support.accelerator import CPU, Network, assert_untouched, bytes_of, snapshot
from tests.support.from_file import network_from_file

X, TOKENS = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(5)), torch.tensor([2])
KINDS = [ModelPatcher, ModelPatcherDynamic]
BUDGETS = {"resident": 0, "in part": 4000, "streamed": 1}
KEY = "blocks.0.up.weight"


class Base(nn.Module):
    """A base module around a network that others may hold, too."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.network(x, tokens)


def lora(width: int) -> LoRAAdapter:
    generator = torch.Generator().manual_seed(width)
    up, down = (torch.randn(s, generator=generator) for s in ((2 * width, 2), (2, width)))
    return LoRAAdapter(set(), (up, down, 1.0, None, None, None))


def run(model: nn.Module, device: torch.device) -> torch.Tensor:
    with torch.inference_mode():
        return model(X.to(device), TOKENS.to(device)).cpu()


def assert_on_no_device(model: nn.Module) -> None:
    residency.unload_all_models()
    gc.collect()
    assert torch.accelerator.memory_allocated(0) == 0
    assert not [n for n, m in model.named_modules() if m.__dict__.get("stream_plan")]


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copied", [True, False], ids=["shallow copy", "own module"])
def test_a_base_module_that_goes_while_loaded_leaves_borrowed_layers_as_they_were(
    accelerator: Any, kind: type[ModelPatcher], budget: int, copied: bool
) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    lender = Base(Network(16, 2, ops.manual_cast))
    before, plain = snapshot(lender), run(lender, CPU)
    view = kind(lender, device, CPU)
    borrower = copy.copy(lender) if copied else Base(lender.network)
    guest = kind(borrower, device, CPU)
    guest.add_patches({f"network.{KEY}": lora(16)})
    guest.patch_model(device, budget)
    assert not torch.equal(run(borrower, device), plain)
    del borrower, guest
    gc.collect()
    assert_untouched(lender, before)
    view.patch_model(device, budget)
    torch.testing.assert_close(run(lender, device), plain)
    view.detach()
    assert_untouched(lender, before)
    assert_on_no_device(lender)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_lend_their_memory_are_given_back_to_the_lender(
    kind: type[ModelPatcher], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "LARGE", 1)
    network = network_from_file(tmp_path, width=16)
    before, lender = snapshot(network), Base(network)
    view = kind(lender, CPU, CPU)
    guest = kind(Base(network), CPU, CPU)
    guest.add_patches({f"network.{KEY}": lora(16)})
    guest.patch_model(CPU)
    assert guest.residence.lending(f"network.{KEY}") is not None
    del guest
    gc.collect()
    assert_untouched(network, before)
    assert len(view.get_key_patches()) == len(before)


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_network_that_was_wrapped_while_it_was_loaded_comes_back_whole(
    accelerator: Any, kind: type[ModelPatcher], budget: int
) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    base = Base(Network(16, 2, ops.manual_cast))
    before, plain = snapshot(base), run(base, CPU)
    view, network = kind(base, device, CPU), base.network
    for _ in range(2):
        base.network = Base(network)
        view.patch_model(device, budget)
        torch.testing.assert_close(run(base, device), plain)
        base.network = network
        view.clone().patch_model(device, budget)
        torch.testing.assert_close(run(base, device), plain)
    base.network = Base(network)
    view.detach()
    base.network = network
    assert_untouched(base, before)
    assert_on_no_device(base)


@pytest.mark.parametrize("change", ["load", "unload in part", "unload", "another view"])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_put_in_the_place_of_a_loaded_one_has_its_own_weights(
    accelerator: Any, kind: type[ModelPatcher], budget: int, change: str
) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    base = Base(Network(16, 2, ops.manual_cast))
    old, new = base.network.blocks[0]["up"], Network(16, 1, ops.manual_cast, seed=3).blocks[0]["up"]
    before, own = snapshot(base), snapshot(new)
    base.network.blocks[0]["up"] = new
    want = run(base, CPU)
    base.network.blocks[0]["up"] = old
    view = kind(base, device, CPU)
    other = view.clone()
    other.add_patches({"network.out.bias": (torch.zeros(4),)})
    view.add_patches({f"network.{KEY}": lora(16)})
    view.patch_model(device, budget)
    run(base, device)
    base.network.blocks[0]["up"] = new
    if change == "load":
        view.patches.clear()
        view.patches_uuid = other.patches_uuid
        view.patch_model(device, budget)
    elif change == "unload in part":
        view.partially_unload(CPU, bytes_of(base))
    elif change == "another view":
        other.patch_model(device, budget)
    if change in ("load", "another view"):
        torch.testing.assert_close(run(base, device), want)
    view.detach()
    assert_untouched(new, own)
    base.network.blocks[0]["up"] = old
    assert_untouched(base, before)
    assert_on_no_device(base)


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_weights_leave_with_their_view(
    accelerator: Any, kind: type[ModelPatcher], budget: int
) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    base = Base(Network(16, 2, ops.manual_cast))
    plain = run(base, CPU)
    view = kind(base, device, CPU)
    changed = view.clone()
    changed.add_weight_wrapper(f"network.{KEY}", lambda weight: weight * 2)
    for _ in range(2):
        changed.patch_model(device, budget)
        assert not torch.allclose(run(base, device), plain)
        view.patch_model(device, budget)
        torch.testing.assert_close(run(base, device), plain)
    view.detach()
    assert_on_no_device(base)
