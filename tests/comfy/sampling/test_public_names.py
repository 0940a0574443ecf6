"""What custom nodes replace, extend or call must reach the code that runs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import comfy.extra_samplers.uni_pc
import comfy.model_sampling
import comfy.sample
import comfy.sampler_helpers
import comfy.samplers
from comfy.k_diffusion import sampling as k_diffusion
from comfy.patching.hook_group import HookGroup
from comfy.patching.hooks import WeightHook
from comfy.sampling import conditioning as conditioning_module
from comfy.sampling import (
    guidance,
    jobs,
    masks,
    noise,
    noise_levels,
    preparation,
    samplers,
    schedules,
    solvers,
)
from tests.comfy.sampling.support import (
    NEGATIVE,
    POSITIVE,
    ClosedFormModel,
    conditioning,
    patcher,
)


@contextmanager
def replaced(public: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(public, name)
    setattr(public, name, value)
    try:
        yield
    finally:
        setattr(public, name, original)


def run_once(sampler: str = "euler", **options: Any) -> Tensor:
    latent = torch.zeros(1, 4, 8, 8)
    return comfy.sample.sample(
        patcher(ClosedFormModel()), noise.prepare_noise(latent, 1), 2, 2.0, sampler, "normal",
        conditioning(POSITIVE), conditioning(NEGATIVE), latent, disable_pbar=True, seed=1,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("public", "name", "owner"),
    [
        (comfy.samplers, "sampling_function", guidance),
        (comfy.samplers, "sample", samplers),
        (comfy.samplers, "KSampler", samplers),
        (comfy.samplers, "calculate_sigmas", schedules),
        (comfy.samplers, "pre_run_control", conditioning_module),
        (comfy.samplers, "get_area_and_mult", jobs),
        (comfy.samplers, "resolve_areas_and_cond_masks_multidim", conditioning_module),
        (comfy.sampler_helpers, "prepare_mask", masks),
        (comfy.sampler_helpers, "prepare_sampling", preparation),
        (comfy.sample, "prepare_noise", noise),
        (comfy.model_sampling, "time_snr_shift", noise_levels),
        (k_diffusion, "default_noise_sampler", noise),
    ],
)
def test_an_assignment_reaches_its_owner(public: Any, name: str, owner: Any) -> None:
    marker = object()
    with replaced(public, name, marker):
        assert getattr(owner, name) is marker
        assert getattr(public, name) is marker
    assert getattr(owner, name) is not marker


def test_a_replaced_guidance_is_used() -> None:
    calls = []

    def instead(model: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return torch.zeros_like(x)

    with replaced(comfy.samplers, "sampling_function", instead):
        made = run_once()
    assert len(calls) == 2
    torch.testing.assert_close(made, torch.zeros_like(made))


def test_a_replaced_step_noise_is_used() -> None:
    plain = run_once("euler_ancestral")
    silent = lambda x, seed=None: lambda a, b: torch.zeros_like(x)  # noqa: E731
    with replaced(k_diffusion, "default_noise_sampler", silent):
        quiet = run_once("euler_ancestral")
    assert not torch.equal(plain, quiet)


def test_a_replaced_mask_preparation_is_used() -> None:
    seen = []

    def instead(mask: Tensor, shape: Any, device: Any) -> Tensor:
        seen.append(tuple(shape))
        return torch.zeros(tuple(shape))

    with replaced(comfy.sampler_helpers, "prepare_mask", instead):
        made = run_once(noise_mask=torch.ones(1, 64, 64))
    assert seen == [(1, 4, 8, 8)]
    torch.testing.assert_close(made, torch.zeros_like(made))  # nothing was allowed to change


def test_a_replaced_cut_is_used() -> None:
    original, calls = comfy.samplers.get_area_and_mult, []

    def instead(conds: Any, x_in: Tensor, timestep: Tensor) -> Any:
        calls.append(1)
        return original(conds, x_in, timestep)

    with replaced(comfy.samplers, "get_area_and_mult", instead):
        run_once()
    assert len(calls) == 4


def test_methods_of_the_front_classes_can_be_replaced() -> None:
    with replaced(comfy.samplers.KSAMPLER, "sample", lambda self, *a, **k: torch.ones(1, 4, 8, 8)):
        assert torch.equal(run_once(), torch.ones(1, 4, 8, 8))
    with replaced(comfy.samplers.KSampler, "sample", lambda self, *a, **k: torch.ones(1)):
        assert torch.equal(run_once(), torch.ones(1))
    with replaced(comfy.samplers.CFGGuider, "predict_noise", lambda self, x, *a, **k: x * 0):
        torch.testing.assert_close(run_once(), torch.zeros(1, 4, 8, 8))
    with replaced(comfy.samplers.Sampler, "max_denoise", lambda self, *a: False):
        assert run_once().shape == (1, 4, 8, 8)


def test_a_solver_set_on_the_public_module_is_found_also_after_a_reload() -> None:
    def sample_mine(model: Any, x: Tensor, sigmas: Tensor, **kwargs: Any) -> Tensor:
        return torch.full_like(x, 5.0)

    k_diffusion.sample_mine = sample_mine  # type: ignore[attr-defined]
    comfy.samplers.KSampler.SAMPLERS.append("mine")
    try:
        assert "mine" in comfy.samplers.SAMPLER_NAMES
        importlib.reload(k_diffusion)
        assert torch.equal(run_once("mine"), torch.full((1, 4, 8, 8), 5.0))
    finally:
        comfy.samplers.KSampler.SAMPLERS.remove("mine")
        del k_diffusion.sample_mine


def test_a_known_solver_set_on_the_public_module_is_used() -> None:
    with replaced(k_diffusion, "sample_euler", lambda model, x, sigmas, **k: x * 0 + 3):
        assert torch.equal(run_once("euler"), torch.full((1, 4, 8, 8), 3.0))
    assert solvers.find("euler").function is k_diffusion.sample_euler


def test_menus_are_the_very_lists_the_front_uses() -> None:
    assert comfy.samplers.KSampler.SAMPLERS is samplers.SAMPLER_NAMES
    assert comfy.samplers.KSampler.SCHEDULERS is schedules.SCHEDULER_NAMES
    assert comfy.samplers.SCHEDULER_HANDLERS is schedules.SCHEDULER_HANDLERS
    assert comfy.samplers.k_diffusion_sampling is k_diffusion


def test_tensor_helpers_accept_tensors() -> None:
    down, up = k_diffusion.get_ancestral_step(torch.tensor(4.0), torch.tensor(2.0), eta=1.0)
    assert torch.is_tensor(down)
    assert torch.is_tensor(up)
    assert float(down**2 + up**2) == pytest.approx(4.0)
    x = torch.ones(2, 4, 3, 3)
    slope = k_diffusion.to_d(x, torch.tensor([2.0, 4.0]), torch.zeros_like(x))
    assert slope[:, 0, 0, 0].tolist() == [0.5, 0.25]


def test_names_of_the_menu_that_are_functions_of_the_public_module() -> None:
    names = comfy.samplers.KSAMPLER_NAMES
    assert [*names, "ddim", "uni_pc", "uni_pc_bh2"] == comfy.samplers.SAMPLER_NAMES
    assert all(hasattr(k_diffusion, f"sample_{name}") for name in names)


def test_weights_of_integrators_are_those_of_polynomials_under_their_names() -> None:
    h = torch.tensor([-2.0, -0.3, 0.5], dtype=torch.float64)
    parts = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    grown = torch.exp(h[:, None] * (1 - parts))
    torch.testing.assert_close(k_diffusion.ei_h_phi_1(h), h * grown.mean(1), rtol=1e-6, atol=0)
    slope = h * (grown * parts).mean(1)
    torch.testing.assert_close(k_diffusion.ei_h_phi_2(h), slope, rtol=1e-6, atol=0)
    levels = [9.0, 5.0, 2.0, 0.5]
    made = [k_diffusion.linear_multistep_coeff(3, levels, 2, j) for j in range(3)]
    for power in range(3):  # exact for slopes that are polynomials of the level
        integral = (levels[3] ** (power + 1) - levels[2] ** (power + 1)) / (power + 1)
        found = sum(weight * levels[2 - j] ** power for j, weight in enumerate(made))
        assert found == pytest.approx(integral, rel=1e-9)
    with pytest.raises(ValueError, match="order 3 needs 3 slopes, and step 1 has 2"):
        k_diffusion.linear_multistep_coeff(3, levels, 1, 0)


@pytest.mark.parametrize("variant", ["bh1", "bh2"])
def test_unipc_is_called_under_its_public_name_as_the_menu_calls_it(variant: str) -> None:
    def chosen(model: Any, noise: Tensor, sigmas: Tensor, **given: Any) -> Tensor:
        made: Tensor = comfy.extra_samplers.uni_pc.sample_unipc(
            model, noise, sigmas, given["extra_args"], given["callback"], given["disable"], variant
        )
        return made

    menu = run_once("uni_pc" if variant == "bh1" else "uni_pc_bh2")
    latent, model = torch.zeros(1, 4, 8, 8), patcher(ClosedFormModel())
    levels = comfy.samplers.KSampler(model, 2, None, "uni_pc", "normal").sigmas
    made = comfy.sample.sample_custom(
        model, noise.prepare_noise(latent, 1), 2.0, comfy.samplers.KSAMPLER(chosen), levels,
        conditioning(POSITIVE), conditioning(NEGATIVE), latent, disable_pbar=True, seed=1,
    )  # fmt: skip
    assert torch.equal(made, menu)


def test_hooks_of_lists_are_found_shared_and_dropped_under_public_names() -> None:
    kept, refused = WeightHook(), WeightHook()
    group = HookGroup()
    for hook in (kept, refused):
        group.add(hook)
    conds: Any = {"positive": [{"hooks": group}], "negative": [{"hooks": group}, {}]}
    comfy.samplers.preprocess_conds_hooks(conds)
    found = comfy.sampler_helpers.get_hooks_from_cond(conds["negative"], HookGroup())
    assert found.hooks == [kept, refused]
    registered = HookGroup()
    registered.add(kept)
    comfy.samplers.filter_registered_hooks_on_conds(conds, {"registered_hooks": registered})
    left = [entry.get("hooks") for entries in conds.values() for entry in entries]
    assert left[0] is left[1]
    assert left[0].hooks == [kept]
    assert left[2] is None
    comfy.samplers.filter_registered_hooks_on_conds(conds, {})
    assert not any("hooks" in entry for entries in conds.values() for entry in entries)
