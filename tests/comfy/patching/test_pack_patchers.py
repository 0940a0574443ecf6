"""Patchers as custom nodes subclass, wrap and bypass them: quantised, self-placing, swapping."""

from __future__ import annotations

import collections
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import comfy.lora
import comfy.model_management
import comfy.model_patcher
import comfy.utils
from comfy import ops
from comfy.devices import memory, residency
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.patcher import ModelPatcher
from comfy.patching.wrappers import CallbacksMP, PatcherInjection
from tests.comfy.patching.test_residency_of_one_model import (
    TOKENS,
    X,
    lora_for,
    on_cpu,
    patcher_of,
    run,
    used,
)
from tests.support.accelerator import CPU, Network, assert_untouched, bytes_of, snapshot

# -- a pack whose weights are stored packed and patched as they are unpacked ------------------


class Packed(torch.Tensor):
    """A weight in eighths, as int8; `patches` are applied when a layer unpacks it."""

    patches: list[Any]

    @staticmethod
    def of(weight: torch.Tensor) -> Packed:
        steps = (weight * 8).round().clamp(-127, 127).to(torch.int8)
        return Packed.keeping(steps, [])

    @staticmethod
    def keeping(steps: torch.Tensor, patches: list[Any]) -> Packed:
        packed = torch.Tensor._make_subclass(Packed, steps.as_subclass(torch.Tensor).detach())
        packed.patches = list(patches)
        return packed

    def to(self, *args: Any, **kwargs: Any) -> Packed:
        return Packed.keeping(super().to(*args, **kwargs), getattr(self, "patches", []))

    def detach(self) -> Packed:
        return self

    def unpacked(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        weight = self.as_subclass(torch.Tensor).to(device).to(dtype) / 8
        for patches, key in getattr(self, "patches", []):
            weight = comfy.lora.calculate_weight(patches, weight, key)
        return weight


class PackedOps(ops.manual_cast):
    """Layers that unpack their weights themselves."""

    class Linear(ops.manual_cast.Linear):
        def forward_comfy_cast_weights(self, input: torch.Tensor) -> torch.Tensor:
            if not isinstance(self.weight, Packed):
                return super().forward_comfy_cast_weights(input)
            weight = self.weight.unpacked(input.device, input.dtype)
            return nn.functional.linear(input, weight, self.bias.to(input.device, input.dtype))


class PackedPatcher(comfy.model_patcher.ModelPatcher):
    """As a pack for quantised files writes it."""

    released = False

    def patch_weight_to_device(
        self, key: str, device_to: Any = None, inplace_update: bool = False
    ) -> None:
        if key not in self.patches:
            return
        weight = comfy.utils.get_attr(self.model, key)
        patches = self.patches[key]
        if isinstance(weight, Packed):
            out = weight.to(device_to)
            out.patches = [(patches, key)]
        else:
            inplace_update = self.weight_inplace_update or inplace_update
            if key not in self.backup:
                self.backup[key] = collections.namedtuple("Saved", ["weight", "inplace_update"])(
                    weight.to(device=self.offload_device, copy=inplace_update), inplace_update
                )
            wide = comfy.model_management.cast_to_device(
                weight, device_to or weight.device, torch.float32, copy=True
            )
            out = comfy.lora.calculate_weight(patches, wide, key).to(weight.dtype)
        comfy.utils.set_attr_param(self.model, key, out)

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
        if unpatch_weights:
            for parameter in self.model.parameters():
                if isinstance(parameter, Packed):
                    parameter.patches = []
        return super().unpatch_model(device_to=device_to, unpatch_weights=unpatch_weights)

    def load(self, *args: Any, force_patch_weights: bool = False, **kwargs: Any) -> None:
        super().load(*args, force_patch_weights=True, **kwargs)
        if not self.released:  # let go of the file: move what rests there once around
            for module in self.model.modules():
                weight = getattr(module, "weight", None)
                if weight is not None and weight.device == self.offload_device:
                    module.to(self.load_device).to(self.offload_device)
            self.released = True

    def pin_weight_to_device(self, key: str) -> None:
        if not isinstance(comfy.utils.get_attr(self.model, key), Packed):
            super().pin_weight_to_device(key)

    def clone(self, *args: Any, **kwargs: Any) -> PackedPatcher:
        source = self.__class__
        self.__class__ = PackedPatcher
        n = super().clone(*args, **kwargs)
        n.__class__ = PackedPatcher
        self.__class__ = source
        n.released = getattr(self, "released", False)
        if source != PackedPatcher:
            n.size = 0
        return n


def packed_network() -> Network:
    model = Network(operations=PackedOps)
    for block in model.blocks:
        for name in ("up", "down"):
            weight = block[name].weight
            block[name].weight = nn.Parameter(Packed.of(weight), requires_grad=False)
    return model


def unpacked_twin() -> Network:
    twin = Network()
    for block in twin.blocks:
        for name in ("up", "down"):
            block[name].weight.data = Packed.of(block[name].weight).unpacked(CPU, torch.float32)
    return twin


@pytest.mark.parametrize("kind", [ModelPatcher, ModelPatcherDynamic])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_a_quantised_model_keeps_its_own_way_of_patching(
    accelerator: Any, kind: type[ModelPatcher], share: float
) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    model = packed_network()
    steps = {k: v.clone() for k, v in model.state_dict().items()}
    base = PackedPatcher.clone(kind(model, device, CPU))
    assert type(base) is PackedPatcher
    size = base.model_size()
    accelerator.set_capacity(1_000_000)
    beside = 0 if share == 1 else 1_000_000 - size * share
    plain = {"out.bias": (torch.ones(4),)}
    for seed in (1, 2, None, 1):
        view = base.clone()
        patches = {**lora_for(model, seed), **plain} if seed is not None else {}
        view.add_patches(patches)
        residency.load_models_gpu([view], memory_required=beside)
        want = on_cpu(unpacked_twin(), patches)
        for _ in range(2):
            torch.testing.assert_close(run(model, accelerator), want)
        assert view.loaded_size() <= size * share + 200  # what cannot stream stays
    residency.unload_all_models()
    gc.collect()
    assert used(accelerator) == 0
    for key, value in model.state_dict().items():
        assert torch.equal(value.as_subclass(torch.Tensor), steps[key].as_subclass(torch.Tensor))
        assert not getattr(value, "patches", [])


# -- a pack that places its network itself ----------------------------------------------------


class SelfPlacing(ModelPatcher):
    """Loads by moving the whole network, and takes it back on detaching."""

    def load(
        self,
        device_to: Any = None,
        lowvram_model_memory: int = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> None:
        with self.use_ejected():
            super().load(device_to, lowvram_model_memory, force_patch_weights, full_load)
            self.model.to(device_to)
            self.model.model_loaded_weight_memory = self.model_size()
            self.model.device = device_to

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        self.eject_model()
        self.model_patches_to(self.offload_device)
        if unpatch_all:
            self.unpatch_model(self.offload_device, unpatch_weights=unpatch_all)
        for callback in self.get_all_callbacks(CallbacksMP.ON_DETACH):
            callback(self, unpatch_all)
        return self.model


def test_a_network_that_a_pack_moves_counts_and_goes(accelerator: Any) -> None:
    model = Network()
    want, before = on_cpu(model), snapshot(model)
    patcher = SelfPlacing(model, torch.device(f"{accelerator.NAME}:0"), CPU)
    residency.load_models_gpu([patcher])
    assert patcher.loaded_size() == bytes_of(model) == used(accelerator)
    assert torch.equal(run(model, accelerator), want)
    residency.free_memory(residency.EVERYTHING, patcher.load_device)
    assert patcher.loaded_size() == used(accelerator) == 0
    assert_untouched(model, before)


def test_what_a_pack_writes_on_the_module_is_what_the_planner_counts(accelerator: Any) -> None:
    model = Network()
    patcher = patcher_of(model, accelerator)
    device = patcher.load_device
    model.to(device)
    model.model_loaded_weight_memory, model.device = bytes_of(model), device
    assert patcher.loaded_size() == bytes_of(model)
    assert patcher.current_loaded_device() == device
    patcher.detach()
    assert patcher.loaded_size() == used(accelerator) == 0
    assert patcher.current_loaded_device() == CPU


def test_blocks_that_a_pack_swaps_out_after_loading_run_and_come_back(accelerator: Any) -> None:
    model = Network(operations=ops.manual_cast)
    want, before = on_cpu(model), snapshot(model)
    patcher = patcher_of(model, accelerator)

    def swap(view: ModelPatcher, device_to: Any, *_: Any) -> None:
        for block in view.model.blocks[1:]:
            block.to(view.offload_device)

    swapped = patcher.clone()
    swapped.add_callback(CallbacksMP.ON_LOAD, swap)
    residency.load_models_gpu([swapped])
    assert swapped.loaded_size() == used(accelerator) < bytes_of(model) / 2
    assert torch.equal(run(model, accelerator), want)
    residency.load_models_gpu([patcher])
    assert patcher.loaded_size() == used(accelerator) == bytes_of(model)
    residency.unload_all_models()
    assert_untouched(model, before)


def test_a_replaced_partial_load_places_modules_and_the_planner_unloads_them(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator.set_device_count(2)
    donor = torch.device(f"{accelerator.NAME}:1")

    def partially_load(
        self: Any, device_to: Any, extra_memory: int = 0, force_patch_weights: bool = False
    ) -> int:
        self.patch_model(load_weights=False)
        placed = 0
        listed = sorted(self._load_list(), reverse=True)
        for number, (_, size, name, module, params) in enumerate(listed):
            module._apply(lambda tensor: tensor.to(device_to), recurse=False)
            for param in params:
                self.patch_weight_to_device(f"{name}.{param}", device_to=device_to)
            if number % 2 and hasattr(module, "comfy_cast_weights"):
                module.to(donor)
                module.comfy_cast_weights = True
            placed += size
        self.model.current_weight_patches_uuid = self.patches_uuid
        self.model.device, self.model.model_loaded_weight_memory = device_to, placed
        return placed

    monkeypatch.setattr(comfy.model_patcher.ModelPatcher, "partially_load", partially_load)
    model = Network(operations=ops.manual_cast)
    patches = lora_for(model, 4)
    want, plain = on_cpu(model, patches), on_cpu(model)
    patcher = patcher_of(model, accelerator)
    patcher.add_patches(patches)
    residency.load_models_gpu([patcher])
    assert torch.accelerator.memory_allocated(1) > 0
    torch.testing.assert_close(run(model, accelerator), want)
    assert patcher.loaded_size() > 0
    residency.unload_all_models()
    assert used(accelerator) == torch.accelerator.memory_allocated(1) == 0
    assert torch.equal(on_cpu(model), plain)


# -- other ways packs hold a patcher ----------------------------------------------------------


def test_a_deep_copy_has_a_module_of_its_own(accelerator: Any) -> None:
    model = Network()
    patches = lora_for(model, 5)
    want, plain = on_cpu(model, patches), on_cpu(model)
    patcher = patcher_of(model, accelerator)
    patcher.add_patches(patches)
    for budget in (0, 1):
        patcher.patch_model(patcher.load_device, budget)
        copied = copy.deepcopy(patcher)
        assert copied.model is not model
        assert copied.loaded_size() == 0
        assert torch.equal(on_cpu(copied.model), plain)
        copied.patch_model(copied.load_device)
        assert torch.equal(run(copied.model, accelerator), want)
        copied.detach()
    patcher.detach()
    assert used(accelerator) == 0


def test_a_module_is_freed_with_its_patchers_whatever_was_patched(accelerator: Any) -> None:
    for loaded in (False, True):
        patcher = patcher_of(Network(), accelerator)
        patcher.add_object_patch("memory_required", lambda *_: 0)
        patcher.set_injections("x", [PatcherInjection(lambda _: None, lambda _: None)])
        if loaded:
            residency.load_models_gpu([patcher])
        gone = weakref.ref(patcher.model)
        del patcher
        gc.collect()
        assert gone() is None
        residency.cleanup_models()
        assert residency.current_loaded_models == []
        assert used(accelerator) == 0


def test_a_proxy_around_a_patcher_can_be_loaded(accelerator: Any) -> None:
    class Proxy:
        def __init__(self, inner: ModelPatcher) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    proxy = Proxy(patcher_of(Network(), accelerator))
    residency.load_models_gpu([proxy])
    assert residency.loaded_models() == [proxy]
    assert proxy.loaded_size() == used(accelerator) > 0


def test_an_entry_taken_apart_by_a_pack_is_replaced(accelerator: Any) -> None:
    patcher = patcher_of(Network(), accelerator)
    residency.load_models_gpu([patcher])
    entry = comfy.model_management.current_loaded_models.pop()
    entry.model.detach(unpatch_all=True)
    entry.model_finalizer.detach()
    entry.real_model = None
    residency.load_models_gpu([patcher])
    assert patcher.loaded_size() == used(accelerator) > 0
    (entry,) = comfy.model_management.current_loaded_models
    assert (entry.model_size(), entry.loaded_size(), entry.offloaded) == (
        patcher.model_size(), patcher.loaded_size(), 0,
    )  # fmt: skip


@pytest.mark.parametrize("budget", [0, 1])
def test_replaced_weight_arithmetic_is_used_resident_and_at_use(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    original = comfy.model_patcher.ModelPatcher.calculate_weight

    def doubled(self: Any, patches: Any, weight: torch.Tensor, key: str, *args: Any) -> Any:
        return original(self, [*patches, *patches], weight, key, *args)

    model = Network()
    patches = lora_for(model, 6)
    twin = ModelPatcher(Network(), CPU, CPU)
    for _ in range(2):
        twin.add_patches(patches)
    with torch.inference_mode():
        want = twin.patch_model(CPU)(X, TOKENS)
    monkeypatch.setattr(comfy.model_patcher.ModelPatcher, "calculate_weight", doubled)
    patcher = patcher_of(model, accelerator)
    patcher.add_patches(patches)
    patcher.patch_model(patcher.load_device, budget)
    torch.testing.assert_close(run(model, accelerator), want)
    patcher.detach()


def test_a_device_without_an_index_is_the_one_its_tensors_are_on(accelerator: Any) -> None:
    model = Network()
    want, before = on_cpu(model, lora_for(model, 7)), snapshot(model)
    for kind in (ModelPatcher, ModelPatcherDynamic):
        patcher = kind(model, torch.device(accelerator.NAME), CPU)
        patcher.add_patches(lora_for(model, 7))
        for budget in (0, 1):
            patcher.patch_model(patcher.load_device, budget)
            assert torch.equal(run(model, accelerator), want)
        residency.load_models_gpu([patcher])
        with accelerator.transfers() as moved:
            residency.load_models_gpu([patcher])
        assert moved["h2d_bytes"] == 0
        residency.free_memory(residency.EVERYTHING, torch.device(accelerator.NAME))
        assert used(accelerator) == 0
    assert_untouched(model, before)


def test_a_replaced_device_question_reaches_all_that_ask(
    accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator.set_device_count(2)
    second = torch.device(f"{accelerator.NAME}:1")
    accelerator.set_capacity(123 << 20, 1)
    monkeypatch.setattr(comfy.model_management, "get_torch_device", lambda: second)
    assert comfy.model_management.get_total_memory() == 123 << 20
    assert comfy.model_management.vae_device() == second
    assert comfy.model_management.unet_dtype() == torch.float16
    assert comfy.model_management.minimum_inference_memory() == (123 << 20) // 10
    assert memory.get_free_memory() <= 123 << 20
    held = torch.empty(1000, device=second)
    del held
    comfy.model_management.soft_empty_cache()
    assert torch.accelerator.memory_reserved(1) == 0
