"""Whatever is done to views of one model, and whatever fails, nothing of it stays.

Random sequences of clones, patches, loads within budgets, partial unloads, hooks, object patches
and injected failures: after each step the bytes accounted are the bytes allocated and a run gives
what a fresh process gives; at the end every parameter is the same object with the same bytes.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comfy import interrupt, ops
from comfy.devices import residency
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.hook_group import HookGroup
from comfy.patching.hooks import EnumWeightTarget, WeightHook, create_target_dict
from comfy.patching.patcher import ModelPatcher
from comfy.weights.adapters import LoRAAdapter
from tests.support.accelerator import CPU, Network, assert_untouched, bytes_of, snapshot

WIDTH, DEPTH = 16, 2
X = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(5))
TOKENS = torch.tensor([2])
TARGET = create_target_dict(EnumWeightTarget.Model)


class Failure(Exception):
    """Raised by a patch on purpose."""


class BrokenAdapter(LoRAAdapter):
    """An adapter whose arithmetic raises while `armed`."""

    armed = False

    def calculate_weight(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if BrokenAdapter.armed:
            raise Failure
        return super().calculate_weight(*args, **kwargs)


def change_of(kind: str, seed: int) -> dict[Any, Any]:
    """One patch of a kind, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    block = f"blocks.{seed % DEPTH}"
    if kind == "lora":
        adapter = BrokenAdapter(
            set(), (random(2 * WIDTH, 2), random(2, WIDTH), 1.0, None, None, None)
        )
        return {f"{block}.up.weight": adapter}
    if kind == "diff":
        return {f"{block}.down.bias": (random(WIDTH),), "table": (random(8),)}
    if kind == "set":
        return {"out.weight": ("set", (random(4, WIDTH, 1, 1),))}
    if kind == "slice":
        return {(f"{block}.up.weight", (0, 4, 8)): (random(8, WIDTH),)}
    return {"scale": (random(1),), "embed.weight": (random(16, WIDTH),)}


@dataclass
class View:
    """A patcher and what it should show."""

    patcher: ModelPatcher
    changes: list[tuple[str, int]] = field(default_factory=list)
    gain: float | None = None


class History:
    """The state machine that a random list of steps drives."""

    def __init__(self, fakegpu: Any, dtype: torch.dtype, kind: type[ModelPatcher]) -> None:
        self.fakegpu, self.dtype = fakegpu, dtype
        self.device = torch.device(f"{fakegpu.NAME}:0")
        self.model = self.fresh()
        self.before = snapshot(self.model)
        self.views = [View(kind(self.model, self.device, CPU))]
        self.loaded: View | None = None
        self.hook: tuple[str, int] | None = None
        self.sibling = self.fresh(seed=1)  # another model that shares two parameters
        self.sibling.out.weight = self.model.out.weight
        self.sibling.embed.weight = self.model.embed.weight
        self.sibling_before = snapshot(self.sibling)
        self.relative = kind(self.sibling, self.device, CPU)

    def fresh(self, seed: int = 0) -> Network:
        return Network(WIDTH, DEPTH, ops.manual_cast, self.dtype, seed)

    def view(self, number: int) -> View:
        return self.views[number % len(self.views)]

    def step(self, name: str, number: int, fraction: float) -> None:
        with contextlib.suppress(
            torch.OutOfMemoryError, residency.OutOfMemoryReport, Failure,
            interrupt.InterruptProcessingException,
        ):  # fmt: skip
            getattr(self, name)(number, fraction)
        BrokenAdapter.armed = False
        interrupt.interrupt_current_processing(False)
        self.fakegpu.fail_allocation(-1)
        if self.model.current_weight_patches_uuid is None:
            self.loaded = None
        gc.collect()
        self.check()

    def check(self) -> None:
        patcher = self.views[0].patcher
        allocated = torch.accelerator.memory_allocated(0)
        if self.hook is None:
            states = (patcher.residence, self.relative.residence)
            assert sum(s.device_bytes for s in states if s.device != CPU) == allocated
        if self.loaded is not None:
            assert torch.equal(self.run(), self.expected(self.loaded))

    def run(self) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(X.to(self.device), TOKENS.to(self.device)).cpu()

    def expected(self, view: View) -> torch.Tensor:
        """What a process that only ever made this view gives."""
        twin = ModelPatcher(self.fresh(), CPU, CPU)
        for kind, seed in view.changes:
            twin.add_patches(change_of(kind, seed), 0.5)
        if view.gain is not None:
            twin.add_object_patch("scale", torch.nn.Parameter(torch.tensor([view.gain])))
        model = twin.patch_model(CPU)
        if self.hook is not None:
            group = hook_group(*self.hook)
            twin.register_all_hook_patches(group, TARGET, {})
            twin.apply_hooks(hooks=group)
        with torch.inference_mode():
            return model(X, TOKENS)

    # -- steps -----------------------------------------------------------------------------

    def clone(self, number: int, _: float) -> None:
        source = self.view(number)
        self.views.append(View(source.patcher.clone(), list(source.changes), source.gain))

    def patch(self, number: int, fraction: float) -> None:
        view = self.view(number)
        if view is self.loaded:
            return
        kind = ("lora", "diff", "set", "slice", "other")[int(fraction * 4.99)]
        view.patcher.add_patches(change_of(kind, number), 0.5)
        view.changes.append((kind, number))

    def gain(self, number: int, fraction: float) -> None:
        view = self.view(number)
        if view is not self.loaded and not any(kind == "other" for kind, _ in view.changes):
            view.gain = 1.0 + fraction
            parameter = torch.nn.Parameter(torch.tensor([view.gain]), requires_grad=False)
            view.patcher.add_object_patch("scale", parameter)

    def load(self, number: int, fraction: float) -> None:
        view = self.view(number)
        self.unhook(0, 0)
        self.loaded = None
        budget = 0 if fraction > 0.8 else max(1, int(bytes_of(self.model) * fraction))
        view.patcher.patch_model(self.device, budget)
        self.loaded = view

    def plan(self, number: int, fraction: float) -> None:
        view = self.view(number)
        self.unhook(0, 0)
        self.loaded = None
        residency.load_models_gpu([view.patcher])
        self.loaded = view

    def fail_load(self, number: int, fraction: float) -> None:
        self.fakegpu.fail_allocation(int(fraction * 30), 1)
        self.load(number, fraction)

    def break_patch(self, number: int, fraction: float) -> None:
        BrokenAdapter.armed = True
        self.load(number, fraction)

    def force(self, number: int, fraction: float) -> None:
        view = self.view(number)
        self.unhook(0, 0)
        self.loaded = None
        budget = 0 if fraction > 0.8 else max(1, int(bytes_of(self.model) * fraction))
        view.patcher.patch_model(self.device, budget, force_patch_weights=True)
        self.loaded = view

    def load_sibling(self, number: int, fraction: float) -> None:
        """A model with some of the same parameters, patched differently."""
        self.relative = self.relative.clone()
        self.relative.add_patches(change_of("set", number + 50), 0.5)
        budget = 0 if fraction > 0.8 else max(1, int(bytes_of(self.model) * fraction))
        self.relative.patch_model(self.device, budget)

    def fail_run(self, number: int, fraction: float) -> None:
        if self.loaded is not None:
            self.fakegpu.fail_allocation(int(fraction * 20), 1)
            self.run()

    def cancel_run(self, number: int, fraction: float) -> None:
        if self.loaded is not None:
            interrupt.interrupt_current_processing(True)
            self.run()

    def cancel_load(self, number: int, fraction: float) -> None:
        """Code told of a load asks for a cancellation in the middle of a switch."""

        def stop(*_: Any) -> None:
            raise interrupt.InterruptProcessingException

        view = self.view(number)
        view.patcher.add_callback_with_key("on_load_after", "stop", stop)
        try:
            self.load(number, fraction)
        finally:
            view.patcher.remove_callbacks_with_key("on_load_after", "stop")

    def copy_deeply(self, number: int, _: float) -> None:
        copied = self.view(number).patcher.clone(force_deepcopy=True)
        assert {t.device for t in copied.model.state_dict().values()} == {CPU}

    def partially_unload(self, number: int, fraction: float) -> None:
        if self.loaded is not None:
            self.unhook(0, 0)
            size = self.loaded.patcher.loaded_size()
            self.loaded.patcher.partially_unload(CPU, int(size * fraction))

    def partially_load(self, number: int, fraction: float) -> None:
        if self.loaded is not None:
            self.unhook(0, 0)
            view, self.loaded = self.loaded, None
            view.patcher.partially_load(self.device, int(bytes_of(self.model) * fraction))
            self.loaded = view

    def apply_hook(self, number: int, fraction: float) -> None:
        if self.loaded is not None:
            self.unhook(0, 0)
            kind = ("lora", "diff", "set", "other")[int(fraction * 3.99)]
            group = hook_group(kind, number)
            self.loaded.patcher.register_all_hook_patches(group, TARGET, {})
            self.loaded.patcher.apply_hooks(hooks=group)
            self.hook = (kind, number)

    def unhook(self, _: int, __: float) -> None:
        self.hook = None
        for view in self.views:
            view.patcher.clean_hooks()
            view.patcher.restore_hook_patches()

    def detach(self, number: int, _: float) -> None:
        self.unhook(0, 0)
        self.loaded = None
        self.view(number).patcher.detach()

    def finish(self) -> None:
        self.detach(0, 0)
        self.relative.detach()
        residency.unload_all_models()
        gc.collect()
        assert torch.accelerator.memory_allocated(0) == 0
        assert_untouched(self.model, self.before)
        assert_untouched(self.sibling, self.sibling_before)


def hook_group(kind: str, seed: int) -> HookGroup:
    hook = WeightHook()
    hook.weights, hook.need_weight_init = change_of(kind, seed + 100), False
    group = HookGroup()
    group.add(hook)
    return group


STEPS = (
    "clone", "patch", "gain", "load", "load", "plan", "fail_load", "break_patch",
    "partially_unload", "partially_load", "apply_hook", "unhook", "detach", "force",
    "load_sibling", "fail_run", "cancel_run", "cancel_load", "copy_deeply",
)  # fmt: skip


@pytest.mark.parametrize("kind", [ModelPatcher, ModelPatcherDynamic])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 7), st.floats(0, 1)),
        min_size=3,
        max_size=12,
    )
)
def test_no_history_leaves_a_trace(
    accelerator: Any,
    kind: type[ModelPatcher],
    dtype: torch.dtype,
    steps: list[tuple[str, int, float]],
) -> None:
    gc.collect()
    accelerator.reset()
    accelerator.set_rounding(1)
    accelerator.set_async(dtype == torch.float16)  # copies that are late unless waited for
    accelerator.set_poison(True)
    residency.current_loaded_models.clear()
    history = History(accelerator, dtype, kind)
    for name, number, fraction in steps:
        history.step(name, number, fraction)
    history.finish()
