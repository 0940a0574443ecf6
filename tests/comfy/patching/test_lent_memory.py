"""Weights converted from a file are patched in their own memory, and nobody can tell."""

from __future__ import annotations

import collections
import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from comfy import interrupt
from comfy.devices import residency
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.hook_group import HookGroup
from comfy.patching.hooks import EnumWeightTarget, WeightHook, create_target_dict
from comfy.patching.patcher import ModelPatcher
from comfy.weights import arithmetic, pages
from comfy.weights.adapters import LoRAAdapter
from tests.comfy.patching.test_residency_of_one_model import TOKENS, X, lora_for
from tests.support.accelerator import CPU, Network, assert_untouched, snapshot
from tests.support.from_file import network_from_file

KINDS = (ModelPatcher, ModelPatcherDynamic)
KEY = "blocks.0.up.weight"


@pytest.fixture(autouse=True, params=[True, False], ids=["watched", "compared"])
def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pages of their own also small weights are known to be unchanged without reading them."""
    if request.param:
        monkeypatch.setattr(pages, "LARGE", 1)


@pytest.fixture
def model(tmp_path: Path) -> Network:
    return network_from_file(tmp_path)


def view_of(model: nn.Module, seed: int, kind: type[ModelPatcher] = ModelPatcher) -> ModelPatcher:
    view = kind(model, CPU, CPU)
    view.add_patches(lora_for(model, seed), 0.7)  # type: ignore[arg-type]
    return view


def shown(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def expected(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """What a view shows on a module that was never a file's."""
    copied = copy.deepcopy(model)
    return shown(view_of(copied, seed).patch_model(CPU))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def lends(view: ModelPatcher) -> set[str]:
    state = view.residence
    return {key for key in state.lent if state.lending(key) is not None}


def addresses(model: nn.Module) -> dict[str, int]:
    return {key: tensor.data_ptr() for key, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", [CPU, None])
@pytest.mark.parametrize(
    ("stored", "used"), [(torch.float16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_views_take_turns_in_the_memory_that_is_there(
    kind: type[ModelPatcher], device: torch.device | None, stored: torch.dtype, used: torch.dtype,
    tmp_path: Path,
) -> None:  # fmt: skip
    model = network_from_file(tmp_path, stored, used)
    want = [expected(model, seed) for seed in (1, 2)]
    before, places, plain = snapshot(model), addresses(model), shown(model)
    views = [view_of(model, seed, kind) for seed in (1, 2)]
    for _ in range(2):
        for number in (0, 1, 1, 0):
            views[number].patch_model(device)
            assert lends(views[number]) == views[number].patches.keys()
            assert same(shown(model), want[number])
            assert addresses(model) == places
        views[0].unpatch_model(device)
        assert same(shown(model), plain)
        assert_untouched(model, before)
        assert addresses(model) == places
        assert not views[0].backup
        assert not views[0].residence.lent


def test_the_planner_changes_views_in_place(model: Network) -> None:
    want, before = [expected(model, seed) for seed in (1, 2)], snapshot(model)
    views = [view_of(model, 1), view_of(model, 2)]
    for number in (0, 1, 0):
        residency.load_models_gpu([views[number]])
        assert lends(views[number])
        assert same(shown(model), want[number])
    residency.unload_all_models()
    assert_untouched(model, before)


def test_the_record_gives_the_original(model: Network) -> None:
    view, before, plain = view_of(model, 1), snapshot(model), shown(model)
    view.patch_model(CPU)
    patched = shown(model)
    weight, in_place = view.backup[KEY]
    assert not in_place
    assert (id(weight), weight.shape) == (before[KEY][0], plain[KEY].shape)
    assert torch.equal(weight, plain[KEY])
    assert view.backup[KEY].weight is view.backup[KEY][0] is weight
    assert KEY not in lends(view)
    assert same(shown(model), patched)
    del weight
    view.unpatch_model()
    assert_untouched(model, before)
    view.patch_model(CPU)
    assert KEY in lends(view)
    assert same(shown(model), patched)


def test_originals_are_told_while_patched_ones_are_shown(model: Network) -> None:
    view, before, plain = view_of(model, 1), snapshot(model), shown(model)
    view.patch_model(CPU)
    patched = shown(model)
    for key, ((weight, convert), *_) in view.get_key_patches().items():
        assert torch.equal(convert(weight), plain[key]), key
    assert same(shown(model), patched)
    again = view_of(model, 2)
    want = expected_after(plain, again)
    again.patch_model(CPU)
    assert same(shown(model), want)
    again.detach()
    assert_untouched(model, before)


def expected_after(plain: dict[str, torch.Tensor], view: ModelPatcher) -> dict[str, torch.Tensor]:
    """What a view makes of plain weights, by the general arithmetic."""
    return {
        key: arithmetic.calculate_weight(view.patches[key], weight.clone(), key)
        if key in view.patches
        else weight
        for key, weight in plain.items()
    }


def test_a_patched_weight_can_be_computed_beside(model: Network) -> None:
    one, two = view_of(model, 1), view_of(model, 2)
    want = expected(model, 2)[KEY]
    one.patch_model(CPU)
    patched = shown(model)
    got = two.patch_weight_to_device(KEY, return_weight=True)
    assert got is not None
    assert torch.equal(got, want)
    assert same(shown(model), patched)
    assert KEY in lends(one)


@pytest.mark.parametrize("made", ["deep copy", "clone", "pickle", "module"])
def test_copies_have_plain_weights_of_their_own(made: str, model: Network) -> None:
    view, plain = view_of(model, 1), shown(model)
    view.patch_model(CPU)
    patched = shown(model)
    if made == "module":
        copied = copy.deepcopy(model)
        assert same(shown(copied), patched)  # as it is shown, without a way back
        view.unpatch_model()
        assert same(shown(copied), patched)
        return
    other = {
        "deep copy": lambda: copy.deepcopy(view),
        "clone": lambda: view.clone(force_deepcopy=True),
        "pickle": lambda: pickle.loads(pickle.dumps(view)),
    }[made]()
    assert same(shown(other.model), plain)
    assert same(shown(model), patched)
    assert KEY in lends(view)
    other.patch_model(CPU)
    assert same(shown(other.model), patched)
    other.unpatch_model()
    assert same(shown(other.model), plain)


def test_whoever_took_the_patched_weight_keeps_it(model: Network) -> None:
    views, before = [view_of(model, 1), view_of(model, 2)], snapshot(model)
    want = expected(model, 2)
    views[0].patch_model(CPU)
    taken = {**model.state_dict(), "array": model.blocks[1]["up"].weight.numpy()}
    values = {key: copy.deepcopy(tensor) for key, tensor in taken.items()}
    views[1].patch_model(CPU)
    assert same(shown(model), want)
    views[1].unpatch_model()
    assert_untouched(model, before)
    assert all((torch.as_tensor(taken[key] == values[key])).all() for key in taken)
    taken.clear()
    views[1].patch_model(CPU)
    assert same(shown(model), want)
    assert KEY in lends(views[1])


def test_whoever_holds_the_original_sees_it_unchanged(model: Network) -> None:
    view, want, before = view_of(model, 1), expected(model, 1), snapshot(model)
    held, plain = model.blocks[0]["up"].weight, shown(model)
    view.patch_model(CPU)
    assert same(shown(model), want)
    assert lends(view) == view.patches.keys() - {KEY}
    assert torch.equal(held, plain[KEY])
    view.unpatch_model()
    assert_untouched(model, before)


def test_a_weight_changed_by_hand_keeps_the_change(model: Network) -> None:
    model.blocks[0]["up"].weight.data[3, 4] += 1
    view, before, want = view_of(model, 1), snapshot(model), expected(model, 1)
    view.patch_model(CPU)
    assert lends(view) == view.patches.keys() - {KEY}
    assert same(shown(model), want)
    view.unpatch_model()
    assert_untouched(model, before)
    model.half()
    view.patch_model(CPU)
    view.unpatch_model()
    assert torch.equal(model.blocks[0]["up"].weight, before[KEY][1].half())


def test_a_weight_changed_while_it_is_patched_is_put_back(model: Network) -> None:
    view, before = view_of(model, 1), snapshot(model)
    view.patch_model(CPU)
    model.blocks[0]["up"].weight.data.zero_()
    model.blocks[1]["up"].weight = nn.Parameter(torch.zeros(1), requires_grad=False)
    model.half()
    view.unpatch_model()
    state = model.state_dict(keep_vars=True)
    for key in view.patches:
        assert id(state[key]) == before[key][0]
        assert torch.equal(state[key], before[key][1]), key


def test_patches_of_another_kind_are_put_beside_and_give_way_again(model: Network) -> None:
    plain, other, before = view_of(model, 1), ModelPatcher(model, CPU, CPU), snapshot(model)
    want = expected(model, 1)
    other.add_patches({KEY: (torch.ones_like(model.state_dict()[KEY]),)})
    for _ in range(2):
        plain.patch_model(CPU)
        assert lends(plain) == plain.patches.keys()
        assert same(shown(model), want)
        other.patch_model(CPU)
        assert not lends(other)
        assert torch.equal(model.blocks[0]["up"].weight, before[KEY][1] + 1)
    other.unpatch_model()
    assert_untouched(model, before)


@pytest.mark.parametrize("failing", range(1, 7))
def test_a_cancelled_load_puts_everything_back(
    failing: int, model: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception from any step, such as one raised into the thread from outside."""
    from comfy.weights import row_blocks

    views, before, add, left = [view_of(model, 1), view_of(model, 2)], snapshot(model), None, 0
    want, add = expected(model, 2), row_blocks._add

    def interrupted(*args: Any) -> None:
        nonlocal left
        add(*args)
        left -= 1
        if left == 0:
            raise interrupt.InterruptProcessingException

    monkeypatch.setattr(row_blocks, "_add", interrupted)
    for first in (False, True):
        if first:
            views[0].patch_model(CPU)
        left = failing
        if failing <= 4:
            with pytest.raises(interrupt.InterruptProcessingException):
                views[1].patch_model(CPU)
            assert_untouched(model, before)
            assert not views[1].residence.lent
        left = 0
        views[1].patch_model(CPU)
        assert same(shown(model), want)
        assert lends(views[1]) == views[1].patches.keys()
        views[1].unpatch_model()
    assert_untouched(model, before)


def test_a_way_back_that_is_interrupted_can_be_taken_again(
    model: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    from comfy.weights.lending import LentWeight

    view, before, want = view_of(model, 1), snapshot(model), expected(model, 1)
    take_back, left = LentWeight.take_back, 2

    def interrupted(self: LentWeight) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            self.weight.data.zero_()
            raise interrupt.InterruptProcessingException
        take_back(self)

    monkeypatch.setattr(LentWeight, "take_back", interrupted)
    view.patch_model(CPU)
    with pytest.raises(interrupt.InterruptProcessingException):
        view.unpatch_model()
    view.patch_model(CPU)  # nothing is taken for shown that is not
    assert same(shown(model), want)
    left = 3
    with pytest.raises(interrupt.InterruptProcessingException):
        view.unpatch_model()
    view.unpatch_model()
    assert_untouched(model, before)


def test_a_layer_reached_by_two_paths_is_put_back_under_both_keys(model: Network) -> None:
    model.second = model.blocks[0]["up"]
    before, view = snapshot(model), view_of(model, 1)
    view.add_patches({"second.weight": lora_for(model, 2)[KEY]})
    other = view_of(model, 3)
    for _ in range(2):
        view.patch_model(CPU)
        assert same(shown(model), shown(view_of_both(copy.deepcopy(model), before)))
        other.patch_model(CPU)
        view.patch_model(CPU)
        view.unpatch_model()
        assert_untouched(model, before)


def view_of_both(model: Network, before: Any) -> nn.Module:
    for key, (_, contents) in before.items():
        model.state_dict()[key].copy_(contents)
    view = view_of(model, 1)
    view.add_patches({"second.weight": lora_for(model, 2)[KEY]})
    return view.patch_model(CPU)


def test_tied_weights_are_patched_beside(model: Network) -> None:
    model.blocks[1]["up"].weight = model.blocks[0]["up"].weight
    before, view, want = snapshot(model), view_of(model, 1), expected(model, 1)
    view.patch_model(CPU)
    assert same(shown(model), want)
    view.unpatch_model()
    assert_untouched(model, before)


class Base(nn.Module):
    """A base module around a network that another one may have as well."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_base_modules_that_share_layers_take_turns(model: Network) -> None:
    bases, before = [Base(model), Base(model), Base(copy.copy(model))], snapshot(model)
    views = [ModelPatcher(base, CPU, CPU) for base in bases]
    for seed, view in enumerate(views):
        view.add_patches({f"inner.{k}": v for k, v in lora_for(model, seed).items()}, 0.7)
    want = [expected(model, seed) for seed in range(3)]
    for number in (0, 1, 2, 0, 2, 1):
        views[number].patch_model(CPU)
        assert lends(views[number])
        assert same(shown(model), want[number])
    for view in views:
        view.detach()
    assert_untouched(model, before)


def test_base_modules_that_share_parameters_do_not_see_each_other(tmp_path: Path) -> None:
    model, sibling = network_from_file(tmp_path), network_from_file(tmp_path, seed=1)
    sibling.blocks[0]["up"].weight = model.blocks[0]["up"].weight
    before, other, view = snapshot(model), snapshot(sibling), view_of(model, 1)
    view.patch_model(CPU)
    assert_untouched(sibling, other)
    relative = view_of(sibling, 1)
    relative.patch_model(CPU)
    view.unpatch_model()
    assert_untouched(model, before)
    relative.unpatch_model()
    assert_untouched(sibling, other)


def hook_group(change: dict[str, Any]) -> HookGroup:
    hook = WeightHook()
    hook.weights, hook.need_weight_init = change, False
    group = HookGroup()
    group.add(hook)
    return group


def test_hooks_lie_on_top(model: Network) -> None:
    view, before, want = view_of(model, 1), snapshot(model), expected(model, 1)
    view.patch_model(CPU)
    group = hook_group({KEY: (torch.ones(64, 32),)})
    view.register_all_hook_patches(group, create_target_dict(EnumWeightTarget.Model), {})
    view.apply_hooks(hooks=group)
    assert torch.equal(model.blocks[0]["up"].weight, want[KEY] + 1)
    (weight, _), *_ = view.get_key_patches()[KEY]
    assert torch.equal(weight, before[KEY][1])
    view.apply_hooks(hooks=None)
    assert same(shown(model), want)
    view.apply_hooks(hooks=group)
    view.unpatch_model()
    assert_untouched(model, before)


class Own(ModelPatcher):
    """A pack's patcher with a patching of its own, as the records are public."""

    Record = collections.namedtuple("Record", ["weight", "inplace_update"])

    def patch_weight_to_device(self, key: str, *args: Any, **kwargs: Any) -> Any:
        if key != KEY:
            return super().patch_weight_to_device(key, *args, **kwargs)
        weight = self.model.blocks[0]["up"].weight
        self.backup.setdefault(key, self.Record(weight, False))
        self.model.blocks[0]["up"].weight = nn.Parameter(weight + 1, requires_grad=False)
        return None


class Undoing(ModelPatcher):
    """A pack's patcher that puts weights back itself."""

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        for key, record in list(self.backup.items()):
            path, _, name = key.rpartition(".")
            setattr(self.model.get_submodule(path), name, record.weight)
        self.backup.clear()
        super().unpatch_model(device_to, unpatch_weights)


@pytest.mark.parametrize("kind", [Own, Undoing])
def test_patchers_of_packs_work_on_the_same_records(
    kind: type[ModelPatcher], model: Network
) -> None:
    view, plain, before, want = view_of(model, 1, kind), view_of(model, 2), snapshot(model), {}
    want = expected(model, 1)
    if kind is Own:
        want[KEY] = before[KEY][1] + 1
    for _ in range(2):
        plain.patch_model(CPU)
        view.patch_model(CPU)
        assert same(shown(model), want)
        view.unpatch_model()
        assert_untouched(model, before)


@pytest.mark.parametrize("inplace", [False, True])
def test_weights_patched_one_by_one(inplace: bool, model: Network) -> None:
    view, before, want = view_of(model, 1), snapshot(model), expected(model, 1)
    for in_place in (inplace, False, True):
        for key in view.patches:
            view.patch_weight_to_device(key, inplace_update=in_place)
        assert same(shown(model), want)
    view.unpatch_model()
    assert_untouched(model, before)


def test_forced_patching_computes_anew_in_place(model: Network) -> None:
    view, want, places = view_of(model, 1), expected(model, 1), addresses(model)
    view.patch_model(CPU)
    view.patch_model(CPU, force_patch_weights=True)
    assert same(shown(model), want)
    assert addresses(model) == places


def test_arithmetic_of_somebody_else_is_asked(
    model: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, before, own = view_of(model, 1), snapshot(model), arithmetic.calculate_weight
    view.patch_model(CPU)
    want = {key: tensor + (key in view.patches) for key, tensor in shown(model).items()}
    view.unpatch_model()
    monkeypatch.setattr(arithmetic, "calculate_weight", lambda *a, **k: own(*a, **k) + 1)
    view.patch_model(CPU)
    assert not lends(view)
    for key, tensor in shown(model).items():
        torch.testing.assert_close(tensor, want[key])
    view.unpatch_model()
    assert_untouched(model, before)


def test_from_the_cpu_to_a_device_and_back(accelerator: Any, model: Network) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    before, want = snapshot(model), expected(model, 1)
    here, there = view_of(model, 1), ModelPatcher(model, device, CPU)
    there.add_patches(lora_for(model, 1), 0.7)
    for budget in (0, 1):
        here.patch_model(CPU)
        assert lends(here)
        assert same(shown(model), want)
        there.patch_model(device, budget)
        assert not lends(there)
        with torch.inference_mode():
            out = model(X.to(device), TOKENS.to(device)).cpu()
        here.patch_model(CPU)
        with torch.inference_mode():
            torch.testing.assert_close(model(X, TOKENS), out)
    here.detach()
    gc.collect()
    assert torch.accelerator.memory_allocated(0) == 0
    assert_untouched(model, before)


def test_a_model_that_goes_leaves_nothing(tmp_path: Path) -> None:
    from comfy.weights import sources

    gc.collect()
    noted = len(sources._sources)
    model = network_from_file(tmp_path)
    view = view_of(model, 1)
    view.patch_model(CPU)
    assert len(sources._sources) > noted
    del model, view
    assert len(sources._sources) == noted  # without a collection: nothing goes in a circle


def test_weights_loaded_while_nodes_run_can_be_patched_at_any_time(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = network_from_file(tmp_path)
        before = snapshot(model)
    want = expected(model, 1)
    view = view_of(model, 1)
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            view.patch_model(CPU)
            assert lends(view)
            assert same(shown(model), want)
        view.get_key_patches()
        with torch.inference_mode(not inside):
            view.unpatch_model()
        assert_untouched(model, before)
        assert repr(model.blocks[0]["up"].weight)


def test_a_lora_that_does_not_fit_is_said_and_nothing_changes(model: Network) -> None:
    before, view = snapshot(model), view_of(model, 1)
    misfit = LoRAAdapter(set(), (torch.ones(5, 2), torch.ones(2, 7), 1.0, None, None, None))
    view.add_patches({KEY: misfit})
    view.patch_model(CPU)
    view.unpatch_model()
    assert_untouched(model, before)
