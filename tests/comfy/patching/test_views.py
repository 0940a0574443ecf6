"""What nodes do with a patcher: clones, options, objects, extensions, and packs' own subclasses."""

from __future__ import annotations

import collections
import time
from typing import Any

import pytest
import torch
from torch import nn

from comfy import ops
from comfy.nn.wrappers import WrapperExecutor
from comfy.patching.attributes import get_attr
from comfy.patching.hook_group import HookGroup
from comfy.patching.hooks import WeightHook
from comfy.patching.patcher import ModelPatcher
from comfy.patching.wrappers import (
    CallbacksMP,
    PatcherInjection,
    WrappersMP,
    merge_nested_dicts,
)
from comfy.weights import arithmetic
from tests.support.accelerator import CPU, Network, assert_untouched, snapshot


@pytest.fixture
def patcher() -> ModelPatcher:
    return ModelPatcher(Network(), CPU, CPU)


def ones(model: nn.Module, key: str) -> dict[str, Any]:
    return {key: (torch.ones_like(get_attr(model, key)),)}


# -- clones ----------------------------------------------------------------------------------


def test_a_clone_shares_the_module_and_nothing_else(patcher: ModelPatcher) -> None:
    clone = patcher.clone()
    clone.add_patches(ones(clone.model, "out.bias"))
    clone.set_model_attn1_patch(print)
    clone.add_object_patch("scale", 1)
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "k", print)
    assert clone.model is patcher.model
    assert clone.parent is patcher
    assert clone.is_clone(patcher)
    assert patcher.patches == {}
    assert patcher.model_options == {"transformer_options": {}}
    assert patcher.object_patches == {}
    assert patcher.wrappers == {}


def test_equal_views_execute_identically_and_changes_tell_them_apart(
    patcher: ModelPatcher,
) -> None:
    same = patcher.clone()
    assert patcher.clone_has_same_weights(same)
    group = HookGroup()
    group.add(WeightHook())
    for change in (
        lambda v: v.add_patches(ones(v.model, "out.bias")),
        lambda v: v.add_object_patch("scale", object()),
        lambda v: v.set_model_unet_function_wrapper(print),
        lambda v: v.set_model_attn2_replace(print, "middle", 0),
        lambda v: v.add_weight_wrapper("out.bias", print),
        lambda v: v.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "k", print),
        lambda v: v.add_callback(CallbacksMP.ON_LOAD, print),
        lambda v: v.set_injections("k", [PatcherInjection(print, print)]),
        lambda v: v.set_additional_models("k", []),
        lambda v: v.set_attachments("k", object()),
        lambda v: v.set_model_compute_dtype(torch.float64),
        lambda v: v.add_hook_patches(group.hooks[0], ones(v.model, "out.bias")),
        lambda v: setattr(v, "forced_hooks", group),
        lambda v: v.apply_hooks(group),
    ):
        other = patcher.clone()
        change(other)
        assert not patcher.clone_has_same_weights(other)
    assert not patcher.clone_has_same_weights(ModelPatcher(Network(), CPU, CPU))


def test_views_without_patches_are_alike_whatever_their_identity(patcher: ModelPatcher) -> None:
    other = patcher.clone()
    other.add_patches({"foreign": (1,)})
    assert other.patches_uuid != patcher.patches_uuid
    assert patcher.clone_has_same_weights(other)
    for view in (patcher, other):
        view.add_patches(ones(view.model, "out.bias"))
    assert not patcher.clone_has_same_weights(other)  # equal values, but who can tell


def test_a_view_knows_the_keys_it_touches(patcher: ModelPatcher) -> None:
    assert patcher.model_keys == set()
    patcher.add_patches({("out.weight", (0, 0, 1)): (1,), "foreign": (1,)})
    patcher.add_weight_wrapper("out.bias", print)
    patcher.add_hook_patches(WeightHook(), ones(patcher.model, "scale"))
    assert patcher.model_keys == {"out.weight", "out.bias", "scale"}
    assert patcher.clone().model_keys == patcher.model_keys


def test_options_of_a_clone_can_be_edited_at_any_depth(patcher: ModelPatcher) -> None:
    patcher.model_options["pack"] = {"list": [{"inner": [1]}]}
    clone = patcher.clone()
    clone.model_options["pack"]["list"][0]["inner"].append(2)
    assert patcher.model_options["pack"] == {"list": [{"inner": [1]}]}


def test_a_deep_clone_has_plain_weights_of_its_own(accelerator: Any) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    model = Network()
    before = snapshot(model)
    patcher = ModelPatcher(model, device, CPU)
    patcher.add_patches(ones(model, "out.bias"))
    for budget in (0, 1):
        patcher.patch_model(device, budget)
        deep = patcher.clone(force_deepcopy=True)
        assert deep.model is not model
        for key, tensor in deep.model.state_dict().items():
            assert tensor.device == CPU
            assert torch.equal(tensor, before[key][1])
        assert not deep.model.out.comfy_cast_weights
        assert deep.patches.keys() == patcher.patches.keys()
    patcher.detach()
    assert_untouched(model, before)


def test_a_clone_can_be_given_another_module(patcher: ModelPatcher) -> None:
    other = Network(seed=2)
    clone = patcher.clone(model_override=other)
    assert clone.model is other
    assert not clone.is_clone(patcher)


def test_cloning_a_thousand_patched_weights_takes_a_millisecond() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(ops.disable_weight_init.Linear(1, 1) for _ in range(1000))
    patcher = ModelPatcher(model, CPU, CPU)
    taken = patcher.add_patches({f"layers.{i}.weight": (torch.ones(1, 1),) for i in range(1000)})
    assert len(taken) == 1000
    patcher.model_size()
    best = min(timed(patcher.clone) for _ in range(20))
    assert best < 0.004  # the goal is 1 ms on a quiet machine


def timed(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# -- weights ---------------------------------------------------------------------------------


def test_only_keys_of_the_model_are_taken_and_the_identity_changes(patcher: ModelPatcher) -> None:
    identity = patcher.patches_uuid
    sliced = ("out.weight", (0, 0, 1))
    taken = patcher.add_patches({"out.bias": (1,), sliced: (2,), "foreign": (3,)}, 0.5, 0.25)
    assert taken == ["out.bias", sliced]
    assert patcher.patches["out.weight"] == [(0.5, (2,), 0.25, (0, 0, 1), None)]
    assert patcher.patches_uuid != identity


def test_key_patches_of_a_loaded_view_hold_the_unpatched_weight(patcher: ModelPatcher) -> None:
    plain = patcher.model.out.bias.clone()
    patcher.add_patches(ones(patcher.model, "out.bias"))
    patcher.patch_model(CPU)
    patches = patcher.get_key_patches("out.")
    assert set(patches) == {"out.weight", "out.bias"}
    (weight, convert), patch = patches["out.bias"]
    assert torch.equal(convert(weight), plain)
    assert patch is patcher.patches["out.bias"][0]


def test_merging_uses_another_models_weights_with_its_patches() -> None:
    mine, other = ModelPatcher(Network(), CPU, CPU), ModelPatcher(Network(seed=1), CPU, CPU)
    other.add_patches(ones(other.model, "out.bias"))
    plain, theirs = mine.model.out.bias.clone(), other.model.out.bias.clone()
    for key, patches in other.get_key_patches("out.").items():
        mine.add_patches({key: patches}, 0.75, 0.25)
    model = mine.patch_model(CPU)
    torch.testing.assert_close(model.out.bias, plain * 0.25 + (theirs + 1) * 0.75)


def test_a_patched_weight_can_be_computed_without_changing_anything(patcher: ModelPatcher) -> None:
    before = snapshot(patcher.model)
    patcher.add_patches(ones(patcher.model, "out.bias"))
    weight = patcher.patch_weight_to_device("out.bias", return_weight=True)
    assert torch.equal(weight, before["out.bias"][1] + 1)
    assert_untouched(patcher.model, before)


def test_updates_in_place_keep_the_parameter_and_come_off_exactly() -> None:
    patcher = ModelPatcher(Network(dtype=torch.float16), CPU, CPU, weight_inplace_update=True)
    before = snapshot(patcher.model)
    patcher.add_patches({"out.bias": (torch.full((4,), 0.1),)})
    patcher.patch_model(CPU)
    assert id(patcher.model.out.bias) == before["out.bias"][0]
    assert not torch.equal(patcher.model.out.bias, before["out.bias"][1])
    patcher.unpatch_model()
    assert_untouched(patcher.model, before)


def test_float8_weights_are_rounded_alike_resident_and_streamed(accelerator: Any) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    model = Network(operations=ops.manual_cast, dtype=torch.float8_e4m3fn)
    for name in ("scale",):
        getattr(model, name).data = torch.ones(1)
    patcher = ModelPatcher(model, device, CPU)
    patcher.add_patches({"out.weight": (torch.full((4, 32, 1, 1), 0.05),)})
    x, tokens = torch.randn(1, 4, 8, 8, device=device), torch.tensor([1], device=device)
    outputs = []
    for budget in (0, 1):
        patcher.patch_model(device, budget)
        with torch.inference_mode():
            outputs.append(model(x, tokens.clone()) if budget == 0 else model(x, tokens))
    assert torch.equal(outputs[0].cpu(), outputs[1].cpu())
    assert patcher.lowvram_patch_counter() == 1
    patcher.detach()


def test_weight_wrappers_run_at_every_use(patcher: ModelPatcher) -> None:
    calls = []
    patcher.add_weight_wrapper("out.weight", lambda weight: calls.append(1) or weight)
    model = patcher.patch_model(CPU)
    x, tokens = torch.randn(1, 4, 8, 8), torch.tensor([1])
    model(x, tokens)
    model(x, tokens)
    assert len(calls) == 2
    patcher.unpatch_model()
    model(x, tokens)
    assert len(calls) == 2


# -- objects ---------------------------------------------------------------------------------


def test_object_patches_show_while_loaded_and_come_off_exactly(patcher: ModelPatcher) -> None:
    model = patcher.model
    before = snapshot(model)
    block, forward = nn.Linear(2, 2), (lambda *args, **kwargs: "patched")
    patcher.add_object_patch("blocks.0", block)
    patcher.add_object_patch("forward", forward)
    assert patcher.get_model_object("blocks.0") is block
    original = model.blocks[0]
    patcher.patch_model(CPU)
    assert model(1) == "patched"
    assert model.blocks[0] is block
    assert patcher.object_patches_backup["blocks.0"] is original
    patcher.unpatch_model()
    assert "forward" not in vars(model)
    assert model.blocks[0] is original
    assert_untouched(model, before)


def test_the_class_of_a_module_can_be_patched(patcher: ModelPatcher) -> None:
    class Louder(nn.Conv2d):
        """Another forward over the same weights."""

    patcher.add_object_patch("out.__class__", Louder)
    patcher.patch_model(CPU)
    assert type(patcher.model.out) is Louder
    patcher.unpatch_model()
    assert type(patcher.model.out) is ops.disable_weight_init.Conv2d


def test_another_view_sees_the_original_object(patcher: ModelPatcher) -> None:
    clone = patcher.clone()
    original = patcher.model.group
    clone.add_object_patch("group", nn.Identity())
    clone.patch_model(CPU)
    assert patcher.get_model_object("group") is original
    patcher.patch_model(CPU)
    assert patcher.model.group is original


def test_a_module_under_an_object_patch_leaves_the_device(accelerator: Any) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    model = Network()
    before = snapshot(model)
    patcher = ModelPatcher(model, device, CPU)
    clone = patcher.clone()
    clone.add_object_patch("group", ops.disable_weight_init.GroupNorm(2, 32))
    patcher.patch_model(device)
    clone.patch_model(device)
    assert patcher.residence.device_bytes == torch.accelerator.memory_allocated(0)
    patcher.patch_model(device)
    assert model.group.weight.device == device
    patcher.detach()
    assert torch.accelerator.memory_allocated(0) == 0
    assert_untouched(model, before)


# -- options ---------------------------------------------------------------------------------


def test_setters_store_callables_where_sampling_and_networks_look(patcher: ModelPatcher) -> None:
    patcher.set_model_sampler_cfg_function(lambda args: args, disable_cfg1_optimization=True)
    patcher.set_model_sampler_post_cfg_function(print)
    patcher.set_model_sampler_post_cfg_function(repr)
    patcher.set_model_attn1_patch(print)
    patcher.set_model_attn2_replace(repr, "middle", 0, 1)
    patcher.set_model_patch_replace(str, "dit", "double_block", 3)
    options = patcher.model_options
    assert options["disable_cfg1_optimization"] is True
    assert options["sampler_post_cfg_function"] == [print, repr]
    transformer = options["transformer_options"]
    assert transformer["patches"]["attn1_patch"] == [print]
    assert transformer["patches_replace"]["attn2"] == {("middle", 0, 1): repr}
    assert transformer["patches_replace"]["dit"] == {("double_block", 3): str}


def test_a_cfg_function_of_three_arguments_is_adapted(patcher: ModelPatcher) -> None:
    patcher.set_model_sampler_cfg_function(lambda cond, uncond, scale: (cond, uncond, scale))
    function = patcher.model_options["sampler_cfg_function"]
    assert function({"cond": 1, "uncond": 2, "cond_scale": 3, "sigma": 4}) == (1, 2, 3)


def test_patches_that_hold_tensors_follow_the_model(patcher: ModelPatcher) -> None:
    class Movable:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def to(self, target: Any) -> Movable:
            self.seen.append(target)
            return self

        def models(self) -> list[str]:
            return ["a model"]

    patch = Movable()
    patcher.set_model_attn1_patch(patch)
    patcher.set_model_attn1_replace(patch, "input", 1)
    patcher.model_patches_to(CPU)
    assert patch.seen == [CPU, CPU]
    assert patcher.model_patches_models() == ["a model", "a model"]


# -- extensions ------------------------------------------------------------------------------


def test_wrappers_go_around_each_other_in_order() -> None:
    def wrapper(name: str) -> Any:
        def wrapped(executor: WrapperExecutor, value: str) -> str:
            return f"{name}({executor(value)})"

        return wrapped

    executor = WrapperExecutor.new_class_executor(str.upper, None, [wrapper("a"), wrapper("b")])
    assert executor.execute("x") == "a(b(X))"
    assert WrapperExecutor.new_executor(str.upper, []).execute("x") == "X"


def test_injections_are_taken_back_whoever_loads_next(patcher: ModelPatcher) -> None:
    log: list[str] = []

    def injection(name: str) -> PatcherInjection:
        return PatcherInjection(lambda _: log.append(f"+{name}"), lambda _: log.append(f"-{name}"))

    clone = patcher.clone()
    clone.set_injections("x", [injection("1"), injection("2")])
    clone.patch_model(CPU)
    assert clone.is_injected
    with clone.use_ejected():
        assert not clone.is_injected
    patcher.patch_model(CPU)
    assert log == ["+1", "+2", "-2", "-1", "+1", "+2", "-2", "-1"]
    assert not clone.is_injected


def test_an_injection_that_fails_is_taken_back_with_the_others(patcher: ModelPatcher) -> None:
    log: list[str] = []

    def fail(_: Any) -> None:
        raise RuntimeError("no")

    patcher.set_injections(
        "x",
        [
            PatcherInjection(lambda _: log.append("+"), lambda _: log.append("-")),
            PatcherInjection(fail, lambda _: log.append("undo")),
        ],
    )
    patcher.add_object_patch("scale", None)
    before = snapshot(patcher.model)
    with pytest.raises(RuntimeError, match="no"):
        patcher.patch_model(CPU)
    assert log == ["+", "undo", "-"]
    assert_untouched(patcher.model, before)


def test_callbacks_are_told_what_happens(patcher: ModelPatcher) -> None:
    told: list[str] = []
    for moment in (
        CallbacksMP.ON_CLONE, CallbacksMP.ON_LOAD, CallbacksMP.ON_DETACH, CallbacksMP.ON_PRE_RUN,
        CallbacksMP.ON_CLEANUP, CallbacksMP.ON_PREPARE_STATE,
    ):  # fmt: skip
        patcher.add_callback(moment, lambda *_, moment=moment: told.append(moment))
    patcher.patch_model(CPU)
    patcher.pre_run()
    patcher.prepare_state(torch.ones(1))
    patcher.cleanup()
    patcher.detach()
    patcher.clone()
    assert told == [
        "on_load_after", "on_pre_run", "on_prepare_state", "on_cleanup", "on_detach_after",
        "on_clone",
    ]  # fmt: skip


def test_attachments_and_additional_models_are_cloned_by_their_own_rule(
    patcher: ModelPatcher,
) -> None:
    class Attachment:
        def on_model_patcher_clone(self) -> str:
            return "copied"

    other = ModelPatcher(Network(seed=3), CPU, CPU)
    patcher.set_attachments("a", Attachment())
    patcher.set_additional_models("m", [other])
    clone = patcher.clone()
    assert clone.get_attachment("a") == "copied"
    (copied,) = clone.get_additional_models_with_key("m")
    assert copied is not other
    assert copied.is_clone(other)
    assert patcher.get_nested_additional_models() == [other]


def test_nested_tables_merge_without_touching_the_first() -> None:
    one = {"a": {"x": [1], "y": 1}, "b": 2}
    merged = merge_nested_dicts(one, {"a": {"x": [2], "z": 3}})
    assert merged == {"a": {"x": [1, 2], "y": 1, "z": 3}, "b": 2}
    assert one == {"a": {"x": [1], "y": 1}, "b": 2}


# -- what packs do ---------------------------------------------------------------------------


def test_a_pack_can_replace_the_arithmetic_of_weights(
    patcher: ModelPatcher, monkeypatch: Any
) -> None:
    import comfy.lora

    plain = patcher.model.out.bias.clone()
    original = comfy.lora.calculate_weight
    monkeypatch.setattr(
        arithmetic, "calculate_weight", original
    )  # restored after the public assignment below
    comfy.lora.calculate_weight = lambda patches, weight, key, *args, **kwargs: weight + 5
    patcher.add_patches(ones(patcher.model, "out.bias"))
    patcher.patch_model(CPU)
    assert torch.equal(patcher.model.out.bias, plain + 5)


def test_a_subclass_that_patches_weights_itself_comes_off_exactly() -> None:
    class OwnPatcher(ModelPatcher):
        """Backs weights up and replaces them the way published packs do."""

        def patch_weight_to_device(
            self, key: str, device_to: Any = None, inplace_update: bool = False
        ) -> None:
            from comfy import model_management, utils

            weight = utils.get_attr(self.model, key)
            if key not in self.backup:
                backup = collections.namedtuple("Dimension", ["weight", "inplace_update"])
                self.backup[key] = backup(weight.to(self.offload_device), False)
            working = model_management.cast_to_device(weight, device_to, torch.float32, copy=True)
            out = self.calculate_weight(self.patches[key], working, key)
            utils.set_attr_param(self.model, key, out.to(weight.dtype))

        def clone(self, *args: Any, **kwargs: Any) -> Any:
            return super().clone(*args, **kwargs)

    plain = ModelPatcher(Network(), CPU, CPU)
    before = snapshot(plain.model)
    plain.__class__ = OwnPatcher
    view = plain.clone()
    assert type(view) is OwnPatcher
    view.add_patches(ones(view.model, "out.bias"))
    view.add_patches(ones(view.model, "table"))  # a buffer, which it makes a parameter
    view.patch_model(CPU)
    assert torch.equal(view.model.out.bias, before["out.bias"][1] + 1)
    assert torch.equal(view.model.table, before["table"][1] + 1)
    view.patch_model(CPU)
    view.unpatch_model(CPU)
    assert_untouched(view.model, before)
    assert dict(view.model.named_buffers()).keys() == {"table"}


def test_the_module_shows_its_state_under_the_usual_names(accelerator: Any) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    model: Any = Network()
    patcher = ModelPatcher(model, device, CPU)
    patcher.patch_model(device)
    assert model.device == device
    assert model.model_loaded_weight_memory == patcher.loaded_size()
    assert model.current_weight_patches_uuid == patcher.patches_uuid
    assert not model.model_lowvram
    patcher.partially_unload(CPU, 1)
    assert model.model_lowvram
    assert model.lowvram_patch_counter == patcher.lowvram_patch_counter() == 0  # nothing is patched
    patcher.detach()
    assert model.device == CPU
    assert model.current_weight_patches_uuid is None
