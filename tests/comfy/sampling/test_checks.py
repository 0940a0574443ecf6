"""Bad input gets an error or a warning that names what does not fit."""

from __future__ import annotations

import inspect
import logging
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import conds
from comfy.devices import memory
from comfy.interrupt import InterruptProcessingException, interrupt_current_processing
from comfy.ldm.unet.model import UNetModel
from comfy.sampling import batching, checks, noise, run, samplers, solvers
from tests.comfy.sampling.support import (
    NEGATIVE,
    POSITIVE,
    ClosedFormModel,
    conditioning,
    patcher,
)

LATENT = torch.zeros(1, 4, 8, 8)


def sample(
    sigmas: list[float], latent: Tensor = LATENT, name: str = "euler", **options: Any
) -> Any:
    start = options.pop("noise") if "noise" in options else noise.prepare_noise(latent, 1)
    model = patcher(ClosedFormModel(options.pop("kind", "EPS")))
    sampler = options.pop("sampler", None) or samplers.ksampler(name)
    return run.sample_custom(
        model, start, 1.0, sampler, torch.tensor(sigmas),
        conditioning(POSITIVE), conditioning(NEGATIVE), latent, disable_pbar=True, seed=1,
        **options,
    )  # fmt: skip


def test_a_latent_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"16 channels .* works on 4"):
        sample([1.0, 0.0], torch.zeros(1, 16, 8, 8))


@pytest.mark.parametrize("shape", [(), (64,), (8, 8), (0, 4, 8, 8), (1, 4, 8, 0), (1, 4, 0, 8, 8)])
def test_what_is_no_latent_is_refused_with_its_shape(shape: tuple[int, ...]) -> None:
    latent = torch.ones(shape)
    expected = rf"one cell at least, found shape {re.escape(str(shape))}"
    with pytest.raises(ValueError, match=expected):
        run.fix_empty_latent_channels(patcher(ClosedFormModel()), latent)
    with pytest.raises(ValueError, match=expected):
        sample([1.0, 0.0], latent, noise=latent)


def test_noise_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(1, 4, 8, 9\) does not fit .* \(1, 4, 8, 8\)"):
        sample([1.0, 0.0], noise=torch.zeros(1, 4, 8, 9))


@pytest.mark.parametrize("name", solvers.MENU_NAMES)
@pytest.mark.parametrize("sigmas", [[1.0, float("nan")], [float("inf"), 0.0], [1.0, -0.5]])
def test_levels_that_are_no_levels_are_refused(sigmas: list[float], name: str) -> None:
    with pytest.raises(ValueError, match="levels are finite and not negative"):
        sample(sigmas, name=name)


def test_levels_that_go_down_and_up_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"rise from 2 to 3 at step 2: .* sort them"):
        sample([5.0, 2.0, 3.0, 0.0])


@pytest.mark.parametrize("kind", ["EPS", "FLOW"])
@pytest.mark.parametrize("name", solvers.MENU_NAMES)
def test_flipped_levels_run_or_are_refused_where_noise_is_added(name: str, kind: str) -> None:
    follows = name in ("euler", "dpmpp_2m", "uni_pc", "uni_pc_bh2", "deis", "lms", "ipndm", "heun")
    refuses = name in ("euler_ancestral", "dpmpp_2m_sde", "er_sde", "lcm", "sa_solver")
    for sigmas in ([0.01, 0.5], [1e-4, 0.2, 0.9], [1e-6, 1e-3, 0.1, 0.3, 0.6, 0.8]):
        said = ""
        try:
            made = sample(sigmas, torch.ones(1, 4, 8, 8), name=name, kind=kind)
        except ValueError as error:
            said = str(error)
        assert "adds noise only goes down" in said if said else torch.isfinite(made).all()
        assert not (said and follows)
        assert said or not refuses


def test_levels_that_rise_from_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="sigma 0 is 0 and sigma 1 is 5"):
        sample([0.0, 5.0], torch.ones(1, 4, 8, 8))


@pytest.mark.parametrize("name", solvers.MENU_NAMES)
def test_a_clean_level_may_repeat(name: str) -> None:
    assert torch.isfinite(sample([5.0, 1.0, 0.0, 0.0, 0.0], name=name)).all()


def test_no_levels_leave_the_latent_alone() -> None:
    latent = torch.ones(1, 4, 8, 8)
    assert sample([], latent) is latent


LEVELS_AT_THE_EDGE = [
    [0.5, 0.5],
    [0.5, 0.5, 0.5, 0.0],
    [1e-3, 1e-4, 1e-5, 0.0],  # below what single precision tells apart from clean
    [0.01, 0.0011, 0.00105, 0.001, 0.0],
    [0.7, 0.2, 0.2, 0.2, 0.1],
]


@pytest.mark.parametrize("kind", ["EPS", "FLOW"])
@pytest.mark.parametrize("name", solvers.MENU_NAMES)
def test_levels_at_the_edge_give_a_finite_latent(name: str, kind: str) -> None:
    function = solvers.find(name).function
    known = inspect.signature(function).parameters
    takes_eta = "eta" in known or name in ("dpm_fast", "dpm_adaptive")
    for sigmas in LEVELS_AT_THE_EDGE:
        for eta in (0.0, 0.5, 1.0, 2.0) if takes_eta else (None,):
            made = sample(
                sigmas,
                kind=kind,
                sampler=samplers.ksampler(name, {} if eta is None else {"eta": eta}),
            )
            assert torch.isfinite(made).all(), (sigmas, eta)


@pytest.mark.parametrize("name", sorted(set(solvers.MENU_NAMES) - {"dpm_fast", "dpm_adaptive"}))
def test_only_clean_levels_leave_a_finite_latent(name: str) -> None:
    assert torch.isfinite(sample([0.0, 0.0], torch.ones(1, 4, 8, 8), name=name)).all()


@pytest.mark.parametrize("name", solvers.MENU_NAMES)
def test_every_sampler_survives_one_level_and_one_step(name: str) -> None:
    for sigmas in ([1.0], [1.0, 0.0], [5.0, 1.0, 0.0]):
        made = sample(sigmas, name=name)
        assert torch.isfinite(made).all(), sigmas


def test_a_latent_with_nan_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    latent = torch.zeros(1, 4, 8, 8)
    latent[0, 0, 0, 0] = float("nan")
    with caplog.at_level(logging.WARNING):
        sample([1.0, 0.0], latent)
    assert "of the latent given to the sampler is NaN or infinite" in caplog.text
    assert "of the latent made by the sampler is NaN or infinite" in caplog.text


@pytest.mark.parametrize("name", ["euler", "heun", "dpm_adaptive", "uni_pc", "seeds_3", "dpm_fast"])
def test_cancelling_stops_before_the_next_model_call(name: str) -> None:
    model = patcher(ClosedFormModel())

    def cancel(*args: Any) -> None:
        interrupt_current_processing()

    try:
        with pytest.raises(InterruptProcessingException):
            run.sample(
                model, noise.prepare_noise(LATENT, 1), 30, 1.0, name, "karras",
                conditioning(POSITIVE), conditioning(NEGATIVE), LATENT, callback=cancel,
                disable_pbar=True, seed=1,
            )  # fmt: skip
    finally:
        interrupt_current_processing(False)
    assert len(model.model.calls) <= 4
    assert model.model.current_patcher is None


@pytest.mark.parametrize(
    ("read", "table", "named"),
    [
        (frozenset({"dit"}), {"patches": {"attn1_patch": [print]}}, "attn1_patch"),
        (frozenset({"dit"}), {"patches_replace": {"attn2": {(1, 0): print}}}, "attn2"),
        (frozenset({"attn2"}), {"patches_replace": {"attn2": {(1, 0): print}}}, None),
        (frozenset({"dit"}), {"patches": {"attn1_patch": []}}, None),
        (None, {"patches": {"attn1_patch": [print]}}, None),
    ],
)
def test_a_patch_that_the_network_does_not_read_is_said_to_have_no_effect(
    read: frozenset[str] | None,
    table: dict[str, Any],
    named: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = torch.nn.Identity()
    if read is not None:
        network.reads_patches = read  # type: ignore[assignment]
    model = torch.nn.Module()
    model.diffusion_model = network
    checks.warn_of_unread_patches(model, {"transformer_options": table})
    assert ("no effect" in caplog.text) is (named is not None)
    assert named is None or named in caplog.text


def test_the_unet_reads_what_it_says() -> None:
    """No name is declared that no block looks at."""
    sources = "".join(
        path.read_text(encoding="utf-8")
        for path in Path(sys.modules[UNetModel.__module__].__file__ or "").parent.glob("*.py")
    )
    for name in UNetModel.reads_patches:
        stem = name.removesuffix("_patch").removesuffix("_output")
        assert f'"{name}"' in sources or f'"{stem}"' in sources


def test_a_latent_that_no_memory_could_hold_is_refused_before_the_model_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ClosedFormModel()
    monkeypatch.setattr(batching, "LARGE_LATENT", 0)
    monkeypatch.setattr(model, "memory_required", lambda shape, cond_shapes=None: 1e18)
    start = noise.prepare_noise(LATENT, 1)
    with pytest.raises(memory.NotEnoughMemory, match=r"one call of the model on a latent of shape"):
        run.sample_custom(
            patcher(model), start, 1.0, samplers.ksampler("euler"), torch.tensor([1.0, 0.0]),
            conditioning(POSITIVE), conditioning(NEGATIVE), LATENT, disable_pbar=True, seed=1,
        )  # fmt: skip


def one_run(
    sigmas: Any, name: str = "euler", positive: Any = None, mask: Tensor | None = None
) -> Tensor:
    return run.sample_custom(
        patcher(ClosedFormModel()), noise.prepare_noise(LATENT, 1), 1.0, samplers.ksampler(name),
        sigmas, positive or conditioning(POSITIVE), conditioning(NEGATIVE), LATENT,
        noise_mask=mask, disable_pbar=True, seed=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sigmas", "error", "words"),
    [
        (["high", 0.0], TypeError, "a tensor or a list of levels, found list"),
        (None, TypeError, "a tensor or a list of levels, found NoneType"),
        (1.0, ValueError, r"in a row, found a tensor of \(\)"),
        (torch.tensor([[1.0, 0.0]]), ValueError, r"in a row, found a tensor of \(1, 2\)"),
    ],
)
def test_what_are_no_levels_is_named(sigmas: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        one_run(sigmas)


def test_whole_levels_are_taken_as_real_ones() -> None:
    for name in ("euler", "uni_pc"):
        levels = torch.tensor([3, 1, 0])
        assert torch.equal(one_run(levels, name), one_run(levels.float(), name))


@pytest.mark.parametrize("name", solvers.MENU_NAMES)
def test_levels_may_be_a_list_or_of_any_precision(name: str) -> None:
    levels = torch.tensor([14.0, 3.0, 1.0, 0.0])
    plain = one_run(levels, name)
    for given in (levels.tolist(), tuple(levels), levels.numpy(), levels.half(), levels.bfloat16()):
        assert torch.equal(one_run(given, name), plain), type(given)
    assert torch.allclose(one_run(levels.double(), name), plain, rtol=1e-5, atol=1e-5)
    start = noise.prepare_noise(LATENT, 1)
    function = solvers.find(name).function
    estimate = {"denoised": torch.zeros(1), "uncond_denoised": torch.zeros(1)}

    def still(x: Tensor, sigma: Tensor, model_options: Any = None, **kwargs: Any) -> Tensor:
        for hook in (model_options or {}).get("sampler_post_cfg_function", ()):
            hook(estimate)
        return x * 0.5

    made = [
        function(still, start, given, extra_args={"seed": 1}, disable=True)
        for given in (levels.clone(), levels.tolist())
    ]
    assert torch.equal(*made)


def test_levels_beyond_half_precision_may_be_given_in_it() -> None:
    model = ClosedFormModel("V_PREDICTION", {"zsnr": True})
    levels = torch.tensor([4518.0, 10.0, 0.0]).half()
    made = run.sample_custom(
        patcher(model), noise.prepare_noise(LATENT, 1), 1.0, samplers.ksampler("euler"), levels,
        conditioning(POSITIVE), conditioning(NEGATIVE), LATENT, disable_pbar=True, seed=1,
    )  # fmt: skip
    assert torch.isfinite(made).all()


@pytest.mark.parametrize(
    ("sigmas", "words"),
    [
        ([1.0, 2.0, 0.0], "rise from 1 to 2 at step 1"),
        ([1.0, math.nan, 0.0], "sigma 1 is nan"),
        ([math.inf, 0.0], "sigma 0 is inf"),
        ([1.0, -0.1], "sigma 1 is -0.1"),
    ],
)
def test_levels_that_no_sampler_can_follow_are_named(sigmas: list[float], words: str) -> None:
    for given in (sigmas, torch.tensor(sigmas)):
        with pytest.raises(ValueError, match=words):
            one_run(given)


def test_no_levels_return_the_latent() -> None:
    for given in ([], torch.tensor([])):
        assert one_run(given) is LATENT


def test_a_latent_of_whole_numbers_is_named() -> None:
    with pytest.raises(ValueError, match=r"real numbers, found torch.int64 \(shape \(1, 4, 8, 8\)"):
        run.fix_empty_latent_channels(None, torch.ones(1, 4, 8, 8, dtype=torch.int64))


@pytest.mark.parametrize("what", ["text", "mask", "noise mask"])
def test_what_is_broken_before_sampling_is_said(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = torch.full((1, 8, 8), torch.nan)
    entry = conditioning(POSITIVE, **({"mask": broken} if what == "mask" else {}))
    if what == "text":
        entry[0][0] = entry[0][0] * torch.nan
    one_run(torch.tensor([1.0, 0.0]), positive=entry, mask=broken if what == "noise mask" else None)
    said = {"text": "positive conditioning is", "mask": "positive conditioning's mask is"}
    assert said.get(what, "noise mask is") in caplog.text


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", [conds.CONDRegular, conds.CONDNoiseShape, conds.CONDList])
def test_broken_pictures_and_references_of_conditioning_are_said(
    kind: Any, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    broken = torch.full((1, 4, 8, 8), value)
    given = kind([torch.zeros(1, 4, 8, 8), broken] if kind is conds.CONDList else broken)
    numbers = conds.CONDRegular(torch.ones(1, 4, dtype=torch.int64))
    listed = {"negative": [{"model_conds": {"ref_latents": given, "ids": numbers}}]}
    checks.warn_of_broken_conditioning(listed)
    assert "negative conditioning (ref_latents) is NaN or infinite" in caplog.text


@pytest.mark.parametrize("indices", [[-1, 3], [0, 1, 2], ["a", "b"], [0.5, 1.0], [[0, 1]], []])
def test_what_is_no_index_of_noise_is_refused(indices: Any) -> None:
    with pytest.raises(ValueError, match="batch_index: expected whole numbers from 0 on, one for"):
        noise.prepare_noise(torch.zeros(2, 4, 8, 8), 1, indices)


@pytest.mark.parametrize(
    ("option", "value"),
    [("control", "x"), ("hooks", 3), ("mask", [1.0]), ("area", "x"), ("area", (1, "a", 0, 0))],
)
def test_what_is_no_option_of_conditioning_is_refused_with_its_name(
    option: str, value: Any
) -> None:
    cond = [[torch.zeros(1, 5, 4), {option: value}]]
    model = patcher(ClosedFormModel("EPS"))
    with pytest.raises((TypeError, ValueError), match=f"option '{option}'|an area is"):
        run.sample_custom(
            model, torch.zeros_like(LATENT), 2.0, samplers.ksampler("euler"),
            torch.tensor([1.0, 0.0]), cond, cond, LATENT,
        )  # fmt: skip


@pytest.mark.parametrize("mask", [torch.ones(1, 8, 8).bool(), torch.ones(8, 8).int()])
def test_noise_masks_of_whole_numbers_are_taken(mask: Tensor) -> None:
    assert torch.equal(sample([1.0, 0.0], noise_mask=mask), sample([1.0, 0.0]))


def test_a_noise_mask_that_is_none_says_so() -> None:
    with pytest.raises(TypeError, match=r"a mask is a tensor .* found str"):
        sample([1.0, 0.0], noise_mask="x")
