"""A cancellation that comes from outside, between any two lines of loading and unloading.

The worker thread may be stopped by an asynchronous exception, which no code can foresee. Whatever
it ends, taking the view off again leaves every weight the same object with the same bytes.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

from comfy import ops
from comfy.devices import residency
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.hook_group import HookGroup
from comfy.patching.hooks import EnumWeightTarget, WeightHook, create_target_dict
from comfy.patching.patcher import ModelPatcher
from tests.support.accelerator import CPU, Network, assert_untouched, bytes_of, snapshot

TARGET = create_target_dict(EnumWeightTarget.Model)
PLACES = ("comfy/patching/", "comfy/weights/", "comfy/devices/", "comfy/ops/streaming")


class Stopped(BaseException):
    """What stops the worker."""


@contextmanager
def stopped_at(line: int) -> Iterator[list[int]]:
    """Raise `Stopped` at the numbered line of our own code; gives a list that counts the lines."""
    seen = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            seen[0] += 1
            if seen[0] == line:
                raise Stopped
        return trace

    def enter(frame: FrameType, *_: Any) -> Any:
        code = frame.f_code  # what is raised in __del__ goes nowhere
        ours = any(part in code.co_filename for part in PLACES) and code.co_name != "__del__"
        return trace if ours else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield seen
    finally:
        sys.settrace(before)


class World:
    """A model, a view of it that changes everything there is, and another one."""

    def __init__(self, fakegpu: Any, kind: type[ModelPatcher]) -> None:
        self.device = torch.device(f"{fakegpu.NAME}:0")
        self.model = Network(8, 1, ops.manual_cast)
        self.before = snapshot(self.model)
        self.size = bytes_of(self.model)
        self.first = kind(self.model, self.device, CPU)
        self.first.add_patches({"out.bias": (torch.ones(4),), "table": (torch.ones(8),)})
        self.other = self.first.clone()
        self.other.add_patches({"conv.bias": (torch.ones(8),), "out.bias": (torch.ones(4),)})
        self.other.add_object_patch("scale", torch.nn.Parameter(torch.ones(1)))
        self.hooks = HookGroup()
        hook = WeightHook()
        hook.weights, hook.need_weight_init = {"out.bias": (torch.ones(4),)}, False
        self.hooks.add(hook)
        self.first.register_all_hook_patches(self.hooks, TARGET, {})

    def assert_undone(self) -> None:
        residency.unload_all_models()
        for view in (self.first, self.other):
            view.detach()
        gc.collect()
        assert torch.accelerator.memory_allocated(0) == 0
        assert self.first.loaded_size() == 0
        assert_untouched(self.model, self.before)
        settings = ("stream_plan", "weight_function", "bias_function")
        left = [
            n for n, m in self.model.named_modules() if any(m.__dict__.get(s) for s in settings)
        ]
        assert not left


ACTIONS: dict[str, tuple[Callable[[World], Any], Callable[[World], Any]]] = {
    "load": (lambda w: None, lambda w: w.first.patch_model(w.device)),
    "load in part": (lambda w: None, lambda w: w.first.patch_model(w.device, w.size // 2)),
    "switch": (lambda w: w.first.patch_model(w.device), lambda w: w.other.patch_model(w.device)),
    "unload": (lambda w: w.other.patch_model(w.device), lambda w: w.other.detach()),
    "stop streaming": (
        lambda w: w.other.patch_model(w.device, 1), lambda w: w.other.unpatch_model(CPU),
    ),
    "unload in part": (
        lambda w: w.first.patch_model(w.device),
        lambda w: w.first.partially_unload(CPU, w.size // 2),
    ),
    "hooks": (
        lambda w: w.first.patch_model(w.device), lambda w: w.first.apply_hooks(hooks=w.hooks),
    ),
    "no hooks": (
        lambda w: (w.first.patch_model(w.device), w.first.apply_hooks(hooks=w.hooks)),
        lambda w: w.first.apply_hooks(hooks=None),
    ),
    "plan": (
        lambda w: w.first.patch_model(w.device), lambda w: residency.load_models_gpu([w.other]),
    ),
    "make room": (
        lambda w: residency.load_models_gpu([w.other]),
        lambda w: residency.free_memory(residency.EVERYTHING, w.device),
    ),
}  # fmt: skip


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", [ModelPatcher, ModelPatcherDynamic])
def test_a_cancellation_between_any_two_lines_can_be_undone(
    accelerator: Any, kind: type[ModelPatcher], action: str
) -> None:
    before, act = ACTIONS[action]
    world = World(accelerator, kind)
    before(world)
    with stopped_at(-1) as lines:
        act(world)
    world.assert_undone()
    step = max(1, lines[0] // 43)  # and a start of its own, so that each action meets other lines
    for line in itertools.chain(range(1 + len(action) % step, lines[0], step), (lines[0],)):
        world = World(accelerator, kind)
        before(world)
        try:
            with stopped_at(line):
                act(world)
        except Stopped:
            pass
        world.assert_undone()
