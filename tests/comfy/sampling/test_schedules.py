"""Schedules against recorded ones, and what they must never do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.sampling import noise_levels, schedules
from comfy.sampling.samplers import KSampler
from tests.comfy.sampling.support import TestModel, conditioning, patcher

NEAR = {"rtol": 3e-6, "atol": 1e-9}  # the last digits of logarithms differ by processor


@pytest.fixture(scope="module")
def recorded(golden_tensors: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    return golden_tensors("schedules_ksampler.safetensors")


@pytest.fixture(scope="module")
def samplings(kind_settings: dict[str, Any]) -> dict[str, Any]:
    return {
        kind: noise_levels.build_model_sampling(
            row["sampling_type"], SimpleNamespace(sampling_settings=row["sampling_settings"])
        )
        for kind, row in kind_settings.items()
    }


def is_degenerate(key: str) -> bool:
    """kl_optimal with one step divided zero by zero when it was recorded."""
    return "kl_optimal/s1/" in key


def test_ksampler_schedules_are_the_recorded_ones(
    recorded: dict[str, Tensor], samplings: dict[str, Any]
) -> None:
    compared = 0
    for key, expected in recorded.items():
        group, kind, scheduler, *rest = key.split("/")
        if group == "table" or is_degenerate(key):
            continue
        steps, denoise = int(rest[0][1:]), float(rest[1][1:])
        model = SimpleNamespace(get_model_object=lambda name, kind=kind: samplings[kind])
        sampler = "dpm_2" if group == "ks_dpm_2" else "euler"
        made = KSampler(model, steps, None, sampler, scheduler, denoise).sigmas
        torch.testing.assert_close(made, expected, msg=key, **NEAR)
        compared += 1
    assert compared > 1000


def test_tables_and_timesteps_are_the_recorded_ones(
    recorded: dict[str, Tensor], samplings: dict[str, Any]
) -> None:
    for kind, sampling in samplings.items():
        table, middle = sampling.sigmas, len(sampling.sigmas) // 2
        sample = torch.cat([table[:8], table[middle : middle + 4], table[-8:]])
        torch.testing.assert_close(sample, recorded[f"table/{kind}/sigmas_head_tail"], **NEAR)
        if f"table/{kind}/sigmas" in recorded:
            torch.testing.assert_close(table, recorded[f"table/{kind}/sigmas"], **NEAR)
        probe = recorded[f"table/{kind}/timestep_probe_sigma"]
        expected = recorded[f"table/{kind}/timestep_of_sigma"]
        torch.testing.assert_close(sampling.timestep(probe).to(expected.dtype), expected, **NEAR)


def test_percents_give_the_recorded_levels(
    samplings: dict[str, Any], golden_json: Callable[[str], Any]
) -> None:
    for kind, facts in golden_json("schedules_meta.json")["kinds"].items():
        made = [samplings[kind].percent_to_sigma(percent) for percent in facts["percents"]]
        assert made == pytest.approx(facts["percent_to_sigma"], rel=3e-6, abs=1e-12), kind


def test_families_have_their_recorded_levels(
    golden_json: Callable[[str], Any], golden_tensors: Callable[[str], dict[str, Tensor]]
) -> None:
    expected = golden_tensors("family_sigmas.safetensors")
    for family, facts in golden_json("family_sigmas_meta.json").items():
        if "same_as" in facts:
            continue
        config = SimpleNamespace(sampling_settings=facts["settings"])
        sampling = noise_levels.build_model_sampling(facts["model_type"], config)
        assert len(sampling.sigmas) == facts["n"]
        table = sampling.sigmas
        spread = table[:: len(table) // 8]
        for name, part in (
            ("head8", table[:8]),
            ("tail8", table[-8:]),
            ("every_len_div_8", spread),
        ):
            torch.testing.assert_close(
                part, expected[f"{family}/sigmas_{name}"], msg=family, **NEAR
            )
        for scheduler in schedules.SCHEDULER_NAMES:
            made = schedules.calculate_sigmas(sampling, scheduler, 8)
            key = f"{family}/{scheduler}/s8"
            torch.testing.assert_close(made, expected[key], msg=key, **NEAR)
        probe = expected[f"{family}/timestep_probe"]
        made = sampling.timestep(probe[0]).to(probe.dtype)
        torch.testing.assert_close(made, probe[1], rtol=3e-6, atol=3e-7, msg=family)


@pytest.mark.parametrize("scheduler", schedules.SCHEDULER_NAMES)
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 20, 33, 50, 999, 1000, 3000])
@pytest.mark.parametrize("kind", ["eps_sd15", "vpred_zsnr", "sd3_shift3", "edm_playground"])
def test_no_schedule_has_nan_or_ascends(
    samplings: dict[str, Any], kind: str, scheduler: str, steps: int
) -> None:
    sigmas = schedules.calculate_sigmas(samplings[kind], scheduler, steps)
    assert torch.isfinite(sigmas).all()
    assert (sigmas[1:] <= sigmas[:-1]).all()
    assert sigmas[-1] == 0


def test_a_denoise_next_to_nothing_is_refused(samplings: dict[str, Any]) -> None:
    sampling = samplings["eps_sd15"]
    with pytest.raises(ValueError, match="use a denoise of 2e-05 or more"):
        schedules.basic_schedule(sampling, "simple", 20, 1e-9)
    model = SimpleNamespace(get_model_object=lambda name: sampling)
    with pytest.raises(ValueError, match="schedule of 20000000000 steps"):
        KSampler(model, 20, None, "euler", "karras", 1e-9)
    assert len(KSampler(model, 20, None, "euler", "simple", 1e-4).sigmas) == 21


def test_an_unknown_scheduler_is_named_with_the_known_ones(samplings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"unknown scheduler 'karas'; known: simple, .*karras"):
        schedules.calculate_sigmas(samplings["eps_sd15"], "karas", 20)


def test_a_scheduler_added_to_the_table_is_used(
    samplings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = schedules.SchedulerHandler(lambda sampling, steps: torch.ones(steps + 1))
    monkeypatch.setitem(schedules.SCHEDULER_HANDLERS, "flat", row)
    made = schedules.calculate_sigmas(samplings["eps_sd15"], "flat", 3)
    assert made.tolist() == [1, 1, 1, 1]


class LevelsSeen:
    """A solver that only notes the levels it was given."""

    def __call__(self, model: Any, x: Tensor, sigmas: Tensor, **kwargs: Any) -> Tensor:
        self.sigmas = sigmas
        return x


def test_start_and_last_step_cut_the_recorded_slices(
    golden_json: Callable[[str], Any],
    golden_tensors: Callable[[str], dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from comfy.sampling import samplers

    expected = golden_tensors("schedules_slices.safetensors")
    model = patcher(TestModel())
    empty = conditioning([0.0] * 4)
    noise, latent = torch.zeros(1, 4, 8, 8), torch.ones(1, 4, 8, 8)
    for key, facts in golden_json("schedules_meta.json")["slices"].items():
        seen = LevelsSeen()
        monkeypatch.setattr(samplers, "sampler_object", lambda name, s=seen: samplers.KSAMPLER(s))
        _, scheduler, start, last, full, denoise = key.split("/")
        front = KSampler(model, 10, None, "euler", scheduler, float(denoise[1:]))
        front.sample(
            noise, empty, empty, 1.0, latent,
            start_step=_number(start[5:]), last_step=_number(last[4:]),
            force_full_denoise=full == "full1", disable_pbar=True, seed=0,
        )  # fmt: skip
        assert hasattr(seen, "sigmas") != facts["returned_latent_unchanged"], key
        if key in expected:
            torch.testing.assert_close(seen.sigmas, expected[key], msg=key, **NEAR)


def _number(text: str) -> int | None:
    return None if text == "None" else int(text)


def test_a_rho_beyond_the_numbers_is_refused_with_its_value() -> None:
    with pytest.raises(ValueError, match=r"rho: expected one .* found 0\.001; 7 is usual"):
        schedules.get_sigmas_karras(5, 0.03, 14.6, 0.001)


@pytest.mark.parametrize("kind", ["stable_cascade_shift1", "stable_cascade_shift2"])
def test_the_levels_of_stable_cascade_are_those_that_come_one_at_a_time(
    samplings: dict[str, Any], kind: str
) -> None:
    """As its tables were filled for pictures: rounding differs between one value and many."""
    sampling = samplings[kind]
    steps = range(7, 10_000, 19)
    alone = torch.stack([sampling.sigma(torch.tensor((step + 1) / 10_000)) for step in steps])
    torch.testing.assert_close(sampling.sigmas[7::19], alone, rtol=0, atol=0)
