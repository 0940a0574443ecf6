"""Guidance nodes against formulas in double precision, over shapes, scales, noise levels, kinds of
prediction and the ends of their options; and what must not outlive a step or a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from comfy.sampling import guidance, noise, run, samplers
from comfy_extras import (
    nodes_apg,
    nodes_cfg,
    nodes_custom_sampler,
    nodes_eps,
    nodes_fresca,
    nodes_hypertile,
    nodes_lumina2,
    nodes_mahiro,
    nodes_model_advanced,
    nodes_model_downscale,
    nodes_perpneg,
    nodes_sag,
    nodes_slg,
    nodes_tcfg,
    nodes_video_model,
)
from tests.comfy.sampling.support import (
    ClosedFormModel,
    TestModel,
    conditioning,
    patcher,
    two_gaussians,
)

Array = np.ndarray
Formula = Callable[[Array, Array, Array, float, float, bool], Array]

SHAPES = [(3, 4, 5, 7), (1, 4, 8, 8), (2, 3, 3, 5, 7), (3, 8, 11)]
SCALES = [0.0, 1.0, -3.0, 7.5]
LEVELS = [("EPS", 14.6), ("V_PREDICTION", 0.4), ("FLOW", 0.97), ("FLOW", 1.0)]


def plain(cond: Array, uncond: Array, scale: float) -> Array:
    return uncond + scale * (cond - uncond)


def apg(eta: float, radius: float) -> Formula:
    """Sadat et al. 2024, algorithm 1."""

    def formula(x: Array, c: Array, u: Array, scale: float, *_: Any) -> Array:
        if scale == 0:
            return u
        step = c - u
        if radius > 0:
            step = step * min(1, radius / np.linalg.norm(step))
        unit = c / np.linalg.norm(c)
        along = (step * unit).sum() * unit
        return c + scale * (step - along + eta * along)

    return formula


def zero_star(x: Array, c: Array, u: Array, scale: float, *_: Any) -> Array:
    share = ((x - c) * (x - u)).sum() / ((x - u) ** 2).sum()
    return plain(c, share * u, scale)


def bounded(strength: float) -> Formula:
    def formula(x: Array, c: Array, u: Array, scale: float, *_: Any) -> Array:
        made = plain(c, u, scale)
        ratio = np.linalg.norm(c, axis=0) / np.linalg.norm(made, axis=0)
        return strength * made * np.minimum(1, ratio)

    return formula


def damped(x: Array, c: Array, u: Array, scale: float, *_: Any) -> Array:
    """By the eigenvectors of the scores' Gram matrix instead of their singular vectors."""
    scores = np.stack([(x - c).ravel(), (x - u).ravel()])
    main = np.linalg.eigh(scores @ scores.T)[1][:, -1] @ scores
    main /= np.linalg.norm(main)
    return plain(c, x - ((scores[1] @ main) * main).reshape(x.shape), scale)


def frequencies(low: float, high: float, cutoff: int) -> Formula:
    """Along the last two axes of an item [C, ..., H, W], or the length of one [C, L]."""

    def formula(x: Array, c: Array, u: Array, scale: float, *_: Any) -> Array:
        axes = tuple(range(1, c.ndim))[-2:]
        inside = np.ones(c.shape, dtype=bool)
        for axis in axes:
            size = c.shape[axis]
            reach, places = min(cutoff, size // 2), np.fft.fftfreq(size, 1 / size).round()
            spread = [size if a == axis else 1 for a in range(c.ndim)]
            inside &= ((places >= -reach) & (places < reach)).reshape(spread)
        step = np.fft.fftn(c - u, axes=axes) * np.where(inside, low, high)
        return u + scale * np.fft.ifftn(step, axes=axes).real

    return formula


def rescaled(share: float) -> Formula:
    """Lin et al. 2023, on velocities of the latent scaled to unit variance."""

    def formula(x: Array, c: Array, u: Array, scale: float, sigma: float, flow: bool) -> Array:
        alpha, rest = 1 / math.hypot(1, sigma), sigma / math.hypot(1, sigma)
        positive, negative = ((alpha * alpha * x - clean) / rest for clean in (c, u))
        v = plain(positive, negative, scale)
        v = share * v * positive.std(ddof=1) / v.std(ddof=1) + (1 - share) * v
        return alpha * alpha * x - rest * v

    return formula


def renormed(truncation: float, limit: float) -> Formula:
    def formula(x: Array, c: Array, u: Array, scale: float, sigma: float, flow: bool) -> Array:
        if sigma >= truncation:
            return c
        made = plain(c, u, scale)
        longest = limit * np.linalg.norm(c) / np.linalg.norm(made)
        return made * (min(1, longest) if limit > 0 else 1)

    return formula


def temporal(k: float, spread: float) -> Formula:
    """Xu et al. 2025: the predicted noise times (eta s^2 + 1) / (eta s^2 / k + 1), eta the
    signal-to-noise ratio."""

    def formula(x: Array, c: Array, u: Array, scale: float, sigma: float, flow: bool) -> Array:
        made, alpha = plain(c, u, scale), 1 - sigma if flow else 1.0
        if alpha == 0:
            return made
        signal = (alpha / sigma * spread) ** 2
        predicted = (x - alpha * made) / sigma
        return (x - sigma * predicted * (signal + 1) / (signal / k + 1)) / alpha

    return formula


def renorm_node(model: Any, truncation: float, limit: float) -> Any:
    model.model.diffusion_model = nn.Module()
    model.model.diffusion_model.in_channels = 16
    return nodes_lumina2.RenormCFG.execute(model, truncation, limit)


NODES: dict[str, tuple[Callable[..., Any], Callable[..., Formula], list[tuple[Any, ...]]]] = {
    "APG": (
        lambda m, *o: nodes_apg.APG.execute(m, *o, 0.0), apg,
        [(1.0, 5.0), (0.0, 0.0), (-10.0, 50.0), (10.0, 0.1)],
    ),
    "CFGZeroStar": (nodes_cfg.CFGZeroStar.execute, lambda: zero_star, [()]),
    "CFGNorm": (nodes_cfg.CFGNorm.execute, bounded, [(0.0,), (1.0,), (100.0,)]),
    "TCFG": (nodes_tcfg.TCFG.execute, lambda: damped, [()]),
    "FreSca": (
        nodes_fresca.FreSca.execute, frequencies,
        [(0.0, 10.0, 1), (1.0, 1.25, 10000), (0.5, 0.7, 3)],
    ),
    "RescaleCFG": (
        lambda m, *o: nodes_model_advanced.RescaleCFG().patch(m, *o), rescaled,
        [(0.0,), (0.7,), (1.0,)],
    ),
    "RenormCFG": (
        renorm_node, renormed, [(100.0, 1.0), (0.0, 1.0), (0.98, 0.0), (100.0, 0.3)],
    ),
    "TSR": (
        nodes_eps.TemporalScoreRescaling.execute, temporal,
        [(0.95, 1.0), (0.01, 0.01), (100.0, 100.0), (0.01, 100.0)],
    ),
}  # fmt: skip


def draws(shape: tuple[int, ...], *scales: float) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale for scale in scales)


def guided(view: Any, x: Tensor, cond: Tensor, uncond: Tensor, scale: float, sigma: float) -> Any:
    options = {
        **view.model_options,
        "sampler_calc_cond_batch_function": lambda args: [cond, uncond],
        "disable_cfg1_optimization": True,
    }
    levels = torch.full((x.shape[0],), sigma)
    return guidance.sampling_function(view.model, x, levels, [], [], scale, options)


# The main direction of two nearly parallel scores of length 200, by a singular value decomposition
# in single precision.
ROUNDING = {"TCFG": 8e-5}


@pytest.mark.usefixtures("paper_formulas")
@pytest.mark.parametrize("name", NODES)
def test_a_node_follows_its_formula_at_any_setting(name: str) -> None:
    node, formula_of, settings = NODES[name]
    for values, shape, scale, level in itertools.product(settings, SHAPES, SCALES, LEVELS):
        kind, sigma = level
        x, cond, uncond = draws(shape, 1 + sigma, 1.0, 1.0)
        view = node(patcher(TestModel(kind)), *values)[0]
        made = guided(view, x, cond, uncond, scale, sigma).double().numpy()
        single, formula = float(torch.tensor(sigma)), formula_of(*values)
        items = zip(*(tensor.double().numpy() for tensor in (x, cond, uncond)))
        expected = np.stack([formula(*item, scale, single, kind == "FLOW") for item in items])
        error = np.abs(made - expected).max() / max(1.0, np.abs(expected).max())
        assert error < ROUNDING.get(name, 6e-6), (values, shape, scale, level)


CENTRES = ([0.5, -0.25, 0.1, 0.0], [-0.1, 0.2, 0.0, 0.3], [0.3, 0.3, -0.2, 0.7])


def estimate_of(guider: Any, x: Tensor, sigma: float) -> Tensor:
    """What a guider answers to a sampler."""
    made = []

    class Sampler:
        def sample(self, model: Any, sigmas: Tensor, extra_args: Any, *_: Any) -> Tensor:
            made.append(model(x, torch.full((x.shape[0],), sigma), **extra_args))
            return x

    nothing = torch.zeros(x.shape)
    levels = torch.tensor([sigma, 0.0])
    guider.sample(nothing, nothing, Sampler(), levels, disable_pbar=True, seed=0)
    return made[0].double()


def two_lists(model: Any, scale: float) -> guidance.CFGGuider:
    guider = guidance.CFGGuider(model)
    guider.set_conds(conditioning(CENTRES[0]), conditioning(CENTRES[1]))
    guider.set_cfg(scale)
    return guider


RUNS = [
    ("EPS", 7.0, (2, 4, 5, 7)),
    ("V_PREDICTION", 0.4, (1, 4, 3, 5, 6)),
    ("FLOW", 0.9, (3, 4, 9)),
]


def exact(kind: str, sigma: float, x: Tensor) -> list[Tensor]:
    level, flow = torch.tensor([sigma]).double(), kind == "FLOW"
    places = [torch.tensor(c).double().reshape(1, -1, *[1] * (x.ndim - 2)) for c in CENTRES]
    return [two_gaussians(x.double(), level, place, flow) for place in places]


@pytest.mark.usefixtures("paper_formulas")
@pytest.mark.parametrize(("kind", "sigma", "shape"), RUNS)
def test_guidance_by_three_lists_at_any_scale(
    kind: str, sigma: float, shape: tuple[int, ...]
) -> None:
    (x,) = draws(shape, 1 + sigma)
    model = patcher(ClosedFormModel(kind))
    a, b, c = exact(kind, sigma, x)
    texts = [conditioning(centre) for centre in CENTRES]

    def near(guider: Any, expected: Tensor, *case: Any) -> None:
        difference = (estimate_of(guider, x, sigma) - expected).abs().max()
        assert difference <= 1e-5 * expected.abs().max(), case

    for first, second in itertools.product((0.0, 1.0, -2.0, 4.5), (0.0, 1.0, 3.0)):
        dual = nodes_custom_sampler.DualCFGGuider.execute
        regular, nested = (dual(model, *texts, first, second, s)[0] for s in ("regular", "nested"))
        near(regular, c + (b - c) * second + (a - b) * first, "regular", first, second)
        near(nested, c + second * (b + first * (a - b) - c), "nested", first, second)
        positive, negative = a - c, b - c
        axes = tuple(range(1, x.ndim))
        along = (positive * negative).sum(axes, keepdim=True) / (positive**2).sum(
            axes, keepdim=True
        )
        across = negative - along * positive
        expected = c + first * (positive - second * across)
        guider = nodes_perpneg.PerpNegGuider.execute(model, *texts, first, second)[0]
        near(guider, expected, "guider", first, second)
        node = nodes_perpneg.PerpNeg.execute(model, texts[2], second)[0]
        near(two_lists(node, first), expected, "node", first, second)
        place = torch.linspace(0, 1, shape[0], dtype=torch.float64)
        rise = 1 - (2 * place - 1).abs()
        for kind_of_scale, shares in (("Linear", place), ("Triangle", rise)):
            scales = second + (first - second) * shares.reshape(-1, *[1] * (x.ndim - 1))
            frames = getattr(nodes_video_model, f"Video{kind_of_scale}CFGGuidance")()
            view = frames.patch(model, second)[0]
            near(two_lists(view, first), b + scales * (a - b), kind_of_scale, first, second)


@pytest.mark.usefixtures("paper_formulas")
@pytest.mark.parametrize(("least", "lists"), [(1.0, [[0]]), (2.5, [[1, 0]])])
def test_by_the_paper_frames_need_the_negative_at_scale_one_unless_all_have_it(
    least: float, lists: list[list[int]]
) -> None:
    model = patcher(ClosedFormModel())
    view = nodes_video_model.VideoLinearCFGGuidance().patch(model, least)[0]
    estimate_of(two_lists(view, 1.0), torch.ones(2, 4, 3, 3), 2.0)
    assert [call["cond_or_uncond"] for call in model.model.calls] == lists


def test_momentum_ends_with_its_run() -> None:
    """Also where the next one begins at or below the last level, and with another size."""
    view = nodes_apg.APG.execute(patcher(ClosedFormModel()), 1.0, 5.0, -0.75)[0]

    def sampled(size: int, *levels: float) -> Tensor:
        latent = torch.zeros(1, 4, size, size)
        return run.sample_custom(
            view, noise.prepare_noise(latent, 3), 4.0, samplers.ksampler("euler"),
            torch.tensor(levels), conditioning(CENTRES[0]), conditioning(CENTRES[1]), latent,
            disable_pbar=True, seed=3,
        )  # fmt: skip

    first = sampled(6, 5.0, 0.0)
    sampled(8, 5.0, 2.0, 0.0)
    sampled(8, 2.0, 0.0)
    sampled(6, 5.0, 0.0)
    assert torch.equal(sampled(6, 5.0, 0.0), first)


def facts_of(**values: Any) -> dict[str, Any]:
    return {"sigma": torch.ones(2), "timestep": torch.ones(2), "cond_scale": 4.0, **values}


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_estimates_without_spread_stay_what_they_are(value: float) -> None:
    flat = torch.full((2, 4, 6, 6), value)
    views = {
        "RescaleCFG": nodes_model_advanced.RescaleCFG().patch(patcher(TestModel()), 0.7)[0],
        "RenormCFG": renorm_node(patcher(TestModel()), 100.0, 1.0)[0],
        "Mahiro": nodes_mahiro.Mahiro.execute(patcher(TestModel()))[0],
    }
    for name, view in views.items():
        made = guided(view, torch.zeros_like(flat), flat, flat.clone(), 1.0, 1.7)
        torch.testing.assert_close(made, flat, msg=name)


def test_skipped_layers_of_a_flat_estimate_are_not_rescaled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = patcher(TestModel())
    span = nodes_slg.Span(model, 0.0, 1.0)
    view = nodes_slg.guided_by_skipping(model, [7], [], 2.5, span, 0.4)
    (change,) = view.model_options["sampler_post_cfg_function"]
    flat = torch.ones(2, 4, 3, 3)
    monkeypatch.setattr(nodes_slg.batching, "calc_cond_batch", lambda *args: [flat * 0])
    given = facts_of(
        denoised=flat, cond_denoised=flat, cond=[], input=flat, model=None, model_options={}
    )
    assert torch.equal(change(given), flat * 3.5)


@pytest.mark.parametrize("size", [(3, 20), (20, 3), (1, 1), (17, 23)])
@pytest.mark.parametrize("factor", [0.1, 0.9, 1.05, 2.0, 9.0])
def test_shrunk_features_fit_their_skips_again(size: tuple[int, int], factor: float) -> None:
    """Rounding may leave one side as it was and change the other."""
    node = nodes_model_downscale.PatchModelAddDownscale.execute
    values = (3, factor, 0.0, 1.0, True, "bilinear", "nearest-exact")
    patches = node(patcher(TestModel()), *values)[0].model_options["transformer_options"]["patches"]
    (shrink,), (match,) = patches["input_block_patch_after_skip"], patches["output_block_patch"]
    h = torch.ones(2, 4, *size)
    small = shrink(h, {"block": ("input", 3), "sigmas": torch.tensor([5.0])})
    assert match(small, h, {})[0].shape == h.shape


def test_tiles_of_a_call_that_failed_are_forgotten() -> None:
    tiling = nodes_hypertile.Tiling(tile_size=32, swap_size=1, max_depth=0, scale_depth=False)
    facts = {"original_shape": [1, 4, 16, 24]}
    x = torch.ones(1, 16 * 24, 2)
    assert tiling.divide(x, x, x, facts)[0].shape[0] > 1  # and no result to join
    other = torch.ones(1, 96, 2)
    divided, _, _ = tiling.divide(other, other, other, facts)
    assert tiling.join(divided, facts) is other


def test_attention_kept_for_a_step_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    view = nodes_sag.SelfAttentionGuidance.execute(patcher(TestModel()), 0.5, 2.0)[0]
    replaced = view.model_options["transformer_options"]["patches_replace"]["attn1"]
    (recorder,) = replaced.values()
    x = torch.ones(2, 4, 6, 10)
    monkeypatch.setattr(nodes_sag.batching, "calc_cond_batch", lambda *args: [x])
    for size in (x, x[..., :4]):  # the second is too small to be blurred
        recorder.scores = torch.ones(4, 15, 15)
        guided(view, size, size, size, 3.0, 1.0)
        assert recorder.scores is None
