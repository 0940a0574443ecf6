"""Schedules of the scheduler nodes and edits of sigmas against recorded ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.sampling import (
    gits,
    gits_table,
    noise_levels,
    schedule_curves,
    schedule_tables,
    schedules,
    sigma_edits,
)

NEAR = {"rtol": 3e-6, "atol": 1e-9}  # the last digits of logarithms differ by processor


@pytest.fixture(scope="module")
def recorded(golden_tensors: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    return golden_tensors("schedules_nodes.safetensors")


@pytest.fixture(scope="module")
def sampling(kind_settings: dict[str, Any]) -> Callable[[str], Any]:
    def build(kind: str) -> Any:
        row = kind_settings[kind]
        config = SimpleNamespace(sampling_settings=row["sampling_settings"])
        return noise_levels.build_model_sampling(row["sampling_type"], config)

    return build


def calls(recorded: dict[str, Tensor], node: str) -> Iterator[tuple[str, list[str], dict, Tensor]]:
    """Key, positional parts and named numbers of every recorded call of a node."""
    found = False
    for key, expected in recorded.items():
        name, *parts = key.split("/")
        if name != node:
            continue
        found = True
        numbers = {}
        for part in parts:
            match = re.fullmatch(r"([a-z_]+?)(-?[\d.]+)", part)
            if match:
                numbers[match[1]] = float(match[2])
        yield key, parts, numbers, expected
    assert found, f"nothing recorded for {node}"


def check(key: str, made: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(made, expected, msg=lambda m: f"{key}: {m}", **NEAR)


def test_curves(recorded: dict[str, Tensor]) -> None:
    curves: dict[str, Callable[[int, dict], Tensor]] = {
        "KarrasScheduler": lambda n, a: schedules.get_sigmas_karras(
            n, a["min"], a["max"], a["rho"]
        ),
        "ExponentialScheduler": lambda n, a: schedules.get_sigmas_exponential(
            n, a["min"], a["max"]
        ),
        "PolyexponentialScheduler": lambda n, a: schedule_curves.get_sigmas_polyexponential(
            n, a["min"], a["max"], a["rho"]
        ),
        "LaplaceScheduler": lambda n, a: schedule_curves.get_sigmas_laplace(
            n, a["min"], a["max"], a["mu"], a["beta"]
        ),
        "VPScheduler": lambda n, a: schedule_curves.get_sigmas_vp(
            n, a["beta_d"], a["beta_min"], a["eps_s"]
        ),
    }
    for node, curve in curves.items():
        for key, _, numbers, expected in calls(recorded, node):
            check(key, curve(int(numbers["steps"]), numbers), expected)


def test_tables(recorded: dict[str, Tensor]) -> None:
    for node, table in (
        ("AlignYourStepsScheduler", schedule_tables.ALIGN_YOUR_STEPS),
        ("OptimalStepsScheduler", schedule_tables.OPTIMAL_STEPS),
    ):
        for key, parts, numbers, expected in calls(recorded, node):
            made = schedule_tables.tabled_schedule(
                table[parts[0]], int(numbers["steps"]), numbers["denoise"]
            )
            check(key, made, expected)


def test_gits_rows(recorded: dict[str, Tensor]) -> None:
    for key, _, numbers, expected in calls(recorded, "GITSScheduler"):
        made = gits.gits_schedule(numbers["coeff"], int(numbers["steps"]), numbers["denoise"])
        check(key, made, expected)


EVERY_GITS_ROW = [
    (coefficient, steps, row)
    for coefficient, rows in gits_table.ROWS.items()
    for steps, row in enumerate(rows, start=gits.SHORTEST)
]


def test_gits_has_a_row_of_every_coefficient_and_step_count() -> None:
    assert list(gits_table.ROWS) == [round(0.8 + 0.05 * place, 2) for place in range(15)]
    assert all(len(row) == steps for _, steps, row in EVERY_GITS_ROW)
    assert len(EVERY_GITS_ROW) == 15 * 19
    percents, levels = zip(*gits_table.LEVELS.items())
    assert sorted(percents) == list(percents)
    assert sorted(levels, reverse=True) == list(levels)


def test_gits_rows_are_ways_of_one_programme() -> None:
    # What a wrong digit in the table would break.
    tails: dict[tuple[float, int, int], tuple[int, ...]] = {}
    for coefficient, steps, row in EVERY_GITS_ROW:
        assert row[0] == 0
        assert all(before < after <= 99 for before, after in pairwise(row))
        for place, percent in enumerate(row):  # the rest of a best way is a best way
            state = (coefficient, percent, steps - place)
            assert tails.setdefault(state, row[place:]) == row[place:], state
    for coefficient, rows in gits_table.ROWS.items():
        for fewer, more in pairwise(rows):  # rows interlace
            assert all(b <= a <= c for a, b, c in zip(fewer, more, more[1:])), coefficient
    for rows, higher in pairwise(gits_table.ROWS.values()):  # and grow with the coefficient
        assert all(a <= b for row, other in zip(rows, higher) for a, b in zip(row, other))


@pytest.mark.parametrize("coefficient", [0.8, 0.8 + 0.05 * 7, 1.0, 1.3, 1.5])
@pytest.mark.parametrize(("steps", "denoise"), [(2, 1), (16, 1), (20, 0.5), (21, 1), (1000, 0.3)])
def test_gits_schedules_descend(coefficient: float, steps: int, denoise: float) -> None:
    made = gits.gits_schedule(coefficient, steps, denoise)
    assert len(made) == round(steps * denoise) + 1
    assert (made[1:] < made[:-1]).all()
    assert made[-1] == 0


def test_gits_says_what_it_has_no_schedule_for() -> None:
    with pytest.raises(ValueError, match=r"coeff 0\.83; known: 0\.80, .*1\.50"):
        gits.gits_schedule(0.83, 10)
    with pytest.raises(ValueError, match="2 steps at least, got 1"):
        gits.gits_schedule(0.8, 1)
    assert len(gits.gits_schedule(0.8, 10, 0.0)) == 0


def test_schedules_of_a_model(recorded: dict[str, Tensor], sampling: Callable[[str], Any]) -> None:
    for key, parts, numbers, expected in calls(recorded, "BasicScheduler"):
        model = sampling(parts[0])
        made = schedules.basic_schedule(model, parts[1], int(numbers["steps"]), numbers["denoise"])
        check(key, made, expected)
    for key, parts, numbers, expected in calls(recorded, "BetaSamplingScheduler"):
        made = schedules.beta_scheduler(
            sampling(parts[0]), int(numbers["steps"]), numbers["alpha"], numbers["beta"]
        )
        check(key, made, expected)
    for key, parts, numbers, expected in calls(recorded, "SDTurboScheduler"):
        made = schedule_curves.turbo_schedule(
            sampling(parts[0]), int(numbers["steps"]), numbers["denoise"]
        )
        check(key, made, expected)


def test_flow_schedules(recorded: dict[str, Tensor]) -> None:
    for key, parts, numbers, expected in calls(recorded, "LTXVScheduler"):
        sizes = re.findall(r"\d+", parts[-1])[2:]
        tokens = 4096
        if sizes:
            tokens = 1
            for size in sizes:
                tokens *= int(size)
        made = schedule_curves.ltxv_schedule(
            int(numbers["steps"]), tokens, numbers["max"], numbers["base"],
            bool(numbers["stretch"]), numbers["terminal"],
        )  # fmt: skip
        # No logarithm, so no digit that differs by processor: the signal of the first levels is
        # what their last digits leave of 1.
        torch.testing.assert_close(made, expected, msg=key, rtol=1.2e-7, atol=0)
    for key, _, numbers, expected in calls(recorded, "Flux2Scheduler"):
        made = schedule_curves.flux2_schedule(
            int(numbers["steps"]), int(numbers["w"]), int(numbers["h"])
        )
        check(key, made, expected)


def test_edits(recorded: dict[str, Tensor]) -> None:
    base = recorded["base_karras10"]
    before = base.clone()
    for key, parts, numbers, expected in calls(recorded, "SplitSigmas"):
        parted = sigma_edits.split_at_step(base, int(numbers["step"]))
        check(key, parted[int(parts[-1][-1])], expected)
    for key, parts, numbers, expected in calls(recorded, "SplitSigmasDenoise"):
        parted = sigma_edits.split_at_denoise(base, numbers["denoise"])
        check(key, parted[int(parts[-1][-1])], expected)
    for key, parts, _, expected in calls(recorded, "FlipSigmas"):
        check(key, sigma_edits.flip(base[:5] if parts[0].endswith("first5") else base), expected)
    for key, parts, _, expected in calls(recorded, "SetFirstSigma"):
        check(key, sigma_edits.with_first(base, float(parts[1])), expected)
    for key, parts, numbers, expected in calls(recorded, "ExtendIntermediateSigmas"):
        made = sigma_edits.extend(
            base, int(numbers["steps"]), numbers["start"], numbers["end"], parts[-1]
        )
        check(key, made, expected)
    for key, parts, _, expected in calls(recorded, "ManualSigmas"):
        check(key, sigma_edits.parse("/".join(parts)), expected)
    assert torch.equal(base, before)


def test_extreme_parameters_give_levels_or_a_reason() -> None:
    shifted = schedule_curves.ltxv_schedule(20, 9000, 100.0, 0.95, True, 0.1)
    huge = schedule_curves.flux2_schedule(3000, 16384, 16384)
    for made in (shifted, huge):
        assert torch.isfinite(made).all()
        assert (made[1:] <= made[:-1]).all()
    assert sigma_edits.with_first(torch.FloatTensor([]), 5.0).numel() == 0
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("rho 0", lambda: schedules.get_sigmas_karras(5, 0.1, 10.0, 0.0)),
        ("sigma_min 0", lambda: schedules.get_sigmas_exponential(5, 0.0, 10.0)),
        ("sigma_max 0", lambda: schedule_curves.get_sigmas_polyexponential(5, 0.1, 0.0)),
        ("beta_d 5000", lambda: schedule_curves.get_sigmas_vp(5, 5000.0)),
        (
            "above 0, got 0.6 and 0",
            lambda: schedules.beta_scheduler(noise_levels.build_model_sampling("EPS"), 5, 0.6, 0),
        ),
    ]
    for reason, make in refused:
        with pytest.raises(ValueError, match=reason):
            make()


# Their timesteps are logarithms, angles or shares.
WITHOUT_TIMESTEPS = {"V_PREDICTION_EDM", "EDM", "V_PREDICTION_CONTINUOUS", "STABLE_CASCADE"}


@pytest.mark.parametrize("kind", noise_levels.SAMPLING_KINDS)
def test_timesteps_of_sd_turbo_give_levels_or_a_reason(kind: str) -> None:
    model = noise_levels.build_model_sampling(kind)
    if kind in WITHOUT_TIMESTEPS:
        with pytest.raises(ValueError, match=r"the timesteps \[999, 899, .* of SD Turbo"):
            schedule_curves.turbo_schedule(model, 10, 1.0)
        return
    for steps, denoise in ((1, 1.0), (10, 1.0), (3, 0.5), (3, 0.0)):
        made = schedule_curves.turbo_schedule(model, steps, denoise)
        assert torch.isfinite(made).all()
        assert (made.diff() <= 0).all()


def test_override_nodes_give_the_recorded_levels(recorded: dict[str, Tensor]) -> None:
    kinds = {
        "ModelSamplingSD3": ("FLOW", lambda a: {"shift": a["shift"]}),
        "ModelSamplingAuraFlow": ("FLOW", lambda a: {"shift": a["shift"], "multiplier": 1.0}),
        "ModelSamplingStableCascade": ("STABLE_CASCADE", lambda a: {"shift": a["shift"]}),
        "ModelSamplingContinuousV": (
            "V_PREDICTION_CONTINUOUS",
            lambda a: {"sigma_min": 0.03, "sigma_max": 500.0},
        ),
    }
    for node, (kind, settings) in kinds.items():
        for key, parts, numbers, expected in calls(recorded, node):
            config = SimpleNamespace(sampling_settings=settings(numbers))
            model = noise_levels.build_model_sampling(kind, config)
            check(key, schedules.calculate_sigmas(model, parts[-2], 8), expected)


@pytest.mark.parametrize(
    ("text", "levels", "word"),
    [("five, six", [], "five"), ("inf, 1, 0", [1, 0], "inf"), ("1e-3", [1, -3], "'e'")],
)
def test_words_among_manual_sigmas_are_said(
    text: str, levels: list[float], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert sigma_edits.parse(text).tolist() == levels
    assert word in caplog.text
    assert str([float(level) for level in levels]) in caplog.text
    caplog.clear()
    assert sigma_edits.parse("14.6, 2; .5 | 0").numel() == 4
    assert not caplog.text


@pytest.mark.parametrize(
    "edit",
    [
        lambda sigmas: sigma_edits.split_at_step(sigmas, 2)[1],
        lambda sigmas: sigma_edits.split_at_denoise(sigmas, 0.5)[0],
        sigma_edits.flip,
        lambda sigmas: sigma_edits.with_first(sigmas, 20.0),
        lambda sigmas: sigma_edits.extend(sigmas, 2, -1.0, 0.0, "cosine"),
    ],
)
def test_edits_take_levels_in_a_list_and_keep_it(edit: Callable[[Any], Tensor]) -> None:
    given = [14.0, 6.0, 2.0, 1.0, 0.0]
    assert torch.equal(edit(given), edit(torch.tensor(given)))
    assert given == [14.0, 6.0, 2.0, 1.0, 0.0]
    with pytest.raises(TypeError, match="a tensor or a list of levels, found NoneType"):
        edit(None)
