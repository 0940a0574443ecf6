"""Guidance nodes where the pictures that people have part from the published formula: both, on
latents where the two differ, against loops and sums in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from comfy_extras import (
    nodes_apg,
    nodes_custom_sampler,
    nodes_fresca,
    nodes_hypertile,
    nodes_model_advanced,
    nodes_perpneg,
    nodes_tomesd,
    nodes_video_model,
)
from tests.comfy.sampling.support import ClosedFormModel, TestModel, conditioning, patcher
from tests.comfy_extras.test_guidance_settings import (
    CENTRES,
    draws,
    estimate_of,
    exact,
    guided,
    two_lists,
)

Array = NDArray[np.float64]
SIGMA, SCALE = 1.7, 5.0
VIDEOS = [(2, 3, 5, 6, 7), (1, 4, 1, 3, 4), (1, 2, 8, 4, 5)]
SOUND = (3, 4, 11)


@pytest.fixture(params=[False, True], ids=["as_always", "by_the_paper"])
def published(request: pytest.FixtureRequest) -> bool:
    if request.param:
        request.getfixturevalue("paper_formulas")
    return bool(request.param)


def made_and_given(view: Any, shape: tuple[int, ...]) -> tuple[Array, list[Array]]:
    """What a node makes of an input and two estimates, and these."""
    given = list(draws(shape, 1 + SIGMA, 1.0, 1.0))
    made = guided(view, *given, SCALE, SIGMA)
    return made.double().numpy(), [tensor.double().numpy() for tensor in given]


def near(made: Array, expected: Array) -> None:
    assert np.abs(made - expected).max() <= 6e-6 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("shape", VIDEOS)
def test_the_contrast_of_a_video_is_kept_by_columns_or_as_a_whole(
    shape: tuple[int, ...], published: bool
) -> None:
    view = nodes_model_advanced.RescaleCFG().patch(patcher(TestModel()), 0.6)[0]
    made, (x, cond, uncond) = made_and_given(view, shape)
    alpha, rest = 1 / math.hypot(1, SIGMA), SIGMA / math.hypot(1, SIGMA)
    positive, negative = ((alpha * alpha * x - clean) / rest for clean in (cond, uncond))
    v = negative + SCALE * (positive - negative)
    expected = np.empty_like(x)
    for item in range(shape[0]):
        columns = [slice(None)] if published else [slice(w, w + 1) for w in range(shape[-1])]
        for w in columns:
            gain = positive[item, ..., w].std(ddof=1) / v[item, ..., w].std(ddof=1)
            rescaled = v[item, ..., w] * (0.6 * gain + 0.4)
            expected[item, ..., w] = alpha * alpha * x[item, ..., w] - rest * rescaled
    near(made, expected)


@pytest.mark.parametrize("cutoff", [1, 2, 10000])
@pytest.mark.parametrize("shape", VIDEOS)
def test_frames_away_from_the_middle_have_only_high_frequencies_or_both(
    shape: tuple[int, ...], cutoff: int, published: bool
) -> None:
    low, high = 0.5, 1.5
    view = nodes_fresca.FreSca.execute(patcher(TestModel()), low, high, cutoff)[0]
    made, (_, cond, uncond) = made_and_given(view, shape)
    frames, rows, columns = shape[2:]

    def inside(size: int) -> list[bool]:  # in the order of the transform
        reach = min(cutoff, size // 2)
        return [-reach <= place < reach for place in np.fft.fftfreq(size, 1 / size).round()]

    box = np.outer(inside(rows), inside(columns))
    middle, reach = frames // 2, min(cutoff, frames // 2)
    expected = np.empty_like(cond)
    for frame in range(frames):
        has_low = published or middle - reach <= frame < middle + reach
        gain = np.where(box, low if has_low else high, high)
        step = np.fft.fft2(cond[:, :, frame] - uncond[:, :, frame]) * gain
        expected[:, :, frame] = uncond[:, :, frame] + SCALE * np.fft.ifft2(step).real
    near(made, expected)


@pytest.mark.usefixtures("published")
def test_frequencies_of_sound_are_the_same_by_both() -> None:
    view = nodes_fresca.FreSca.execute(patcher(TestModel()), 0.5, 1.5, 2)[0]
    made, (_, cond, uncond) = made_and_given(view, SOUND)
    places = np.fft.fftfreq(SOUND[-1], 1 / SOUND[-1]).round()
    step = np.fft.fft(cond - uncond) * np.where((places >= -2) & (places < 2), 0.5, 1.5)
    near(made, uncond + SCALE * np.fft.ifft(step).real)


def vectors(shape: tuple[int, ...], published: bool) -> Iterator[tuple[Any, ...]]:
    """What APG takes for one vector: an item; or a channel of a video, or all items of sound."""
    if published:
        yield from ((item,) for item in range(shape[0]))
    elif len(shape) == 3:
        yield (slice(None),)
    else:
        yield from np.ndindex(shape[: len(shape) - 3])


@pytest.mark.parametrize("shape", [*VIDEOS, SOUND, (2, 4, 5, 6)])
def test_lengths_and_directions_of_guidance(shape: tuple[int, ...], published: bool) -> None:
    eta, radius = 0.3, 2.0
    view = nodes_apg.APG.execute(patcher(TestModel()), eta, radius, 0.0)[0]
    made, (_, cond, uncond) = made_and_given(view, shape)
    expected = np.empty_like(cond)
    for place in vectors(shape, published):
        towards, step = cond[place], cond[place] - uncond[place]
        step = step * min(1.0, radius / math.sqrt((step**2).sum()))
        along = (step * towards).sum() / (towards**2).sum() * towards
        expected[place] = towards + SCALE * (step - along + eta * along)
    near(made, expected)


@pytest.mark.parametrize("size", [(8, 20), (20, 8), (12, 16), (16, 16)])
@pytest.mark.parametrize("swap", [1, 3])
def test_tiles_are_drawn_for_both_sides(size: tuple[int, int], swap: int, published: bool) -> None:
    """Numbers of tiles are drawn for the side that counts as rows first: the columns, by default;
    and tokens are taken in that order."""
    rows, columns = size if published else size[::-1]
    x = torch.arange(rows * columns, dtype=torch.float).reshape(1, -1, 1).expand(2, -1, 3)
    tiling = nodes_hypertile.Tiling(32, swap, 0, False)
    torch.manual_seed(11)
    divided = tiling.divide(x, x, x, {"original_shape": [2, 4, *size]})

    torch.manual_seed(11)
    counts = []
    for side in (rows, columns):
        parts = [side // least for least in range(4, side + 1) if side % least == 0][:swap]
        drawn = len(parts) if published else len(parts) - 1  # which leaves the last out
        counts.append(parts[int(torch.randint(0, drawn, (1,)))] if len(parts) > 1 else parts[0])
    grid = np.arange(rows * columns).reshape(rows, columns)
    tiles = [
        tile.ravel() for band in np.split(grid, counts[0]) for tile in np.split(band, counts[1], 1)
    ]
    expected = torch.from_numpy(np.stack(tiles * 2)).float()[..., None].expand(-1, -1, 3)
    for part in divided:
        assert torch.equal(part, expected)
    assert torch.equal(tiling.join(divided[0], {}), x)


def across(vector: Tensor, other: Tensor, published: bool) -> Tensor:
    """What is left of a vector without its part along another: of each item, or of the batch."""
    pairs = [(vector, other)] if not published else list(zip(vector, other))
    left = [v - (v * o).sum() / (o * o).sum() * o for v, o in pairs]
    return left[0] if not published else torch.stack(left)


def test_the_negative_direction_is_that_of_the_batch_or_of_an_item(published: bool) -> None:
    x, a, b, c = draws((3, 4, 5, 6), 1.0, 2.0, 3.0, 1.0)
    made = nodes_perpneg.perp_neg(x, a, b, c, 0.7, SCALE)
    wanted = c.double() + SCALE * (
        (a - c).double() - 0.7 * across((b - c).double(), (a - c).double(), published)
    )
    near(made.double().numpy(), wanted.numpy())


def test_tokens_are_merged_for_queries_alone_or_for_keys_and_values_too(published: bool) -> None:
    q, k, v = draws((2, 6 * 8, 5), 1.0, 1.0, 1.0)
    merging = nodes_tomesd.Merging(0.4)
    fewer = merging.merge(q, k, v, {"original_shape": [2, 4, 6, 8]})
    plan = merging._merge
    assert plan is not None
    assert fewer[0].shape == (2, 48 - int(48 * 0.4), 5)
    if not published:
        assert fewer[1] is k
        assert fewer[2] is v
        return
    for whole, part in zip((q, k, v), fewer):
        for item in range(2):
            kept = whole[item, plan.sources[item, plan.kept[item]]]
            assert torch.equal(part[item, : len(kept)], kept)
            for place, target in enumerate(plan.targets[item].tolist()):
                goes = plan.sources[item, plan.merged[item, plan.into[item] == place]]
                mean = torch.cat([whole[item, target][None], whole[item, goes]]).mean(0)
                torch.testing.assert_close(part[item, len(kept) + place], mean)


def nothing_for_the_negative(name: str, texts: list[Any]) -> Any:
    model = patcher(ClosedFormModel())
    if name == "PerpNeg":
        return nodes_perpneg.PerpNeg.execute(model, texts[2], 0.8)[0]
    return nodes_video_model.VideoLinearCFGGuidance().patch(model, 2.5)[0]


@pytest.mark.parametrize("name", ["PerpNeg", "VideoLinearCFGGuidance"])
def test_at_scale_one_the_negative_counts_as_zeros_or_is_made(name: str, published: bool) -> None:
    shape = (3, 4, 5, 6)
    (x,) = draws(shape, 1 + SIGMA)
    a, b, c = exact("EPS", SIGMA, x)
    view = nothing_for_the_negative(name, [conditioning(centre) for centre in CENTRES])
    if not published:
        b = torch.zeros_like(b)
    if name == "PerpNeg":
        expected = c + (a - c) - 0.8 * across(b - c, a - c, published)
    else:
        expected = b + torch.linspace(2.5, 1.0, 3).double().reshape(-1, 1, 1, 1) * (a - b)
    near(estimate_of(two_lists(view, 1.0), x, SIGMA).numpy(), expected.numpy())
    asked = {number for call in view.model.calls for number in call["cond_or_uncond"]}
    assert (1 in asked) == published


@pytest.mark.parametrize("style", ["regular", "nested"])
def test_hooks_of_a_model_act_on_the_first_of_two_differences(style: str) -> None:
    """By the recorded runs, whose bits only come back if "regular" begins at the negative."""
    hooks: dict[str, Callable[[dict[str, Any]], Tensor]] = {
        "rule": lambda facts: 0.25 * facts["cond"] + facts["uncond"],
        "after": lambda facts: facts["denoised"] * facts["cond_scale"] + facts["cond_denoised"],
    }
    (x,) = draws((2, 4, 5, 6), 1 + SIGMA)
    positive, middle, negative = exact("EPS", SIGMA, x)
    model = patcher(ClosedFormModel())
    model.set_model_sampler_cfg_function(hooks["rule"])
    model.set_model_sampler_post_cfg_function(hooks["after"])
    texts = [conditioning(centre) for centre in CENTRES]
    guider = nodes_custom_sampler.DualCFGGuider.execute(model, *texts, 4.0, 2.5, style)[0]

    def hooked(towards: Tensor, away: Tensor, scale: float) -> Tensor:
        ruled = x - (0.25 * (x - towards) + (x - away))
        return ruled * scale + towards

    if style == "regular":
        expected = hooked(middle, negative, 2.5) + 4.0 * (positive - middle)
    else:
        expected = negative + 2.5 * (hooked(positive, middle, 4.0) - negative)
    near(estimate_of(guider, x, SIGMA).numpy(), expected.numpy())
