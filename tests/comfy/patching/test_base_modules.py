"""Patchers whose module is copied, shared in part with another module, or replaced by a pack."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from comfy import ops
from comfy.devices import residency
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.patcher import ModelPatcher
from tests.comfy.patching.test_residency_of_one_model import (
    lora_for,
    on_cpu,
    run,
    used,
)
from tests.support.accelerator import CPU, Network, assert_untouched, bytes_of, snapshot

KINDS = (ModelPatcher, ModelPatcherDynamic)
BUDGETS = (0, 8000, 1)


def network(seed: int = 0) -> Network:
    return Network(operations=ops.manual_cast, seed=seed)


def patcher_of(model: nn.Module, fakegpu: Any, kind: type[ModelPatcher] = ModelPatcher) -> Any:
    return kind(model, torch.device(f"{fakegpu.NAME}:0"), CPU)


class Wrapper(nn.Module):
    """A network that a pack puts another one into."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model = inner

    def forward(self, *args: Any) -> Any:
        return self.model(*args)


class Base(nn.Module):
    """A base model with a buffer of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.diffusion_model = Wrapper(inner)
        self.register_buffer("sigmas", torch.ones(3))

    def forward(self, *args: Any) -> Any:
        return self.diffusion_model(*args) * self.sigmas[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_two_base_modules_around_one_transformer_take_turns(
    accelerator: Any, kind: type[ModelPatcher], budget: int
) -> None:
    """As a pack copies a patcher without copying its transformer."""
    base = Base(network())
    patches = {f"diffusion_model.model.{k}": v for k, v in lora_for(network(), 3).items()}
    plain, changed = on_cpu(network()), on_cpu(network(), lora_for(network(), 3))
    before = snapshot(base)
    first = patcher_of(base, accelerator, kind)
    first.patch_model(first.load_device, budget)
    transformer, base.diffusion_model.model = base.diffusion_model.model, None
    second = copy.deepcopy(first)
    base.diffusion_model.model = second.model.diffusion_model.model = transformer
    second.add_patches(patches)
    assert torch.equal(run(base, accelerator), plain)
    for view, want in ((second, changed), (first, plain)) * 2:
        view.patch_model(view.load_device, budget)
        assert torch.equal(run(view.model, accelerator), want)
    assert torch.equal(second.get_key_patches()[next(iter(patches))][0][0], before[
        next(iter(patches))][1])  # fmt: skip
    second.patch_model(second.load_device, budget)
    first.detach()
    assert torch.equal(run(second.model, accelerator), changed)
    second.detach()
    gc.collect()
    assert used(accelerator) == 0
    assert_untouched(base, before)


@pytest.mark.parametrize("budgets", [(0, 0), (8000, 0), (0, 1), (1, 8000)])
def test_a_shallow_copy_of_a_module_takes_turns_with_it(
    accelerator: Any, budgets: tuple[int, int]
) -> None:
    model = network()
    plain, changed, before = on_cpu(model), on_cpu(model, lora_for(model, 4)), snapshot(model)
    one, two = patcher_of(model, accelerator), patcher_of(copy.copy(model), accelerator)
    two.add_patches(lora_for(model, 4))
    for _ in range(2):
        for view, budget, want in zip((one, two), budgets, (plain, changed)):
            view.patch_model(view.load_device, budget)
            assert torch.equal(run(view.model, accelerator), want)
    one.detach()
    two.detach()
    gc.collect()
    assert used(accelerator) == 0
    assert_untouched(model, before)


def test_a_pack_can_give_a_patcher_another_module(accelerator: Any) -> None:
    model, other = network(), network(seed=5)
    want, before = on_cpu(other), snapshot(model)
    view = patcher_of(model, accelerator)
    residency.load_models_gpu([view])
    view.model = other
    assert used(accelerator) == 0  # nobody is left who would take the first one's weights off
    assert_untouched(model, before)
    residency.load_models_gpu([view])
    assert torch.equal(run(view.model, accelerator), want)
    (row,) = residency.memory_report()
    assert row["loaded_bytes"] == bytes_of(other) == used(accelerator)
    view.model = copy.deepcopy(model)
    view.size = 0
    assert view.model_size() == bytes_of(model)
    view.model = None
    assert (view.loaded_size(), used(accelerator)) == (0, 0)


def test_a_module_left_by_one_view_stays_loaded_for_the_others(accelerator: Any) -> None:
    model = network()
    want = on_cpu(model)
    one = patcher_of(model, accelerator)
    two = one.clone()
    residency.load_models_gpu([one])
    one.model = network(seed=6)
    assert residency.loaded_models() == [two]
    assert torch.equal(run(model, accelerator), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_loaded_patcher_can_be_pickled_and_copied(
    accelerator: Any, kind: type[ModelPatcher], budget: int
) -> None:
    model = network()
    view = patcher_of(model, accelerator, kind)
    view.add_patches(lora_for(model, 2))
    view.patch_model(view.load_device, budget)
    want = run(model, accelerator)
    shallow = copy.copy(view)
    assert shallow.model is model
    assert shallow.patches is view.patches
    for copied in (pickle.loads(pickle.dumps(view)), copy.deepcopy(view)):
        tensors = copied.model.state_dict(keep_vars=True)
        assert {t.device for t in tensors.values()} == {CPU}
        assert copied.loaded_size() == 0
        copied.patch_model(copied.load_device)
        assert torch.equal(run(copied.model, accelerator), want)
        copied.detach()
    del view
    assert residency.loaded_models() == []
    residency.load_models_gpu([shallow])
    assert residency.loaded_models() == [shallow]
