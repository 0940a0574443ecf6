"""The way back is always open: failing inverses, hooks, page locks, code that was told too late."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from comfy import ops
from comfy.devices import pinning, residency
from comfy.devices.runtime import get_runtime
from comfy.patching.hook_group import HookGroup
from comfy.patching.hooks import EnumWeightTarget, WeightHook, create_target_dict
from comfy.patching.patcher import ModelPatcher
from comfy.patching.wrappers import CallbacksMP, PatcherInjection
from tests.comfy.patching.test_residency_of_one_model import lora_for, on_cpu, patcher_of, run, used
from tests.support.accelerator import CPU, Network, assert_untouched, bytes_of, snapshot

TARGET = create_target_dict(EnumWeightTarget.Model)


def fail(*_: Any) -> None:
    raise ValueError("a pack's mistake")


def test_an_inverse_that_fails_keeps_no_weight_back(accelerator: Any) -> None:
    model = Network()
    before, log = snapshot(model), []
    patcher = patcher_of(model, accelerator)
    patcher.add_patches(lora_for(model, 1))
    patcher.set_injections(
        "x",
        [
            PatcherInjection(lambda _: None, lambda _: log.append("first")),
            PatcherInjection(lambda _: None, fail),
        ],
    )
    patcher.patch_model(patcher.load_device)
    with pytest.raises(ValueError, match="mistake"):
        patcher.detach()
    assert log == ["first"]
    assert used(accelerator) == 0
    assert_untouched(model, before)


def test_code_that_fails_on_unloading_does_not_stop_the_next_model(accelerator: Any) -> None:
    first, second = (patcher_of(Network(seed=i), accelerator) for i in range(2))
    first.add_callback(CallbacksMP.ON_DETACH, fail)
    residency.load_models_gpu([first])
    accelerator.set_capacity(int(first.model_size() * 1.3))
    residency.free_memory(residency.EVERYTHING, first.load_device)
    residency.load_models_gpu([second])
    assert first.loaded_size() == 0
    assert second.loaded_size() == used(accelerator)


def test_patches_that_cannot_move_do_not_keep_weights(accelerator: Any) -> None:
    class Stuck:
        def to(self, _: Any) -> None:
            raise torch.OutOfMemoryError("no room to move")

    model = Network()
    before = snapshot(model)
    patcher = patcher_of(model, accelerator)
    patcher.patch_model(patcher.load_device)
    patcher.set_model_attn1_patch(Stuck())  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        patcher.detach()
    assert used(accelerator) == 0
    assert_untouched(model, before)


@pytest.mark.parametrize("budget", [0, 1])
def test_single_hooked_weights_can_be_taken_off(accelerator: Any, budget: int) -> None:
    model = Network()
    patcher = patcher_of(model, accelerator)
    hook = WeightHook()
    hook.weights = {"out.bias": (torch.ones(4),), "out.weight": (torch.ones(4, 32, 1, 1),)}
    hook.need_weight_init = False
    group = HookGroup()
    group.add(hook)
    only_bias = on_cpu(model, {"out.bias": (torch.ones(4),)})
    plain = on_cpu(model)
    patcher.patch_model(patcher.load_device, budget)
    patcher.register_all_hook_patches(group, TARGET, {})
    patcher.apply_hooks(hooks=group)
    patcher.unpatch_hooks(whitelist_keys_set={"out.weight"})
    assert torch.equal(run(model, accelerator), only_bias)
    assert patcher.current_hooks is group
    patcher.unpatch_hooks()
    assert torch.equal(run(model, accelerator), plain)
    assert patcher.current_hooks is None
    patcher.detach()


@pytest.mark.parametrize("budget", [0, 1])
def test_forced_hooks_are_shown_after_every_load(accelerator: Any, budget: int) -> None:
    model = Network()
    before = snapshot(model)
    change = {"out.bias": (torch.ones(4),)}
    want = on_cpu(model, change)
    patcher = patcher_of(model, accelerator)
    hook = WeightHook()
    hook.weights, hook.need_weight_init = change, False
    patcher.forced_hooks = HookGroup()
    patcher.forced_hooks.add(hook)
    patcher.register_all_hook_patches(patcher.forced_hooks, TARGET, {})
    for _ in range(2):
        patcher.patch_model(patcher.load_device, budget)
        assert torch.equal(run(model, accelerator), want)
    patcher.detach()
    assert_untouched(model, before)


def test_the_unpatched_weight_is_told_while_hooks_are_shown() -> None:
    patcher = ModelPatcher(Network(), CPU, CPU)
    plain = patcher.model.out.bias.clone()
    hook = WeightHook()
    hook.weights, hook.need_weight_init = {"out.bias": (torch.ones(4),)}, False
    group = HookGroup()
    group.add(hook)
    patcher.register_all_hook_patches(group, TARGET, {})
    patcher.patch_model(CPU)
    patcher.apply_hooks(hooks=group)
    assert torch.equal(patcher.model.out.bias, plain + 1)
    (weight, convert), *_ = patcher.get_key_patches()["out.bias"]
    assert torch.equal(convert(weight), plain)
    deep = patcher.clone(force_deepcopy=True)
    assert torch.equal(deep.model.out.bias, plain)
    patcher.detach()


def test_keys_are_those_of_the_model_without_what_is_injected(accelerator: Any) -> None:
    model = Network()
    patcher = patcher_of(model, accelerator)

    def inject(_: Any) -> None:
        model.extra = nn.Linear(2, 2)

    def eject(_: Any) -> None:
        del model.extra

    patcher.set_injections("motion", [PatcherInjection(inject, eject)])
    patcher.patch_model(patcher.load_device)
    assert hasattr(model, "extra")
    assert not any(key.startswith("extra") for key in patcher.model_state_dict())
    other = patcher.clone()
    assert other.add_patches({"extra.weight": (torch.ones(2, 2),)}) == []
    assert hasattr(model, "extra")  # back in place
    patcher.detach()
    assert not hasattr(model, "extra")


# -- page locks ------------------------------------------------------------------------------


def wide(accelerator: Any) -> tuple[Network, ModelPatcher]:
    model = Network(width=256, depth=2, operations=ops.manual_cast)
    return model, patcher_of(model, accelerator)


def test_large_weights_are_locked_where_they_are(accelerator: Any) -> None:
    model, patcher = wide(accelerator)
    before = snapshot(model)
    weight = model.blocks[0]["up"].weight
    address = weight.data_ptr()
    assert weight.nbytes >= pinning.IN_PLACE_BYTES
    patcher.patch_model(patcher.load_device, 1)
    assert model.blocks[0]["up"].weight is weight
    assert weight.data_ptr() == address
    assert weight.is_pinned()
    assert patcher.residence.pinned_bytes == get_runtime().pinned_bytes > weight.nbytes
    with accelerator.transfers() as moved:
        run(model, accelerator)
    streamed = moved["h2d_pinned_bytes"]
    assert streamed > 0.95 * (bytes_of(model) - model.embed.weight.nbytes)
    patcher.detach()
    assert not weight.is_pinned()
    assert accelerator.pinned_bytes() == get_runtime().pinned_bytes == 0
    assert_untouched(model, before)


def test_what_is_evicted_is_not_locked(accelerator: Any) -> None:
    model, patcher = wide(accelerator)
    want = on_cpu(model)
    patcher.patch_model(patcher.load_device)
    patcher.partially_unload(CPU, patcher.loaded_size() // 2)
    assert accelerator.pinned_bytes() == 0
    patcher.patch_model(patcher.load_device, patcher.loaded_size())
    assert accelerator.pinned_bytes() > 0
    assert torch.equal(run(model, accelerator), want)
    patcher.detach()


def test_locks_end_with_the_model_that_held_them(accelerator: Any) -> None:
    model, patcher = wide(accelerator)
    patcher.patch_model(patcher.load_device, 1)
    assert accelerator.pinned_bytes() > 0
    del model, patcher
    gc.collect()
    assert accelerator.pinned_bytes() == get_runtime().pinned_bytes == 0
    assert used(accelerator) == 0


def test_without_lockable_memory_weights_travel_unlocked(accelerator: Any) -> None:
    model, patcher = wide(accelerator)
    want = on_cpu(model)
    accelerator.set_pinned_limit(0)
    patcher.patch_model(patcher.load_device, 1)
    assert torch.equal(run(model, accelerator), want)
    assert accelerator.pinned_bytes() == 0
    patcher.detach()


def test_a_lock_can_be_ended_by_key(accelerator: Any) -> None:
    model, patcher = wide(accelerator)
    want = on_cpu(model)
    patcher.patch_model(patcher.load_device, 1)
    assert "blocks.0.up.weight" in patcher.pinned
    patcher.unpin_weight("blocks.0.up.weight")
    assert "blocks.0.up.weight" not in patcher.pinned
    assert torch.equal(run(model, accelerator), want)
    patcher.unpin_all_weights()
    assert accelerator.pinned_bytes() == 0
    patcher.detach()


# -- copies made behind the patcher's back ----------------------------------------------------


def test_a_streamed_module_can_be_copied_and_pickled(accelerator: Any) -> None:
    accelerator.set_async(True)
    model, patcher = wide(accelerator)
    want = on_cpu(model)
    patcher.patch_model(patcher.load_device, 1)
    run(model, accelerator)
    copied = copy.deepcopy(model)
    assert torch.equal(run(copied, accelerator), want)
    own = patcher_of(copied, accelerator)
    assert own.loaded_size() == 0
    assert own.residence is not patcher.residence
    patcher.detach()
    restored = pickle.loads(pickle.dumps(model))
    assert torch.equal(on_cpu(restored), want)


def test_nothing_foreseen_stays_after_a_pass_that_ended_early(accelerator: Any) -> None:
    accelerator.set_async(True)
    model, patcher = wide(accelerator)
    want = on_cpu(model)
    patcher.patch_model(patcher.load_device, 1)
    run(model, accelerator)
    accelerator.fail_allocation(9, 4)
    with pytest.raises(torch.OutOfMemoryError):
        run(model, accelerator)
    accelerator.fail_allocation(-1)
    patcher.cleanup()
    gc.collect()
    assert used(accelerator) == patcher.loaded_size()
    assert torch.equal(run(model, accelerator), want)
    patcher.detach()


def test_a_host_that_runs_ahead_holds_no_more_than_the_layers_at_work(accelerator: Any) -> None:
    accelerator.set_async(True)
    model = Network(width=256, depth=8, operations=ops.manual_cast)
    patcher = patcher_of(model, accelerator)
    patcher.patch_model(patcher.load_device, 1)
    run(model, accelerator)
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(3):
        run(model, accelerator)
    layer = model.blocks[0]["up"].weight.nbytes
    assert torch.accelerator.max_memory_allocated() < 4.5 * layer  # of 16
    patcher.detach()
