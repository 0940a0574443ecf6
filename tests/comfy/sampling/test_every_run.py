"""Every sampler on every kind of model, with the options of the sampler nodes in turn: no
exception, nothing infinite, the shape of the latent, and a progress that counts every step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.latent_formats import LatentFormat
from comfy.nested_tensor import NestedTensor
from comfy.sampling import noise, run, samplers, schedules, solvers
from comfy.sampling.parameterisation import CONST
from comfy.sampling.solvers import upscale
from tests.comfy.sampling.support import TestModel, conditioning, patcher, two_gaussians

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "eps": ("EPS", {}),
    "v": ("V_PREDICTION", {}),
    "zsnr": ("V_PREDICTION", {"zsnr": True}),
    "edm": ("EDM", {"sigma_data": 0.5}),
    "v_edm": ("V_PREDICTION_EDM", {"sigma_max": 700.0}),
    "v_continuous": ("V_PREDICTION_CONTINUOUS", {"sigma_min": 0.03, "sigma_max": 500.0}),
    "cascade": ("STABLE_CASCADE", {"shift": 2.0}),
    "flow": ("FLOW", {"shift": 3.0}),
    "flux": ("FLUX", {"shift": 1.15}),
    "cosmos": ("FLOW_COSMOS", {}),
    "img_to_img": ("IMG_TO_IMG", {}),
    "img_to_img_flow": ("IMG_TO_IMG_FLOW", {}),
}
# Number types of latents: one picture taller than wide in a batch, a video, two kinds together.
SHAPES: list[Any] = [(3, 4, 5, 7), (1, 4, 3, 4, 6), [(1, 4, 2, 3, 3), (1, 4, 5)]]
CUTS: list[dict[str, Any]] = [
    {},
    {"start_step": 1},
    {"last_step": 1},
    {"last_step": 2, "force_full_denoise": True},
    {"add_noise": False},
]
# Their steps follow the error or the number of evaluations, not the levels.
OWN_STEPS = ("dpm_adaptive", "dpm_fast")


class AnyShapeModel(TestModel):
    """Two Gaussians around one number, whatever the shape of the latent."""

    def apply_model(
        self, x: Tensor, t: Tensor, c_crossattn: Tensor, transformer_options: Any = None, **kw: Any
    ) -> Tensor:
        axes = [1] * (x.ndim - 1)
        centre = c_crossattn[:, 0, 0].reshape(-1, *axes)
        flow = isinstance(self.model_sampling, CONST)
        return two_gaussians(x, t.reshape(-1, *axes), centre, flow)


def latent_of(shape: Any) -> Any:
    if isinstance(shape, list):
        return NestedTensor([torch.full(part, 0.3) for part in shape])
    return torch.full(shape, 0.3)


def members(latent: Any) -> list[Tensor]:
    return latent.unbind() if isinstance(latent, NestedTensor) else [latent]


def check(
    kind: str, sampler: str, scheduler: str, steps: int, denoise: float, cut: Any, shape: Any
):
    settings = KINDS[kind]
    space = LatentFormat()
    space.latent_channels = 4
    latent = latent_of(shape)
    options = dict(cut)
    start = noise.prepare_noise(latent, 2**64 - 1)
    if not options.pop("add_noise", True):
        start = noise.empty_noise(latent)
    seen: list[tuple[int, int]] = []
    made = run.sample(
        patcher(AnyShapeModel(*settings, space)), start, steps, 3.0, sampler, scheduler,
        conditioning([0.5] * 4), conditioning([-0.1] * 4), latent, denoise=denoise,
        callback=lambda i, x0, x, total: seen.append((i, total)), disable_pbar=True,
        seed=2**64 - 1, **options,
    )  # fmt: skip
    for result, given in zip(members(made), members(latent)):
        assert result.shape == given.shape
        assert torch.isfinite(result).all()
    if seen and sampler not in OWN_STEPS:
        assert seen == [(i, len(seen)) for i in range(len(seen))]


@pytest.mark.parametrize("sampler", solvers.MENU_NAMES)
def test_a_sampler_runs_on_every_kind_of_model(sampler: str) -> None:
    number = solvers.MENU_NAMES.index(sampler)
    ways = list(itertools.product((1, 2, 3, 20), (1.0, 0.5, 0.01)))
    for place, kind in enumerate(KINDS):
        # Counts without common factors: over all samplers and kinds everything meets everything.
        turn = number * len(KINDS) + place
        steps, denoise = ways[(turn + number) % len(ways)]
        scheduler = schedules.SCHEDULER_NAMES[turn % len(schedules.SCHEDULER_NAMES)]
        cut, shape = CUTS[turn % len(CUTS)], SHAPES[(turn + number) % len(SHAPES)]
        check(kind, sampler, scheduler, steps, denoise, cut, shape)


@pytest.mark.parametrize("sampler", solvers.MENU_NAMES)
@pytest.mark.parametrize("kind", ["eps", "flow"])
def test_levels_that_repeat_do_no_harm(sampler: str, kind: str) -> None:
    # 2,000 steps through a table of 1,000 levels meet each of them twice.
    check(kind, sampler, "simple", 20, 0.01, {}, (1, 4, 5, 7))


@pytest.mark.parametrize("sampler", solvers.MENU_NAMES)
def test_one_step_leaves_no_noise(sampler: str) -> None:
    latent, texts = torch.zeros(1, 4, 5, 7), conditioning([0.5] * 4)
    for kind in ("eps", "zsnr", "edm", "flow"):
        made = run.sample(
            patcher(AnyShapeModel(*KINDS[kind], LatentFormat())), noise.prepare_noise(latent, 3), 1,
            1.0, sampler, "simple", texts, texts, latent, disable_pbar=True, seed=3,
        )  # fmt: skip
        assert made.abs().max() < 3  # the data lie within 0.5 +- 0.8, with a deviation of 0.35


def test_dpm_fast_counts_the_steps_it_takes() -> None:
    space = LatentFormat()
    latent = torch.zeros(1, 4, 8, 8)
    seen: list[tuple[int, int]] = []
    run.sample(
        patcher(AnyShapeModel("EPS", {}, space)), noise.prepare_noise(latent, 1), 8, 3.0,
        "dpm_fast", "karras", conditioning([0.5] * 4), conditioning([0.0] * 4), latent,
        callback=lambda i, x0, x, total: seen.append((i, total)), disable_pbar=True, seed=1,
    )  # fmt: skip
    assert seen == [(0, 3), (1, 3), (2, 3)]


def test_members_of_a_nested_latent_reach_the_callback() -> None:
    latent = latent_of(SHAPES[2])
    seen: list[Any] = []
    run.sample(
        patcher(AnyShapeModel("FLOW", {}, LatentFormat())), noise.prepare_noise(latent, 1), 3, 1.0,
        "euler", "simple", conditioning([0.5] * 4), conditioning([0.0] * 4), latent,
        callback=lambda i, x0, x, total: seen.append(x0), disable_pbar=True, seed=1,
    )  # fmt: skip
    assert [tuple(part.shape) for part in seen[-1].unbind()] == SHAPES[2]


@pytest.mark.parametrize("sampler", ["dpm_2_ancestral", "dpmpp_2s_ancestral", "euler_ancestral"])
def test_one_step_over_a_wide_range_ends_near_the_data(sampler: str) -> None:
    sigmas = torch.tensor([4518.0, 0.03])
    start = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3)) * sigmas[0]
    made = solvers.find(sampler).function(
        lambda x, sigma: two_gaussians(x, sigma.reshape(-1, 1, 1, 1), torch.tensor(0.5), False),
        start, sigmas, extra_args={}, disable=True,
    )  # fmt: skip
    assert made.abs().max() < 5  # a level between the two that rounding made up gave 15,000


ADAPTIVE_LIMITS = [
    ({"h_init": 0.0}, "h_init"),
    ({"rtol": 0.0, "atol": 0.0}, r"no step met the tolerance in \d+ tries"),
    ({"accept_safety": 100.0}, "lower accept_safety"),
]


@pytest.mark.parametrize(("options", "reason"), ADAPTIVE_LIMITS)
def test_an_adaptive_run_that_cannot_end_says_why(options: dict[str, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        option_run("dpm_adaptive", options)


SDE_OPTIONS = [
    (name, {"eta": eta, "s_noise": s_noise})
    for name in ("dpmpp_sde", "dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_3m_sde", "seeds_2",
                 "seeds_3", "exp_heun_2_x0_sde", "euler_ancestral", "dpmpp_2s_ancestral",
                 "dpm_2_ancestral", "res_multistep_ancestral", "dpm_adaptive")
    for eta, s_noise in ((0.0, 1.0), (1.0, 0.0), (0.5, 2.0))
]  # fmt: skip
EXTREME_OPTIONS = [
    ("dpmpp_sde", {"r": 100.0}), ("seeds_2", {"r": 0.01, "eta": 100.0}), ("lms", {"order": 100}),
    ("sa_solver", {"predictor_order": 6, "corrector_order": 6}),
    ("dpm_adaptive", {"pcoeff": 100.0, "dcoeff": 100.0}),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["EPS", "FLOW"])
@pytest.mark.parametrize(("name", "options"), SDE_OPTIONS + EXTREME_OPTIONS)
def test_options_keep_a_run_finite(name: str, options: dict[str, float], kind: str) -> None:
    assert torch.isfinite(option_run(name, options, kind)).all()


@pytest.mark.parametrize(
    "name", ["dpmpp_sde", "dpmpp_2m_sde", "dpmpp_3m_sde", "seeds_2", "euler_ancestral", "er_sde"]
)
def test_without_noise_the_seed_of_the_steps_does_not_matter(name: str) -> None:
    options = {"s_noise": 0.0}
    assert torch.equal(option_run(name, options, seed=1), option_run(name, options, seed=2))


def option_run(
    name: str,
    options: dict[str, Any],
    kind: str = "EPS",
    seed: int = 1,
    levels: list[float] | None = None,
) -> Tensor:
    latent = torch.zeros(1, 4, 8, 8)
    if levels is None:
        levels = [14.6, 5.0, 1.0, 0.2, 0.0] if kind == "EPS" else [1.0, 0.7, 0.4, 0.1, 0.0]
    return run.sample_custom(
        patcher(AnyShapeModel(kind, {}, LatentFormat())), noise.prepare_noise(latent, 1), 3.0,
        samplers.ksampler(name, options), torch.tensor(levels), conditioning([0.5] * 4),
        conditioning([0.0] * 4), latent, disable_pbar=True, seed=seed,
    )  # fmt: skip


HIGH_ETA = [
    (name, eta, kind)
    for name in ("euler_ancestral", "dpmpp_2s_ancestral", "dpmpp_2s_ancestral_cfg_pp",
                 "res_multistep_ancestral", "euler_ancestral_cfg_pp")
    for eta in (1.0, 1.5, 3.0)
    for kind in ("EPS", "FLOW")
    if (name, kind) != ("euler_ancestral", "EPS") or eta == 1.0
]  # fmt: skip


@pytest.mark.parametrize(("name", "eta", "kind"), [*HIGH_ETA, ("dpm_2_ancestral", 3.0, "FLOW")])
def test_however_high_eta_a_step_ends_at_the_noise_of_its_level(
    name: str, eta: float, kind: str
) -> None:
    levels = [10.0, 2.0] if kind == "EPS" else [0.9, 0.3]
    one, other = (option_run(name, {"eta": eta}, kind, seed=seed, levels=levels) for seed in (1, 2))
    # Start noise is the same, so they differ by what was drawn afresh.
    scale = 1.0 if kind == "EPS" else 1 - levels[1]
    drawn = float((one - other).std()) * scale / 2**0.5
    assert 0.75 * levels[1] < drawn < 1.15 * levels[1]


@pytest.mark.parametrize("name", ["euler_ancestral", "dpm_2_ancestral"])
def test_a_step_that_keeps_no_old_noise_adds_none(name: str) -> None:
    levels = [10.0, 2.0]
    one, other = (option_run(name, {"eta": 3.0}, seed=seed, levels=levels) for seed in (1, 2))
    assert torch.equal(one, other)


MASKS = [
    ((3, 4, 8, 12), (8, 12)),
    ((3, 4, 8, 12), (1, 8, 12)),
    ((3, 4, 8, 12), (3, 8, 12)),
    ((3, 4, 8, 12), (2, 1, 16, 24)),
    ((1, 4, 3, 8, 12), (1, 8, 12)),
    ((1, 4, 3, 8, 12), (3, 8, 12)),
    ((1, 4, 3, 8, 12), (1, 1, 3, 8, 12)),
    ((2, 4, 20), (1, 1, 20)),
    ((2, 4, 20), (2, 20)),
    ([(1, 4, 2, 8, 12), (1, 4, 5)], (1, 8, 12)),
]


@pytest.mark.parametrize("kind", ["EPS", "FLOW"])
@pytest.mark.parametrize(("shape", "mask_shape"), MASKS)
def test_what_a_mask_spares_is_the_latent_again(
    shape: Any, mask_shape: tuple[int, ...], kind: str
) -> None:
    mask = torch.zeros(mask_shape)
    mask[..., : mask_shape[-1] // 2] = 1.0
    latent = latent_of(shape)
    made = run.sample(
        patcher(AnyShapeModel(kind, {}, LatentFormat())), noise.prepare_noise(latent, 1), 3, 3.0,
        "euler", "simple", conditioning([0.5] * 4), conditioning([0.0] * 4), latent,
        noise_mask=mask, disable_pbar=True, seed=1,
    )  # fmt: skip
    result = members(made)[0]
    half = result.shape[-1] // 2
    torch.testing.assert_close(result[..., half:], torch.full_like(result[..., half:], 0.3))
    changed = (result[..., :half] - 0.3).abs().flatten(2).amax(-1)
    assert (changed > 0.05).all()  # in every item and channel


def test_a_mask_without_rows_is_named() -> None:
    latent = torch.zeros(1, 4, 8, 8)
    with pytest.raises(ValueError, match=r"a mask of shape \(8,\) has no rows and columns"):
        run.sample(
            patcher(AnyShapeModel("EPS", {}, LatentFormat())), noise.prepare_noise(latent, 1), 3,
            3.0, "euler", "simple", conditioning([0.5] * 4), conditioning([0.0] * 4), latent,
            noise_mask=torch.ones(8), disable_pbar=True, seed=1,
        )  # fmt: skip


@pytest.mark.parametrize(("side", "ratio", "sides"), [(15, 1.1, [16]), (30, 1.1, [32, 33])])
def test_a_growing_latent_has_sides_rounded_in_double_precision(
    side: int, ratio: float, sides: list[int]
) -> None:
    # In single precision 15 * 1.1 lies above 16.5, and 30 * 1.05 below 31.5.
    seen: list[int] = []

    def model(x: Tensor, sigma: Tensor) -> Tensor:
        seen.append(x.shape[-1])
        return x * 0.5

    levels = torch.tensor([9.0, 5.0, 2.0, 1.0, 0.0])[-len(sides) - 2 :]
    upscale.sample_lcm_upscale(
        model, torch.ones(1, 4, side, side), levels, {}, disable=True, total_upscale=ratio,
        upscale_method="bilinear", upscale_steps=len(sides),
    )  # fmt: skip
    assert seen == [side, *sides]
