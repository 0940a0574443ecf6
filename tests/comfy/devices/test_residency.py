"""The planner: sets of models, who goes first, shares, clones, dead views, full devices."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest
import torch

from comfy import ops
from comfy.devices import memory, prompt_models, residency
from comfy.devices.policies import VRAMState
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.patcher import ModelPatcher
from tests.support.accelerator import CPU, Network, bytes_of, simulated_accelerator

FLOOR = 0.1
"""Share of a small device that inference memory takes."""


def loaded(*patchers: ModelPatcher) -> list[int]:
    return [patcher.loaded_size() for patcher in patchers]


def models(fakegpu: Any, count: int, width: int = 64) -> list[ModelPatcher]:
    device = torch.device(f"{fakegpu.NAME}:0")
    return [ModelPatcher(Network(width, seed=i), device, CPU) for i in range(count)]


def room_for(fakegpu: Any, size: float) -> None:
    """Set the capacity so that weights of `size` bytes fit beside the inference memory."""
    fakegpu.set_capacity(int(size / (1 - FLOOR)) + 4096)


def test_a_set_that_fits_becomes_wholly_resident(accelerator: Any) -> None:
    a, b = models(accelerator, 2)
    residency.load_models_gpu([a, b])
    assert loaded(a, b) == [a.model_size(), b.model_size()]
    assert residency.loaded_models() == [b, a]


def test_loading_again_moves_nothing(accelerator: Any) -> None:
    a, b = models(accelerator, 2)
    residency.load_models_gpu([a, b])
    with accelerator.transfers() as moved:
        residency.load_models_gpu([b, a])
    assert moved["h2d_bytes"] == 0


def test_the_least_recently_used_model_goes_first_and_only_in_part(accelerator: Any) -> None:
    a, b, c = models(accelerator, 3)
    size = a.model_size()
    room_for(accelerator, 2.6 * size)
    residency.load_models_gpu([a])
    residency.load_models_gpu([b])
    residency.load_models_gpu([a])
    residency.load_models_gpu([c])
    assert loaded(a, c) == [size, size]
    assert 0 < b.loaded_size() < size


def test_what_the_run_needs_is_never_unloaded(accelerator: Any) -> None:
    a, b, c = models(accelerator, 3)
    size = a.model_size()
    room_for(accelerator, 2.1 * size)
    residency.load_models_gpu([a])
    residency.load_models_gpu([b])
    residency.load_models_gpu([a, c])
    assert loaded(a, c) == [size, size]
    assert b.loaded_size() < size * 0.2


def test_a_set_too_large_keeps_the_small_models_whole_and_streams_the_largest(
    accelerator: Any,
) -> None:
    (small,) = models(accelerator, 1, width=32)
    (large,) = models(accelerator, 1, width=128)
    room_for(accelerator, small.model_size() + 0.6 * large.model_size())
    residency.load_models_gpu([large, small])
    assert small.loaded_size() == small.model_size()
    assert 0 < large.loaded_size() < 0.6 * large.model_size()
    assert memory.get_free_memory(large.load_device) > 0


def test_memory_the_run_asks_for_stays_free(accelerator: Any) -> None:
    (a,) = models(accelerator, 1, width=128)
    accelerator.set_capacity(4 * a.model_size())
    wanted = 3.5 * a.model_size()
    residency.load_models_gpu([a], memory_required=wanted)
    assert memory.get_free_memory(a.load_device) >= wanted
    assert a.loaded_size() < a.model_size()


def test_only_the_minimum_is_kept_from_weights_when_one_is_given(accelerator: Any) -> None:
    (a,) = models(accelerator, 1, width=128)
    accelerator.set_capacity(4 * a.model_size())
    residency.load_models_gpu(
        [a], memory_required=3.5 * a.model_size(), minimum_memory_required=a.model_size()
    )
    assert a.loaded_size() == a.model_size()


def test_views_of_one_module_share_one_entry(accelerator: Any) -> None:
    (a,) = models(accelerator, 1)
    view = a.clone()
    residency.load_models_gpu([a])
    residency.load_models_gpu([view])
    assert len(residency.current_loaded_models) == 1
    assert residency.current_loaded_models[0].model is view


def test_a_view_that_died_hands_its_entry_to_a_living_one(accelerator: Any) -> None:
    (a,) = models(accelerator, 1)
    view = a.clone()
    residency.load_models_gpu([view])
    view.parent = None
    del view
    gc.collect()
    assert residency.loaded_models() == [a]
    residency.unload_all_models()
    assert torch.accelerator.memory_allocated(0) == 0


def test_weights_go_when_all_views_are_gone(accelerator: Any) -> None:
    (a,) = models(accelerator, 1)
    residency.load_models_gpu([a])
    del a
    gc.collect()
    residency.cleanup_models()
    assert residency.current_loaded_models == []
    assert torch.accelerator.memory_allocated(0) == 0


def test_models_that_fit_in_pairs_are_not_all_reloaded_every_round(accelerator: Any) -> None:
    trio = models(accelerator, 3)
    size = trio[0].model_size()
    room_for(accelerator, 2.05 * size)
    for _ in range(3):  # the planner learns that least-recently-used fails here
        for patcher in trio:
            residency.load_models_gpu([patcher])
    rounds = 6
    with accelerator.transfers() as moved:
        for _ in range(rounds):
            for patcher in trio:
                residency.load_models_gpu([patcher])
    loads_per_round = moved["h2d_bytes"] / size / rounds
    assert loads_per_round <= 2.0  # all three would be 3; the best possible order needs 1.5


def test_additional_models_are_loaded_with_their_owner(accelerator: Any) -> None:
    a, b, c = models(accelerator, 3)
    b.set_additional_models("more", [c])
    a.set_additional_models("more", [b])
    residency.load_models_gpu([a])
    assert loaded(a, b, c) == [a.model_size()] * 3


def test_running_out_while_loading_is_met_with_less(accelerator: Any) -> None:
    a, b = models(accelerator, 2)
    residency.load_models_gpu([a])
    accelerator.fail_allocation(5, 1)
    residency.load_models_gpu([b])
    assert 0 < b.loaded_size() <= b.model_size()
    assert a.loaded_size() == 0


def test_running_out_twice_says_who_holds_what(accelerator: Any) -> None:
    (a,) = models(accelerator, 1)
    accelerator.fail_allocation(2, 1000)
    with pytest.raises(residency.OutOfMemoryReport, match=r"wanted: Network .* MiB"):
        residency.load_models_gpu([a])
    accelerator.fail_allocation(-1)
    assert a.loaded_size() == 0
    residency.load_models_gpu([a])
    assert a.loaded_size() == a.model_size()


def test_high_vram_never_streams(accelerator: Any) -> None:
    with simulated_accelerator(vram_state=VRAMState.HIGH_VRAM) as fakegpu:
        (a,) = models(fakegpu, 1)
        fakegpu.set_capacity(int(a.model_size() * 1.05))
        residency.load_models_gpu([a])
        assert a.loaded_size() == a.model_size()


def test_no_vram_streams_everything_that_can(accelerator: Any) -> None:
    with simulated_accelerator(vram_state=VRAMState.NO_VRAM) as fakegpu:
        (a,) = models(fakegpu, 1)
        residency.load_models_gpu([a])
        assert a.loaded_size() < 100


def test_without_smart_memory_others_are_unloaded_at_once(accelerator: Any) -> None:
    with simulated_accelerator(smart_memory=False) as fakegpu:
        a, b = models(fakegpu, 2)
        residency.load_models_gpu([a])
        residency.load_models_gpu([b])
        assert loaded(a, b) == [0, b.model_size()]


def test_idle_models_are_unloaded_after_the_set_time(accelerator: Any) -> None:
    with simulated_accelerator(idle_unload_s=60.0) as fakegpu:
        (a,) = models(fakegpu, 1)
        residency.load_models_gpu([a])
        last = residency.current_loaded_models[0].last_used_s
        assert residency.unload_idle(now_s=last + 59) == []
        assert len(residency.unload_idle(now_s=last + 61)) == 1
        assert a.loaded_size() == 0


def test_a_run_is_not_idle_however_long_it_takes(accelerator: Any) -> None:
    with simulated_accelerator(idle_unload_s=60.0) as fakegpu:
        (a,) = models(fakegpu, 1)
        with prompt_models.PROMPT_MODELS.running():
            residency.load_models_gpu([a])
            entry = residency.current_loaded_models[0]
            entry.last_used_s -= 1000
            assert residency.unload_idle() == []
        assert residency.unload_idle() == []  # idle since the run's end, not since its beginning
        assert residency.unload_idle(now_s=entry.last_used_s + 61) == [entry]


def test_each_device_is_planned_for_itself(accelerator: Any) -> None:
    accelerator.set_device_count(2)
    a, b = models(accelerator, 2)
    b.load_device = torch.device(f"{accelerator.NAME}:1")
    room_for(accelerator, 1.1 * a.model_size())
    residency.load_models_gpu([a, b])
    assert loaded(a, b) == [a.model_size(), b.model_size()]
    assert torch.accelerator.memory_allocated(1) == b.model_size()


@pytest.mark.parametrize("kind", [ModelPatcher, ModelPatcherDynamic])
def test_a_model_that_changes_its_device_keeps_to_the_room_there(
    accelerator: Any, kind: type[ModelPatcher]
) -> None:
    accelerator.set_device_count(2)
    model = Network(64, operations=ops.manual_cast)
    size = bytes_of(model)
    devices = [torch.device(f"{accelerator.NAME}:{index}") for index in range(2)]
    views = [kind(model, device, CPU) for device in (CPU, *devices)]
    accelerator.set_capacity(int(1.5 * size), 1)
    for last, now in ((0, 2), (1, 2), (2, 1), (1, 0), (0, 2)):
        residency.load_models_gpu([views[last]])
        residency.load_models_gpu([views[now]], memory_required=size if now == 2 else 0)
        fits = now != 2
        with torch.inference_mode():
            device = views[now].load_device
            model(torch.randn(1, 4, 4, 4, device=device), torch.tensor([1]).to(device))
        assert (views[now].loaded_size() > 0.9 * size) == fits, (last, now)
        assert views[now].loaded_size() <= (size if fits else 0.55 * size)
    residency.unload_all_models()
    assert torch.accelerator.memory_allocated(0) == torch.accelerator.memory_allocated(1) == 0


def test_the_report_names_model_device_bytes_and_state(accelerator: Any) -> None:
    model = Network(operations=ops.manual_cast, dtype=torch.float16)
    patcher = ModelPatcher(model, torch.device(f"{accelerator.NAME}:0"), CPU)
    residency.load_models_gpu([patcher])
    (row,) = residency.memory_report()
    assert (row["model"], row["dtype"]) == ("Network", "float16")
    assert row["device"] == f"{accelerator.NAME}:0"
    assert row["loaded_bytes"] == row["size_bytes"] == bytes_of(model)
    assert row["state"] == "resident"


def test_tied_weights_and_buffers_outside_files_count_as_they_are_held(accelerator: Any) -> None:
    model = Network()
    model.blocks[1]["up"].weight = model.blocks[0]["up"].weight
    model.register_buffer("sigmas", torch.zeros(1000), persistent=False)
    patcher = ModelPatcher(model, torch.device(f"{accelerator.NAME}:0"), CPU)
    residency.load_models_gpu([patcher])
    allocated = torch.accelerator.memory_allocated(0)
    assert patcher.loaded_size() == patcher.model_size() == allocated
    (row,) = residency.memory_report()
    assert (row["state"], row["offloaded_bytes"]) == ("resident", 0)


def test_the_report_can_be_asked_for_while_models_are_loaded(accelerator: Any) -> None:
    model = Network(width=32, depth=24, operations=ops.manual_cast)
    one = ModelPatcher(model, torch.device(f"{accelerator.NAME}:0"), CPU)
    two = one.clone()
    two.add_patches({f"blocks.{i}.up.bias": (torch.ones(64),) for i in range(24)})
    failures: list[BaseException] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            try:
                residency.memory_report()
            except RuntimeError as error:
                failures.append(error)

    pause = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for view in (one, two, one, two):
            residency.load_models_gpu([view])
            view.partially_unload(CPU, 20_000)
    finally:
        done.set()
        asking.join()
        sys.setswitchinterval(pause)
    assert failures == []


def test_a_line_per_load_says_what_was_moved(
    accelerator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (one,) = models(accelerator, 1)
    two = one.clone()
    two.add_patches({"out.bias": (torch.ones(4),)})
    with caplog.at_level("INFO", "comfy.devices.loaded_model"):
        for view in (one, one, two, one):
            residency.load_models_gpu([view])
        residency.unload_all_models()
        residency.load_models_gpu([one])
    moved = [record.args[4] for record in caplog.records]  # type: ignore[index, call-overload]
    whole, patched = one.model_size() / 2**20, one.model.out.bias.nbytes / 2**20
    assert moved == pytest.approx([whole, patched, patched, whole])


def test_on_the_cpu_loading_patches_without_moving() -> None:
    model = Network()
    patcher = ModelPatcher(model, CPU, CPU)
    identity = {k: id(v) for k, v in model.named_parameters()}
    residency.load_models_gpu([patcher])
    assert {k: id(v) for k, v in model.named_parameters()} == identity
    patcher.add_patches({"out.weight": (torch.ones_like(model.out.weight),)})
    plain = model.out.weight.clone()
    residency.load_models_gpu([patcher])
    assert torch.equal(model.out.weight, plain + 1)
    residency.unload_all_models()
    assert torch.equal(model.out.weight, plain)


def test_a_run_that_is_short_of_memory_gets_room_and_one_more_try(accelerator: Any) -> None:
    bystander, runner = models(accelerator, 2)
    residency.load_models_gpu([bystander])
    residency.load_models_gpu([runner])
    device = runner.load_device
    attempts = []

    def run() -> int:
        attempts.append(runner.loaded_size())
        held = torch.empty(10_000, device=device)
        if len(attempts) == 1:
            accelerator.fail_allocation(0, 1)
        torch.empty(10_000, device=device)
        return held.numel()

    assert residency.run_or_make_room(runner, run) == 10_000
    assert len(attempts) == 2
    assert bystander.loaded_size() == 0
    assert 0 < attempts[1] <= 0.6 * attempts[0]
    assert torch.accelerator.memory_allocated(0) == runner.loaded_size()


def test_a_run_that_stays_short_of_memory_reports_it(accelerator: Any) -> None:
    (runner,) = models(accelerator, 1)
    residency.load_models_gpu([runner])

    def run() -> None:
        raise torch.OutOfMemoryError("wanted the moon")

    with pytest.raises(
        residency.OutOfMemoryReport, match=r"not enough memory on .*wanted: Network"
    ):
        residency.run_or_make_room(runner, run)


def test_models_of_the_running_prompt_go_last(accelerator: Any) -> None:
    old, recent, newcomer = models(accelerator, 3)
    room_for(accelerator, 2.05 * old.model_size())
    residency.load_models_gpu([old])
    residency.load_models_gpu([recent])
    tracker = prompt_models.PROMPT_MODELS
    tracker.start()
    tracker.add([old.clone(), "text", 3])
    residency.load_models_gpu([newcomer])
    assert old.loaded_size() == old.model_size()
    assert recent.loaded_size() < recent.model_size() * 0.1
    assert tracker.models() == [old.model]
    tracker.end()
    assert tracker.models() == []


def test_the_usual_reserve_is_a_share_of_a_small_device(accelerator: Any) -> None:
    with simulated_accelerator(reserve_vram_bytes=None) as fakegpu:
        (a,) = models(fakegpu, 1)
        device = a.load_device
        fakegpu.set_capacity(2 * a.model_size())
        residency.load_models_gpu([a])
        assert a.loaded_size() == a.model_size()
        assert memory.reserve_of(device) == memory.get_total_memory(device) // 10
        fakegpu.set_capacity(8 << 30)
        assert memory.reserve_of(device) == memory.EXTRA_RESERVED_VRAM
    with simulated_accelerator(reserve_vram_bytes=1 << 30):
        assert memory.reserve_of(device) == 1 << 30


def test_each_device_keeps_a_floor_of_its_own(accelerator: Any) -> None:
    accelerator.set_device_count(2)
    accelerator.set_capacity(1 << 20, 1)
    (a,) = models(accelerator, 1)
    a.load_device = torch.device(f"{accelerator.NAME}:1")
    residency.load_models_gpu([a])  # the first device's floor would leave no room here
    assert a.loaded_size() == a.model_size()


def test_models_are_in_use_until_their_prompt_ends(accelerator: Any) -> None:
    (a,) = models(accelerator, 1)
    with prompt_models.PROMPT_MODELS.running():
        residency.load_models_gpu([a])
        assert residency.loaded_models(only_currently_used=True) == [a]
    assert residency.loaded_models(only_currently_used=True) == []
    assert residency.loaded_models() == [a]


def test_patches_kept_for_streamed_weights_are_counted_and_made_room_for(
    accelerator: Any,
) -> None:
    (a,) = models(accelerator, 1, width=128)
    weight = a.model.blocks[0]["up"].weight
    a.add_patches({"blocks.0.up.weight": (torch.zeros_like(weight),)})
    room_for(accelerator, a.model_size() * 0.7)
    residency.load_models_gpu([a])
    x = torch.zeros(1, 4, 4, 4, device=a.load_device)
    with torch.inference_mode():
        a.model(x, torch.tensor([1], device=a.load_device))
    (row,) = residency.memory_report()
    assert row["patch_bytes"] in (0, weight.nbytes)  # none where that layer is resident
    assert row["loaded_bytes"] + row["patch_bytes"] <= a.model_size() * 0.7


@pytest.mark.parametrize("kind", [ModelPatcher, ModelPatcherDynamic])
def test_a_resident_model_makes_room_for_a_larger_run_of_its_own(
    accelerator: Any, kind: type[ModelPatcher]
) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    small, large = (
        kind(Network(width=width, operations=ops.manual_cast), device, torch.device("cpu"))
        for width in (32, 64)
    )
    sizes = [patcher.model_size() for patcher in (small, large)]
    accelerator.set_capacity(int(sum(sizes) * 1.5))
    residency.load_models_gpu([small, large], force_full_load=True)
    assert [small.loaded_size(), large.loaded_size()] == sizes
    wanted = sum(sizes)  # beside the weights, of which a third therefore has to go
    residency.load_models_gpu([small, large], memory_required=wanted)
    assert memory.get_free_memory(device) >= wanted
    assert small.loaded_size() == sizes[0]  # the small one stays whole
    assert 0 < large.loaded_size() < sizes[1]
    run_on_device(large, device)
    residency.load_models_gpu([small, large], memory_required=0)
    run_on_device(large, device)
    looked_up = large.model.embed.weight.nbytes  # on demand only rows of it come
    assert large.loaded_size() >= sizes[1] - looked_up  # what went comes back when it fits again


def run_on_device(patcher: ModelPatcher, device: torch.device) -> None:
    with torch.inference_mode():
        patcher.model(torch.zeros(1, 4, 4, 4, device=device), torch.zeros(1, device=device).long())
