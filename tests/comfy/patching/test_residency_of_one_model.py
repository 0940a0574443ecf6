"""One model on a device with a byte budget: resident, streamed, patched, switched, undone."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from comfy import ops
from comfy.devices import residency
from comfy.patching.patcher import ModelPatcher
from comfy.weights.adapters import LoRAAdapter
from tests.support.accelerator import CPU, Network, assert_untouched, bytes_of, snapshot

X, TOKENS = (
    torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1)),
    torch.tensor([3, 5]),
)


def patcher_of(model: Network, fakegpu: Any) -> ModelPatcher:
    return ModelPatcher(model, torch.device(f"{fakegpu.NAME}:0"), CPU)


def lora_for(model: Network, seed: int, blocks: range | None = None) -> dict[str, LoRAAdapter]:
    """A rank-2 LoRA on the linear layers of some blocks."""
    generator = torch.Generator().manual_seed(seed)
    patches = {}
    for index in blocks or range(len(model.blocks)):
        for name in ("up", "down"):
            key = f"blocks.{index}.{name}.weight"
            rows, columns = model.state_dict()[key].shape
            up = torch.randn(rows, 2, generator=generator)
            down = torch.randn(2, columns, generator=generator) * 0.1
            patches[key] = LoRAAdapter(set(), (up, down, 1.0, None, None, None))
    return patches


def run(model: Network, fakegpu: Any) -> torch.Tensor:
    device = torch.device(f"{fakegpu.NAME}:0")
    with torch.inference_mode():
        return model(X.to(device), TOKENS.to(device)).cpu()


def on_cpu(model: Network, patches: Any = None) -> torch.Tensor:
    view = ModelPatcher(model, CPU, CPU)
    view.add_patches(patches or {})
    view.patch_model(CPU)
    with torch.inference_mode():
        out = model(X, TOKENS)
    view.detach()
    return out


def used(fakegpu: Any) -> int:
    return torch.accelerator.memory_allocated(0)


def test_full_load_moves_each_weight_once_and_unload_moves_nothing(accelerator: Any) -> None:
    model = Network()
    want, before = on_cpu(model), snapshot(model)
    patcher = patcher_of(model, accelerator)
    with accelerator.transfers() as moved:
        residency.load_models_gpu([patcher])
    assert moved["h2d_bytes"] == bytes_of(model) == patcher.loaded_size() == used(accelerator)
    assert torch.equal(run(model, accelerator), want)
    with accelerator.transfers() as moved:
        residency.unload_all_models()
    assert moved["d2h_bytes"] == 0
    assert used(accelerator) == 0
    assert_untouched(model, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_streamed_weights_give_the_same_bits_as_resident_ones(
    accelerator: Any, dtype: torch.dtype, share: float, asynchronous: bool
) -> None:
    accelerator.set_async(asynchronous)
    accelerator.set_poison(True)
    model = Network(dtype=dtype, operations=ops.manual_cast)
    patches = lora_for(model, 7)
    want = on_cpu(model, patches)
    before = snapshot(model)
    patcher = patcher_of(model, accelerator)
    patcher.add_patches(patches)
    budget = max(1, int(bytes_of(model) * share)) if share < 1 else 0
    patcher.patch_model(patcher.load_device, budget)
    assert patcher.loaded_size() <= (budget or bytes_of(model)) + model.scale.nbytes + 32
    for _ in range(3):
        assert torch.equal(run(model, accelerator), want)
    patcher.detach()
    assert used(accelerator) == 0
    assert_untouched(model, before)


def test_a_pass_over_a_streamed_model_moves_its_streamed_bytes_and_no_more(
    accelerator: Any,
) -> None:
    accelerator.set_async(True)
    model = Network(depth=6)
    patcher = patcher_of(model, accelerator)
    patcher.patch_model(patcher.load_device, bytes_of(model) // 2)
    streamed = bytes_of(model) - patcher.loaded_size()
    run(model, accelerator)
    for _ in range(3):
        with accelerator.transfers() as moved:
            run(model, accelerator)
        assert moved["h2d_bytes"] - X.nbytes - TOKENS.nbytes <= streamed
    assert moved["h2d_pinned_bytes"] > 0
    patcher.detach()
    assert accelerator.pinned_bytes() == 0


def test_a_streamed_merge_of_two_models_moves_no_more_than_its_own_weights(
    accelerator: Any,
) -> None:
    """Another model's weights, as a merge holds them, neither fill the device nor travel."""
    accelerator.set_async(True)
    model, other = Network(depth=6), Network(depth=6, seed=1)
    before = snapshot(model)
    patches = patcher_of(other, accelerator).get_key_patches()
    views = [ModelPatcher(model, d, CPU) for d in (CPU, torch.device(f"{accelerator.NAME}:0"))]
    for view in views:
        for key, change in patches.items():
            view.add_patches({key: change}, 0.5, 0.5)
    views[0].patch_model(CPU)
    with torch.inference_mode():
        want = model(X, TOKENS)
    accelerator.set_capacity(int(1.5 * bytes_of(model)))
    residency.load_models_gpu([views[1]], memory_required=1.3 * bytes_of(model))
    assert 0 < views[1].loaded_size() < bytes_of(model)
    for _ in range(3):
        with accelerator.transfers() as moved:
            torch.testing.assert_close(run(model, accelerator), want)
    streamed = bytes_of(model) - views[1].loaded_size()
    assert moved["h2d_bytes"] - X.nbytes - TOKENS.nbytes <= streamed
    residency.unload_all_models()
    assert used(accelerator) == 0
    assert_untouched(model, before)


def test_switching_between_variants_moves_only_weights_whose_patches_differ(
    accelerator: Any,
) -> None:
    model = Network(width=64)
    base = patcher_of(model, accelerator)
    one, other = base.clone(), base.clone()
    one.add_patches(lora_for(model, 1, range(1)))
    other.add_patches(lora_for(model, 2, range(1, 2)))
    want_one = on_cpu(model, lora_for(model, 1, range(1)))
    want_other = on_cpu(model, lora_for(model, 2, range(1, 2)))
    residency.load_models_gpu([one])
    assert torch.equal(run(model, accelerator), want_one)
    patched = sum(model.state_dict()[k].nbytes for k in [*one.patches, *other.patches])
    factors = sum(t.nbytes for a in (one, other) for p in a.patches.values()
                  for t in p[0][1].weights[:2])  # fmt: skip
    with accelerator.transfers() as moved:
        residency.load_models_gpu([other])
    assert moved["h2d_bytes"] <= patched + factors
    assert torch.equal(run(model, accelerator), want_other)
    residency.load_models_gpu([one])
    assert torch.equal(run(model, accelerator), want_one)
    assert used(accelerator) == bytes_of(model) == one.loaded_size()


def test_partial_unload_frees_what_is_asked_and_partial_load_brings_it_back(
    accelerator: Any,
) -> None:
    model = Network(width=64)
    want, before = on_cpu(model), snapshot(model)
    patcher = patcher_of(model, accelerator)
    residency.load_models_gpu([patcher])
    total = patcher.loaded_size()
    freed = patcher.partially_unload(CPU, total // 3)
    assert total // 3 <= freed < total
    assert patcher.loaded_size() == total - freed == used(accelerator)
    assert torch.equal(run(model, accelerator), want)
    grown = patcher.partially_load(patcher.load_device, freed)
    assert grown == freed
    assert patcher.loaded_size() == total
    assert torch.equal(run(model, accelerator), want)
    patcher.detach()
    assert_untouched(model, before)


@pytest.mark.parametrize("after", range(0, 40, 3))
def test_a_load_that_fails_anywhere_leaves_the_model_untouched(
    accelerator: Any, after: int
) -> None:
    model = Network()
    want, before = on_cpu(model), snapshot(model)
    patcher = patcher_of(model, accelerator)
    patcher.add_patches(lora_for(model, 3))
    accelerator.fail_allocation(after, 1)
    with contextlib.suppress(torch.OutOfMemoryError):
        patcher.patch_model(patcher.load_device)
        patcher.detach()  # the fault came too late to hit the load
    accelerator.fail_allocation(-1)
    assert used(accelerator) == 0
    assert_untouched(model, before)
    patcher.detach()
    assert_untouched(model, before)
    assert torch.equal(on_cpu(model), want)


def test_a_switch_that_fails_leaves_plain_weights(accelerator: Any) -> None:
    model = Network()
    before = snapshot(model)
    base = patcher_of(model, accelerator)
    variant = base.clone()
    variant.add_patches(lora_for(model, 3))
    residency.load_models_gpu([base])
    accelerator.fail_allocation(4, 1)
    with contextlib.suppress(torch.OutOfMemoryError):
        variant.patch_model(variant.load_device)
        pytest.fail("the fault was not met")
    assert used(accelerator) == 0
    assert_untouched(model, before)


def test_tied_weights_are_copied_once(accelerator: Any) -> None:
    model = Network()
    model.blocks[1]["up"].weight = model.blocks[0]["up"].weight
    before = snapshot(model)
    patcher = patcher_of(model, accelerator)
    residency.load_models_gpu([patcher])
    assert used(accelerator) == bytes_of(model) - model.blocks[0]["up"].weight.nbytes
    assert patcher.loaded_size() == used(accelerator)
    residency.unload_all_models()
    assert_untouched(model, before)


def test_a_model_built_on_the_device_can_rest_on_the_cpu(accelerator: Any) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    model = Network().to(device)
    patcher = ModelPatcher(model, device, CPU)
    residency.load_models_gpu([patcher])
    assert patcher.loaded_size() == bytes_of(model)
    residency.unload_all_models()
    assert used(accelerator) == 0
    assert model.out.weight.device == CPU


def test_a_load_within_no_bytes_keeps_only_what_cannot_stream(accelerator: Any) -> None:
    model = Network()
    want, before = on_cpu(model), snapshot(model)
    fixed = model.scale.nbytes + model.table.nbytes
    for load in ("load", "partially_load"):
        patcher = patcher_of(model, accelerator)
        getattr(patcher, load)(patcher.load_device)
        assert patcher.loaded_size() == fixed == used(accelerator)
        assert torch.equal(run(model, accelerator), want)
        patcher.detach()
        assert_untouched(model, before)
    patcher.load(patcher.load_device, full_load=True)
    assert patcher.loaded_size() == bytes_of(model)
    assert patcher.partially_load(patcher.load_device) == 0
    assert patcher.loaded_size() == bytes_of(model)
    half = bytes_of(model) // 2
    assert patcher.partially_load(patcher.load_device, -half) <= -half
    kept = patcher.loaded_size()
    assert patcher.partially_load(patcher.load_device, 0) == 0
    assert patcher.loaded_size() == kept
    assert patcher.partially_load(patcher.load_device, -10 * half) == fixed - kept
    patcher.patch_model(patcher.load_device, lowvram_model_memory=0)  # here 0 means everything
    assert patcher.loaded_size() == bytes_of(model)
    patcher.detach()
    assert_untouched(model, before)


def test_on_the_cpu_a_load_shows_everything_whatever_the_budget() -> None:
    model = Network()
    before = snapshot(model)
    patcher = ModelPatcher(model, CPU, CPU)
    patcher.add_patches({"out.bias": (torch.ones(4),)})
    for load in (patcher.load, patcher.partially_load):
        load(CPU)
        assert torch.equal(model.out.bias, before["out.bias"][1] + 1)
        patcher.detach()
        assert_untouched(model, before)
