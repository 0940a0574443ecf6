"""What code of a step does to the models of its run: the run goes on with its patches and hooks.

A wrapper frees memory, fails to load something, or samples on the same network in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import comfy.hooks
import comfy.model_management as mm
import comfy.sample
import comfy.samplers
import comfy.sd
from comfy.devices import residency, running
from comfy.model_patcher import ModelPatcher, ModelPatcherDynamic
from tests.comfy.patching.test_packs_sampling import NEGATIVE, POSITIVE, close
from tests.support import tiny_checkpoint
from tests.support.accelerator import CPU, Network, assert_untouched, snapshot

BLOCK = "diffusion_model.middle_block.1.transformer_blocks.0.attn1."
KINDS = [ModelPatcher, ModelPatcherDynamic]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("steps") / "tiny.safetensors")


@pytest.fixture
def model(checkpoint: Path, accelerator: Any) -> Any:
    return comfy.sd.load_checkpoint_guess_config(
        str(checkpoint), output_vae=False, output_clip=False
    )[0]


def change(seed: int) -> Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)) * 0.2


def hooks_of(seed: int) -> Any:
    group = comfy.hooks.create_hook_lora({}, 1.0, 0.0)
    group.hooks[0].weights = {BLOCK + "to_k.weight": (change(seed),)}
    group.hooks[0].need_weight_init = False
    return group


def view_of(model: Any, kind: type[ModelPatcher] = ModelPatcher) -> Any:
    view = kind(model.model, model.load_device, model.offload_device).clone()
    view.add_patches({BLOCK + "to_q.weight": (change(9),)})
    return view


def sample(view: Any, hooks: int | None = None, steps: int = 2) -> Tensor:
    """A run whose hooks, if there are any, are those of a seed."""
    options = {} if hooks is None else {"hooks": hooks_of(hooks)}
    latent = torch.zeros(2, 4, 8, 8)
    return comfy.sample.sample(
        view, comfy.sample.prepare_noise(latent, 3, None), steps, 4.0, "euler", "normal",
        [[POSITIVE, dict(options)]], [[NEGATIVE, dict(options)]], latent, disable_pbar=True, seed=3,
    )  # fmt: skip


def act_in_first_step(view: Any, act: Callable[[], Any]) -> None:
    """Have a wrapper act once, before the network is called."""

    def wrapper(apply_model: Callable[..., Tensor], args: dict[str, Any]) -> Tensor:
        if "model_function_wrapper" in view.model_options:
            del view.model_options["model_function_wrapper"]
            act()
        return apply_model(args["input"], args["timestep"], **args["c"])

    view.set_model_unet_function_wrapper(wrapper)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", [0, 3])
def test_a_device_that_is_full_as_hooks_are_shown_again(
    model: Any, accelerator: Any, kind: type[ModelPatcher], point: int
) -> None:
    want, plain = sample(view_of(model), hooks=12), sample(view_of(model))
    assert not close(want, plain)

    def act() -> None:
        accelerator.fail_allocation(point, 1)
        mm.free_memory(1e30, model.load_device)

    view = view_of(model, kind)
    act_in_first_step(view, act)
    assert close(sample(view, hooks=12), want)
    accelerator.fail_allocation(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hooks", [None, 12])
def test_a_step_goes_on_after_a_load_that_failed(
    model: Any, accelerator: Any, kind: type[ModelPatcher], hooks: int | None
) -> None:
    want, failures = sample(view_of(model), hooks), []
    large = ModelPatcher(Network(128), model.load_device, CPU)
    accelerator.set_capacity(740_000)
    mm.unload_all_models()

    def act() -> None:
        used = mm.loaded_models(only_currently_used=True)
        try:
            mm.load_models_gpu([*used, large], force_full_load=True)
        except torch.OutOfMemoryError as error:
            failures.append(str(error))

    view = view_of(model, kind)
    act_in_first_step(view, act)
    assert close(sample(view, hooks), want)
    assert len(failures) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner_hooks", [None, 77])
@pytest.mark.parametrize("inner", ["the same view", "a clone", "another view"])
def test_a_run_in_a_step_of_another_disturbs_neither(
    model: Any, kind: type[ModelPatcher], inner: str, inner_hooks: int | None
) -> None:
    before = snapshot(model.model)

    def inner_view(view: Any) -> Any:
        made = view if inner == "the same view" else view.clone()
        if inner == "another view":
            made.add_patches({BLOCK + "to_k.weight": (change(31),)})
        return made

    base, made = view_of(model), []
    want, inner_want = sample(base, 12), sample(inner_view(base), inner_hooks, steps=1)

    def act() -> None:
        used = mm.loaded_models(only_currently_used=True)
        made.append(sample(inner_view(view), inner_hooks, steps=1))
        mm.load_models_gpu(used)
        assert view.model.current_patcher is view

    view = view_of(model, kind)
    act_in_first_step(view, act)
    assert close(sample(view, 12), want)
    assert close(made[0], inner_want)
    assert view.model.current_patcher is None
    mm.unload_all_models()
    assert_untouched(model.model, before)


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_evaluated_alone_shows_no_hooks_of_others(
    model: Any, kind: type[ModelPatcher]
) -> None:
    alone: list[Tensor] = []
    shown: list[Any] = [None, hooks_of(12)]

    def post_cfg(args: dict[str, Any]) -> Tensor:
        args["model"].current_patcher.apply_hooks(hooks=shown.pop())
        alone.extend(
            comfy.samplers.calc_cond_batch(
                args["model"], [args["uncond"]], args["input"], args["sigma"], {}
            )
        )
        return args["denoised"]

    view = view_of(model, kind)
    view.set_model_sampler_post_cfg_function(post_cfg)
    view.register_all_hook_patches(shown[1], {"target": comfy.hooks.EnumWeightTarget.Model})
    for _ in range(2):
        view.hook_patches_backup = None  # registered for good
        sample(view, steps=1)
    assert close(alone[0], alone[1])


def test_a_cancelled_call_is_forgotten(model: Any) -> None:
    mm.load_models_gpu([model])
    entry = mm.current_loaded_models[0]
    block = running.running(model, [entry])
    block.__enter__()
    assert running.is_running(entry)
    del block  # as an exception from outside may leave it
    assert not running.is_running(entry)
    mm.unload_all_models()
    assert not mm.current_loaded_models


FREEING: dict[str, Callable[[Any], Any]] = {
    "unload_all_models": lambda view: residency.unload_all_models(),
    "free_memory": lambda view: residency.free_memory(residency.EVERYTHING, view.load_device),
    "unload_model_clones": lambda view: residency.unload_model_clones(view),
}


@pytest.mark.parametrize("within", [True, False], ids=["within a call", "after one"])
@pytest.mark.parametrize("way", FREEING)
@pytest.mark.parametrize("kind", KINDS)
def test_another_thread_takes_weights_between_calls_of_the_network(
    model: Any, kind: type[ModelPatcher], way: str, within: bool
) -> None:
    before = snapshot(model.model)
    want = sample(view_of(model, kind), 5, steps=3)
    view, sizes = view_of(model, kind), []

    def look() -> None:
        sizes.append(view.loaded_size())
        if len(sizes) == 2:
            thread = threading.Thread(target=FREEING[way], args=(view,))
            thread.start()
            thread.join()
            assert view.loaded_size() == sizes[-1], "a layer in use lost its weights"

    if within:
        view.set_model_attn1_patch(lambda q, k, v, _: look() or (q, k, v))
    else:
        view.set_model_sampler_post_cfg_function(lambda args: look() or args["denoised"])
    assert close(sample(view, 5, steps=3), want)
    assert sizes[1] > view.model_size() / 2
    assert sizes[-1] < sizes[1], "what the other thread wanted was never freed"
    residency.unload_all_models()
    assert_untouched(model.model, before)


def test_a_busy_run_of_one_thread_outlives_the_freeing_of_another(model: Any) -> None:
    want, view, done = sample(view_of(model), 5, steps=3), view_of(model), threading.Event()

    def free_often() -> None:
        while not done.wait(0.002):
            residency.free_memory(residency.EVERYTHING, view.load_device)

    thread, steps = threading.Thread(target=free_often), []

    def end_in_last_step(args: dict[str, Any]) -> Tensor:
        steps.append(args["sigma"])
        if len(steps) == 3:
            done.set()
            thread.join()
        return args["denoised"]

    act_in_first_step(view, thread.start)
    view.set_model_sampler_post_cfg_function(end_in_last_step)
    try:
        assert close(sample(view, 5, steps=3), want)
    finally:
        done.set()
    assert len(steps) == 3
