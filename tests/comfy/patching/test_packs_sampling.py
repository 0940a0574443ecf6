"""What custom nodes do to a model, seen in whole sampling runs of a small checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.sample
from comfy import loading
from comfy.devices import residency
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.hook_group import create_hook_lora
from comfy.patching.patcher import ModelPatcher
from comfy.patching.wrappers import CallbacksMP, PatcherInjection, WrappersMP
from comfy.weights.adapters import LoRAAdapter
from tests.support import tiny_checkpoint
from tests.support.accelerator import assert_untouched, snapshot

POSITIVE = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(1))
NEGATIVE = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(2))
KEY = "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("packs") / "tiny.safetensors")


@pytest.fixture
def model(checkpoint: Path, accelerator: Any) -> Any:
    """The checkpoint's model on the simulated accelerator."""
    return loading.load_checkpoint_guess_config(
        str(checkpoint), output_vae=False, output_clip=False
    ).model


def sample(model: Any, positive: Any = None, steps: int = 2) -> Tensor:
    noise = comfy.sample.prepare_noise(torch.zeros(1, 4, 8, 8), 3, None)
    return comfy.sample.sample(
        model, noise, steps, 4.0, "euler", "normal", positive or [[POSITIVE, {}]],
        [[NEGATIVE, {}]], torch.zeros(1, 4, 8, 8), disable_pbar=True, seed=3,
    )  # fmt: skip


def close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding, which differs with the size of a batch and grows in a random net."""
    return bool((a - b).abs().max() < 1e-4 * b.std())


def lora(model: Any, seed: int) -> dict[str, Any]:
    weight = model.model.state_dict()[KEY]
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(weight.shape[0], 2, generator=generator) * 0.3
    down = torch.randn(2, weight.shape[1], generator=generator) * 0.3
    return {KEY: LoRAAdapter(set(), (up, down, 2.0, None, None, None))}


def test_a_run_gives_the_same_wherever_the_weights_are(model: Any, accelerator: Any) -> None:
    before = snapshot(model.model)
    want = sample(model)
    variant = model.clone()
    variant.add_patches(lora(model, 1))
    changed = sample(variant)
    assert not close(changed, want)
    for asynchronous in (False, True):
        accelerator.set_async(asynchronous)
        for kind in (ModelPatcher, ModelPatcherDynamic):
            for capacity in (1 << 30, 400_000):
                residency.unload_all_models()
                accelerator.set_capacity(capacity)
                plain = kind(model.model, model.load_device, model.offload_device)
                patched = plain.clone()
                patched.add_patches(lora(model, 1))
                assert close(sample(plain), want)
                assert close(sample(patched), changed)
                assert close(sample(plain), want)
    residency.unload_all_models()
    assert torch.accelerator.memory_allocated(0) == 0
    assert_untouched(model.model, before)


def attn2_replace(model: Any, log: list[Any]) -> None:
    """As a pack that adds image tokens to cross-attention."""

    def patch(q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Any]) -> Tensor:
        log.append((extra["cond_or_uncond"], extra["block"], extra["n_heads"]))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return out + 0.1 * out.mean(dim=1, keepdim=True)

    model.set_model_attn2_replace(patch, "middle", 0)


def function_wrapper(model: Any, log: list[Any]) -> None:
    """As a pack that skips steps: it calls or answers in the network's place."""

    def wrapper(apply_model: Callable[..., Tensor], args: dict[str, Any]) -> Tensor:
        log.append(args["cond_or_uncond"])
        return apply_model(args["input"], args["timestep"], **args["c"]) * 0.9

    model.set_model_unet_function_wrapper(wrapper)


def object_patch(model: Any, log: list[Any]) -> None:
    """As a pack that brings conditioning of its own."""
    original = model.get_model_object("extra_conds")

    def extra_conds(**kwargs: Any) -> dict[str, Any]:
        log.append(sorted(kwargs))
        conds = original(**kwargs)
        conds["c_crossattn"].cond = conds["c_crossattn"].cond * 1.5
        return conds

    model.add_object_patch("extra_conds", extra_conds)


def injection(model: Any, log: list[Any]) -> None:
    """As a pack that puts motion modules into the network while it runs."""

    def inject(patcher: Any) -> None:
        block = patcher.model.diffusion_model.middle_block[0]
        plain = block.forward

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            log.append("run")
            return plain(*args, **kwargs) * 1.2

        block.forward = forward

    def eject(patcher: Any) -> None:
        log.append("out")
        del patcher.model.diffusion_model.middle_block[0].forward

    model.set_injections("motion", [PatcherInjection(inject, eject)])


def wrappers(model: Any, log: list[Any]) -> None:
    """As a pack that goes around every stage of a run."""

    def around(name: str) -> Callable[..., Any]:
        def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
            log.append(name)
            return executor(*args, **kwargs)

        return wrapper

    for name in ("OUTER_SAMPLE", "SAMPLER_SAMPLE", "PREDICT_NOISE", "CALC_COND_BATCH",
                 "APPLY_MODEL", "DIFFUSION_MODEL", "PREPARE_SAMPLING"):  # fmt: skip
        kind = getattr(comfy.patcher_extension.WrappersMP, name)
        model.add_wrapper_with_key(kind, "pack", around(name))
    model.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * 0.9)


PACKS = [attn2_replace, function_wrapper, object_patch, injection, wrappers]


@pytest.mark.parametrize("pack", PACKS, ids=lambda pack: pack.__name__)
@pytest.mark.parametrize("capacity", [1 << 30, 400_000], ids=["resident", "streamed"])
def test_a_packs_change_acts_in_a_run_and_leaves_with_its_clone(
    model: Any, accelerator: Any, pack: Any, capacity: int
) -> None:
    before, want = snapshot(model.model), sample(model)
    accelerator.set_capacity(capacity)
    log: list[Any] = []
    changed = model.clone()
    pack(changed, log)
    assert not close(sample(changed), want)
    assert log
    count = len(log)
    assert close(sample(model), want)
    assert len([entry for entry in log[count:] if entry != "out"]) == 0
    residency.unload_all_models()
    assert_untouched(model.model, before)


class Motion(ModelPatcher):
    """As a pack writes a patcher for a model that is injected into another one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = 1.0

    def clone(self, hooks_only: bool = False) -> Motion:
        n = super().clone()
        n.scale = self.scale
        n.hooks_only = hooks_only
        return n

    def pre_run(self, model: Any = None) -> None:
        super().pre_run()
        self.prepared_for = model

    def cleanup(self) -> None:
        super().cleanup()
        self.cleaned = True


def test_a_subclass_travels_as_additional_model_and_is_cleaned_up(
    model: Any, accelerator: Any
) -> None:
    network = torch.nn.Linear(8, 8)
    motion = Motion(network, load_device=model.load_device, offload_device=model.offload_device)
    motion.scale = 0.5
    view = model.clone()
    view.set_additional_models("motion", [motion])
    seen: list[Any] = []

    def outer(executor: Any, *args: Any, **kwargs: Any) -> Any:
        (mine,) = view_in_run[0].get_additional_models_with_key("motion")
        seen.append((type(mine), mine.scale, network.weight.device))
        return executor(*args, **kwargs)

    def calc(executor: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(network.weight.device)
        return executor(*args, **kwargs)

    view.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "motion", outer)
    view.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "motion", calc)
    view_in_run = [view.clone()]
    (cloned,) = view_in_run[0].get_additional_models_with_key("motion")
    sample(view_in_run[0])
    assert seen[0][:2] == (Motion, 0.5)
    assert seen[1] == model.load_device
    assert cloned.cleaned


def test_callbacks_see_the_life_of_a_run_in_order(model: Any) -> None:
    told: list[str] = []
    for name in ("ON_LOAD", "ON_PRE_RUN", "ON_PREPARE_STATE", "ON_CLEANUP", "ON_DETACH"):
        moment = getattr(CallbacksMP, name)
        model.add_callback_with_key(moment, "pack", lambda *_, name=name: told.append(name))
    sample(model, steps=1)
    residency.unload_all_models()
    order = [name for number, name in enumerate(told) if name not in told[:number]]
    assert order == ["ON_LOAD", "ON_PRE_RUN", "ON_PREPARE_STATE", "ON_CLEANUP", "ON_DETACH"]


@pytest.mark.parametrize("kind", [ModelPatcher, ModelPatcherDynamic])
@pytest.mark.parametrize("capacity", [1 << 30, 400_000], ids=["resident", "streamed"])
def test_a_lora_as_a_hook_equals_the_lora_on_the_model(
    model: Any, accelerator: Any, kind: type[ModelPatcher], capacity: int
) -> None:
    before = snapshot(model.model)
    accelerator.set_capacity(capacity)
    patcher = kind(model.model, model.load_device, model.offload_device)
    variant = patcher.clone()
    variant.add_patches(lora(model, 5), 0.7)
    hooks = create_hook_lora({}, 0.7, 0.0)
    hooks.hooks[0].weights = lora(model, 5)
    hooks.hooks[0].need_weight_init = False
    options = {"hooks": hooks}
    noise = comfy.sample.prepare_noise(torch.zeros(1, 4, 8, 8), 3, None)
    got = comfy.sample.sample(
        patcher, noise, 2, 4.0, "euler", "normal", [[POSITIVE, options]], [[NEGATIVE, options]],
        torch.zeros(1, 4, 8, 8), disable_pbar=True, seed=3,
    )  # fmt: skip
    assert close(got, sample(variant))
    residency.unload_all_models()
    assert_untouched(model.model, before)


@pytest.mark.parametrize("after", [0, 7, 40, 200])
@pytest.mark.parametrize("kind", [ModelPatcher, ModelPatcherDynamic])
def test_a_run_interrupted_or_out_of_memory_anywhere_leaves_no_trace(
    model: Any, accelerator: Any, kind: type[ModelPatcher], after: int
) -> None:
    accelerator.set_async(True)
    before, want = snapshot(model.model), sample(model)
    residency.unload_all_models()
    accelerator.set_capacity(500_000)
    patcher = kind(model.model, model.load_device, model.offload_device)
    patcher.add_patches(lora(model, 8))
    accelerator.fail_allocation(after, 3)
    with contextlib.suppress(torch.OutOfMemoryError, residency.OutOfMemoryReport):
        sample(patcher)
    accelerator.fail_allocation(-1)

    def cancel(*_: Any, **__: Any) -> Any:
        raise comfy.model_management.InterruptProcessingException

    cancelled = patcher.clone()
    cancelled.set_model_attn1_patch(cancel)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sample(cancelled)
    plain = kind(model.model, model.load_device, model.offload_device)
    assert close(sample(plain), want)
    residency.unload_all_models()
    assert torch.accelerator.memory_allocated(0) == 0
    assert_untouched(model.model, before)


def test_a_replaced_loading_function_is_the_one_that_runs_call(
    checkpoint: Path, accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    original = comfy.model_management.load_models_gpu

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(args[0]))
        return original(*args, **kwargs)

    monkeypatch.setattr(comfy.model_management, "load_models_gpu", counted)
    model = loading.load_checkpoint_guess_config(
        str(checkpoint), output_vae=False, output_clip=False
    ).model
    sample(model, steps=1)
    assert calls


class Boxes(torch.nn.Module):
    """A position network as a pack brings it: it says what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Any, ...]] = []

    def _patch(self, *asked: Any) -> Callable[..., Tensor]:
        self.asked.append(asked)
        return lambda x, extra: x * (1.0 + 0.1 * extra["transformer_index"])

    def set_position(self, latent_image_shape: Any, position_params: Any, device: Any) -> Any:
        return self._patch(tuple(latent_image_shape), len(position_params), device)

    def set_empty(self, latent_image_shape: Any, device: Any) -> Any:
        return self._patch(tuple(latent_image_shape), None, device)


@pytest.mark.parametrize(("kind", "count"), [("position", 1), ("empty", None)])
def test_position_networks_get_shape_and_device_for_every_kind(
    model: Any, kind: str, count: int | None
) -> None:
    network = Boxes()
    patcher = ModelPatcher(network, model.load_device, model.offload_device)
    boxes = [(torch.zeros(1, 32), 4, 4, 0, 0)]
    positive = [[POSITIVE, {"gligen": (kind, patcher, boxes)}]]
    assert not close(sample(model, positive), sample(model))
    assert network.asked[0] == ((1, 4, 8, 8), count, model.load_device)
