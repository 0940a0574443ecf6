"""The dynamic patcher: weights come on demand, stay within a budget, and leave without a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from comfy import ops
from comfy.devices import residency
from comfy.patching.dynamic import ModelPatcherDynamic, core_patcher_class
from comfy.patching.patcher import ModelPatcher
from comfy.weights.assign import assign_weights
from comfy.weights.mapped_file import is_file_backed
from comfy.weights.state_dict import load_torch_file
from tests.comfy.patching.test_residency_of_one_model import (
    TOKENS,
    X,
    lora_for,
    on_cpu,
    run,
    used,
)
from tests.support.accelerator import CPU, Network, assert_untouched, bytes_of, snapshot
from tests.support.accelerator import simulated_accelerator as simulated


def dynamic(model: Network, fakegpu: Any) -> ModelPatcherDynamic:
    return ModelPatcherDynamic(model, torch.device(f"{fakegpu.NAME}:0"), CPU)


def test_loading_moves_only_what_cannot_stream_and_use_brings_the_rest(accelerator: Any) -> None:
    model = Network()
    want, before = on_cpu(model), snapshot(model)
    patcher = dynamic(model, accelerator)
    with accelerator.transfers() as moved:
        residency.load_models_gpu([patcher])
    assert moved["h2d_bytes"] < 100
    assert torch.equal(run(model, accelerator), want)
    assert patcher.loaded_size() > 0.9 * bytes_of(model)
    with accelerator.transfers() as moved:
        assert torch.equal(run(model, accelerator), want)
    looked_up = X.nbytes + TOKENS.nbytes + 2 * 32 * 4  # the embedding is looked up where it rests
    assert moved["h2d_bytes"] <= looked_up
    residency.unload_all_models()
    assert used(accelerator) == 0
    assert_untouched(model, before)


def test_a_full_load_brings_everything_before_the_first_use(accelerator: Any) -> None:
    model = Network(operations=ops.manual_cast)
    patches = lora_for(model, 5)
    want, before = on_cpu(model, patches), snapshot(model)
    patcher = dynamic(model, accelerator)
    patcher.add_patches(patches)
    residency.load_models_gpu([patcher], force_full_load=True)
    assert patcher.loaded_size() == bytes_of(model) == used(accelerator)
    with accelerator.transfers() as moved:
        assert torch.equal(run(model, accelerator), want)
    assert moved["h2d_bytes"] == X.nbytes + TOKENS.nbytes
    patcher.detach()
    patcher.load(patcher.load_device, full_load=True)
    assert patcher.loaded_size() == bytes_of(model)
    patcher.detach()
    accelerator.fail_allocation(9, 1)
    with pytest.raises(torch.OutOfMemoryError):
        patcher.load(patcher.load_device, full_load=True)
    assert used(accelerator) == 0
    assert_untouched(model, before)
    accelerator.set_capacity(bytes_of(model) // 2)
    with pytest.raises(residency.OutOfMemoryReport):
        residency.load_models_gpu([patcher], force_full_load=True)
    assert used(accelerator) == 0


@pytest.mark.parametrize("share", [0.2, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_larger_than_its_budget_keeps_to_it(
    accelerator: Any, share: float, dtype: torch.dtype
) -> None:
    accelerator.set_async(True)
    model = Network(width=64, dtype=dtype, operations=ops.manual_cast)
    patches = lora_for(model, 5)
    want, before = on_cpu(model, patches), snapshot(model)
    patcher = dynamic(model, accelerator)
    patcher.add_patches(patches)
    budget = int(bytes_of(model) * share)
    patcher.patch_model(patcher.load_device, budget)
    for _ in range(3):
        assert torch.equal(run(model, accelerator), want)
        assert patcher.loaded_size() <= budget
    patcher.detach()
    assert used(accelerator) == 0
    assert_untouched(model, before)


def test_pressure_from_another_model_evicts_what_came_last(accelerator: Any) -> None:
    first, second = Network(width=64, seed=0), Network(width=64, seed=1)
    size = bytes_of(first)
    want = [on_cpu(first), on_cpu(second)]
    activations = 400_000
    accelerator.set_capacity(int(size * 1.6) + activations)
    a, b = dynamic(first, accelerator), dynamic(second, accelerator)
    residency.load_models_gpu([a], activations)
    run(first, accelerator)
    full = a.loaded_size()
    residency.load_models_gpu([b], activations)
    assert 0 < a.loaded_size() < full
    assert torch.equal(run(second, accelerator), want[1])
    residency.load_models_gpu([a], activations)
    assert torch.equal(run(first, accelerator), want[0])


def test_another_variant_drops_only_the_weights_it_changes(accelerator: Any) -> None:
    model = Network()
    one = dynamic(model, accelerator)
    two = one.clone()
    two.add_patches(lora_for(model, 9, range(1)))
    want = on_cpu(model, lora_for(model, 9, range(1)))
    residency.load_models_gpu([one])
    run(model, accelerator)
    before = one.loaded_size()
    residency.load_models_gpu([two])
    changed = sum(model.state_dict()[k].nbytes for k in two.patches)
    assert before - two.loaded_size() <= changed + 2 * 64 * 4 + 32 * 4  # with their biases
    assert torch.equal(run(model, accelerator), want)


def test_classic_and_dynamic_views_of_one_module_take_turns(accelerator: Any) -> None:
    model = Network()
    want, before = on_cpu(model), snapshot(model)
    flexible = dynamic(model, accelerator)
    classic = flexible.clone(disable_dynamic=True)
    assert type(classic) is ModelPatcher
    for patcher in (flexible, classic, flexible, classic):
        residency.load_models_gpu([patcher])
        assert torch.equal(run(model, accelerator), want)
    residency.unload_all_models()
    assert used(accelerator) == 0
    assert_untouched(model, before)


def test_weights_of_a_mapped_file_stay_in_the_file(accelerator: Any, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    save_file(Network(seed=4).state_dict(), path)
    model = Network()
    assign_weights(model, load_torch_file(path))
    assert is_file_backed(model.out.weight)
    want = on_cpu(model)
    residency.load_models_gpu([dynamic_view := dynamic(model, accelerator)])
    assert torch.equal(run(model, accelerator), want)
    assert is_file_backed(model.out.weight)
    dynamic_view.detach()
    assert torch.equal(on_cpu(model), want)


def test_on_the_cpu_it_is_the_classic_patcher() -> None:
    model = Network()
    patcher = ModelPatcherDynamic(model, CPU, CPU)
    patcher.add_patches({"out.bias": (torch.ones(4),)})
    plain = model.out.bias.clone()
    residency.load_models_gpu([patcher])
    assert torch.equal(model.out.bias, plain + 1)


@pytest.mark.parametrize("kind", [ModelPatcher, ModelPatcherDynamic])
def test_weights_that_are_unloaded_on_the_cpu_keep_their_patches(kind: type[ModelPatcher]) -> None:
    patcher = kind(Network(), CPU, CPU)
    patcher.add_patches(lora_for(patcher.model, 0))
    with torch.inference_mode():
        loaded = patcher.patch_model(CPU)(X, TOKENS)
        assert patcher.partially_unload(CPU, patcher.loaded_size()) > 0
        assert torch.equal(patcher.model(X, TOKENS), loaded)
        patcher.patch_model(CPU)
        assert torch.equal(patcher.model(X, TOKENS), loaded)


def test_the_core_patcher_is_a_start_up_choice() -> None:
    import comfy.model_patcher

    for choice, expected in ((None, ModelPatcher), (True, ModelPatcherDynamic)):
        with simulated(dynamic_residency=choice):
            assert core_patcher_class() is expected
            assert comfy.model_patcher.CoreModelPatcher is expected


@pytest.mark.parametrize("budget", [0, 4000, 1])
def test_forced_patches_are_read_in_the_weights_and_applied_once(
    accelerator: Any, budget: int
) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    model = Network(16, 2, ops.manual_cast)
    before, plain = snapshot(model), {k: t.clone() for k, t in model.state_dict().items()}
    view = ModelPatcherDynamic(model, device, CPU)
    view.add_patches({"blocks.0.up.weight": (torch.ones(32, 16),), "out.bias": (torch.ones(4),)})
    x, tokens = torch.ones(1, 4, 4, 4, device=device), torch.tensor([2], device=device)
    outputs = []
    for force in (False, True, False, True):
        view.patch_model(device, budget, force_patch_weights=force)
        outputs.append(model(x, tokens).cpu())
        if force:
            for key, weight in view.model_state_dict().items():
                want = plain[key] + (1 if key in view.patches else 0)
                assert torch.equal(weight.cpu(), want), key
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    view.detach()
    assert_untouched(model, before)
