"""Guidance and conditioning against recorded numbers and recorded model calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.devices import memory
from comfy.sampling import batching, conditioning, guidance, jobs
from tests.comfy.sampling.support import CPU, TestModel, patcher

NEAR = {"rtol": 0, "atol": 4e-6}
GUIDED = {"rtol": 1e-6, "atol": 2e-5}  # guidance multiplies rounding by its scale
CFG = 7.5


class AttentionModel(TestModel):
    """A predicted noise that depends on neighbours, timestep and attention to the context."""

    def apply_model(
        self, x: Tensor, t: Tensor, c_crossattn: Tensor, transformer_options: Any = None, **kw: Any
    ) -> Tensor:
        self.note_call(x, t, c_crossattn, transformer_options)
        sampling = self.model_sampling
        inputs, timestep = sampling.calculate_input(t, x), sampling.timestep(t).float()
        mean = torch.nn.functional.avg_pool2d(inputs, 3, 1, 1)
        queries = inputs.flatten(2).transpose(1, 2)
        weights = (queries @ c_crossattn.transpose(1, 2) / 2).softmax(-1)
        attended = (weights @ c_crossattn).transpose(1, 2).reshape(inputs.shape)
        out = 0.3 * inputs - 0.2 * mean + attended + 0.0005 * timestep.reshape(-1, 1, 1, 1)
        return sampling.calculate_denoised(t, out, x)


@pytest.fixture(scope="module")
def recorded(golden_tensors: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    return golden_tensors("cfg_conditioning.safetensors")


@pytest.fixture(scope="module")
def cases(golden_json: Callable[[str], Any]) -> dict[str, Any]:
    return golden_json("cfg_conditioning_meta.json")


def entries(rows: list[Any], recorded: dict[str, Tensor]) -> list[Any]:
    made = []
    for name, options in rows:
        options = dict(options)
        if "mask" in options:
            options["mask"] = recorded[f"in/mask/{options['mask']}"]
        made.append([recorded[f"in/ctx/{name}"], options])
    return made


def processed(model: TestModel, case: dict[str, Any], recorded: dict[str, Tensor]) -> dict:
    lists = {
        name: conditioning.convert_cond(entries(case[name], recorded))
        for name in ("positive", "negative")
    }
    return conditioning.process_conds(model, recorded["in/x"], lists, CPU)


def test_cases_repeat_their_numbers_and_model_calls(
    cases: dict[str, Any], recorded: dict[str, Tensor]
) -> None:
    compared = 0
    for key, case in cases.items():
        if not key.startswith("case/"):
            continue
        model = AttentionModel()
        lists = processed(model, case, recorded)
        sigma = torch.full((2,), case["sigma"])
        x = recorded["in/x"]
        made = guidance.sampling_function(
            model, x, sigma, lists["negative"], lists["positive"], case["cfg"], {}
        )
        torch.testing.assert_close(
            made, recorded[f"{key}/denoised"], msg=lambda m, key=key: f"{key}: {m}", **GUIDED
        )
        calls = case["model_calls_in_sampling_function"]
        assert [c["x"] for c in model.calls] == [c["x"] for c in calls], key
        assert [c["context"] for c in model.calls] == [c["context"] for c in calls], key
        order = [c["cond_or_uncond"] for c in model.calls]
        assert order == [c["cond_or_uncond"] for c in calls], key
        for name, areas in case["areas_after_processing"].items():
            assert [list(e["area"]) if "area" in e else None for e in lists[name]] == areas, key
        compared += 1
    assert compared > 35


def test_each_list_repeats_its_recorded_estimate(
    cases: dict[str, Any], recorded: dict[str, Tensor]
) -> None:
    for key, case in cases.items():
        if not key.startswith("case/"):
            continue
        model = AttentionModel()
        lists = processed(model, case, recorded)
        sigma = torch.full((2,), case["sigma"])
        both = [lists["positive"], lists["negative"]]
        cond, uncond = batching.calc_cond_batch(model, both, recorded["in/x"], sigma, {})
        torch.testing.assert_close(
            cond, recorded[f"{key}/cond"], msg=lambda m, key=key: f"{key}: {m}", **NEAR
        )
        expected = recorded.get(f"{key}/uncond", recorded["case/plain/sigma5.0/uncond"])
        torch.testing.assert_close(uncond, expected, msg=lambda m, key=key: f"{key}: {m}", **NEAR)


def test_one_by_one_equals_batched(
    cases: dict[str, Any], recorded: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases["case/area_overlap3/sigma5.0"]
    sigma = torch.full((2,), case["sigma"])
    results, calls = [], []
    for free_bytes in (1 << 40, 0):
        monkeypatch.setattr(memory, "recent_free_memory", lambda device, free=free_bytes: free)
        model = AttentionModel()
        lists = processed(model, case, recorded)
        both = [lists["positive"], lists["negative"]]
        results.append(batching.calc_cond_batch(model, both, recorded["in/x"], sigma, {}))
        calls.append(len(model.calls))
    assert calls == [4, 7]
    for batched, single in zip(*results):
        torch.testing.assert_close(batched, single, rtol=1e-5, atol=1e-5)


def test_batches_are_as_large_as_memory_allows(
    cases: dict[str, Any], recorded: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hungry(AttentionModel):
        def memory_required(self, input_shape: Any, cond_shapes: Any = None) -> float:
            return float(input_shape[0])

    case = cases["case/len231_vs_154_and_77/sigma5.0"]
    sizes = {}
    for free in (10.0, 7.0, 4.0):
        monkeypatch.setattr(memory, "recent_free_memory", lambda device, free=free: free)
        model = Hungry()
        lists = processed(model, case, recorded)
        both = [lists["positive"], lists["negative"]]
        batching.calc_cond_batch(model, both, recorded["in/x"], torch.full((2,), 5.0), {})
        sizes[free] = [call["x"][0] for call in model.calls]
    assert sizes == {10.0: [6], 7.0: [2, 4], 4.0: [2, 2, 2]}


def plain(recorded: dict[str, Tensor]) -> tuple[AttentionModel, list, list]:
    model = AttentionModel()
    case = {"positive": [["pos77", {}]], "negative": [["neg77", {}]]}
    lists = processed(model, case, recorded)
    return model, lists["positive"], lists["negative"]


def guided(
    recorded: dict[str, Tensor], cfg: float, options: dict[str, Any]
) -> tuple[Tensor, AttentionModel]:
    model, positive, negative = plain(recorded)
    sigma = torch.full((2,), 5.0)
    x = recorded["in/x"]
    return guidance.sampling_function(model, x, sigma, negative, positive, cfg, options), model


def test_scale_one_skips_the_negative_unless_told_not_to(recorded: dict[str, Tensor]) -> None:
    _, model = guided(recorded, 1.0, {})
    assert model.calls[0]["cond_or_uncond"] == [0]
    _, model = guided(recorded, 1.0, {"disable_cfg1_optimization": True})
    assert model.calls[0]["cond_or_uncond"] == [1, 0]


def test_a_cfg_function_works_on_noise_like_tensors(recorded: dict[str, Tensor]) -> None:
    def combine(args: dict[str, Any]) -> Tensor:
        torch.testing.assert_close(args["cond"], args["input"] - args["cond_denoised"])
        assert {"timestep", "sigma", "model", "model_options", "cond_scale"} <= args.keys()
        return args["uncond"] + (args["cond"] - args["uncond"]) * args["cond_scale"]

    made, _ = guided(recorded, CFG, {"sampler_cfg_function": combine})
    expected = recorded["case/plain/sigma5.0/denoised"]
    torch.testing.assert_close(made, expected, **GUIDED)


def test_pre_and_post_functions_run_in_order(recorded: dict[str, Tensor]) -> None:
    def pre(args: dict[str, Any]) -> list[Tensor]:
        assert len(args["conds"]) == 2
        return [args["conds_out"][0], args["conds_out"][0]]  # no guidance is left

    options = {
        "sampler_pre_cfg_function": [pre],
        "sampler_post_cfg_function": [
            lambda args: args["denoised"] * 2,
            lambda args: args["denoised"] + 1,
        ],
    }
    made, _ = guided(recorded, CFG, options)
    expected = recorded["case/plain/sigma5.0/cond"] * 2 + 1
    torch.testing.assert_close(made, expected, **GUIDED)


def test_the_batch_calculation_can_be_replaced(recorded: dict[str, Tensor]) -> None:
    def calculate(args: dict[str, Any]) -> list[Tensor]:
        assert {"conds", "input", "sigma", "model", "model_options"} <= args.keys()
        return [torch.ones_like(args["input"]), torch.zeros_like(args["input"])]

    made, model = guided(recorded, 3.0, {"sampler_calc_cond_batch_function": calculate})
    assert torch.equal(made, torch.full_like(made, 3.0))
    assert not model.calls


def test_a_function_wrapper_sees_the_call_and_goes_on(recorded: dict[str, Tensor]) -> None:
    seen: list[dict[str, Any]] = []

    def wrapper(apply_model: Callable[..., Tensor], args: dict[str, Any]) -> Tensor:
        seen.append(args)
        return apply_model(args["input"], args["timestep"], **args["c"])

    made, _ = guided(recorded, CFG, {"model_function_wrapper": wrapper})
    torch.testing.assert_close(made, recorded["case/plain/sigma5.0/denoised"], **GUIDED)
    assert seen[0]["cond_or_uncond"] == [1, 0]
    told = seen[0]["c"]["transformer_options"]
    assert told["cond_or_uncond"] == [1, 0]
    assert len(told["uuids"]) == 2
    assert told["sigmas"].shape == (2,)  # of the latent's batch, however many entries share a call
    assert seen[0]["timestep"].shape == (4,)


def test_a_wrapper_around_the_batch_calculation_runs(recorded: dict[str, Tensor]) -> None:
    def double(executor: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Tensor]:
        return [2 * out for out in executor(*args, **kwargs)]

    options = {"transformer_options": {"wrappers": {"calc_cond_batch": {"key": [double]}}}}
    made, _ = guided(recorded, 1.0, options)
    torch.testing.assert_close(made, 2 * recorded["case/plain/sigma5.0/cond"], **NEAR)


def test_a_mask_of_another_size_is_named(recorded: dict[str, Tensor]) -> None:
    _model, positive, _ = plain(recorded)
    positive[0]["mask"] = torch.ones(1, 5, 5)
    with pytest.raises(ValueError, match=r"mask of shape \(1, 5, 5\) .* \(16, 24\) cells"):
        jobs.get_area_and_mult(positive[0], recorded["in/x"], torch.full((2,), 5.0))


def test_sampling_function_is_looked_up_when_called(recorded: dict[str, Tensor]) -> None:
    import comfy.samplers

    original = comfy.samplers.sampling_function
    guider = comfy.samplers.CFGGuider(patcher(AttentionModel()))
    guider.inner_model, guider.conds = None, {}
    comfy.samplers.sampling_function = lambda *args, **kwargs: "replaced"
    try:
        assert guider.predict_noise(recorded["in/x"], torch.ones(2)) == "replaced"
    finally:
        comfy.samplers.sampling_function = original
    assert guidance.sampling_function is original
