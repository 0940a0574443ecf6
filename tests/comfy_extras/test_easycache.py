"""Caches that skip steps: how many, at what error, and never where they must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.sampling import batching, noise, run
from comfy.sampling.context_windows import IndexListContextWindow
from comfy.sampling.step_cache import CachedNetwork, StepCache
from comfy_extras import nodes_pag, nodes_sag, nodes_slg
from comfy_extras.nodes_easycache import EasyCache, LazyCache
from tests.comfy.sampling.support import (
    NEGATIVE,
    POSITIVE,
    ClosedFormModel,
    conditioning,
    patcher,
)
from tests.comfy_extras.test_model_patches import UNetBase, text

STEPS = 30


@torch.inference_mode()
def closed_form_run(node: Any, threshold: float, **span: float) -> tuple[Tensor, int]:
    model = patcher(ClosedFormModel("FLOW", {"shift": 3.0}))
    values = {"start_percent": 0.1, "end_percent": 0.95, "verbose": False, **span}
    view = model if node is None else node.execute(model, threshold, **values)[0]
    latent = torch.zeros(1, 4, 16, 16)
    made = run.sample(
        view, noise.prepare_noise(latent, 1), STEPS, 2.0, "euler", "simple",
        conditioning(POSITIVE), conditioning(NEGATIVE), latent, disable_pbar=True, seed=1,
    )  # fmt: skip
    return made, len(model.model.calls)


def test_estimates_are_reused_at_a_small_error() -> None:
    exact, calls = closed_form_run(None, 0.0)
    near, fewer = closed_form_run(LazyCache, 0.05)
    assert calls == STEPS
    assert fewer < STEPS * 0.9
    assert float((near - exact).abs().mean()) < 0.1 * float(exact.abs().mean())


def test_a_larger_threshold_skips_more_and_none_skips_nothing() -> None:
    exact, _ = closed_form_run(None, 0.0)
    same, calls = closed_form_run(LazyCache, 0.0)
    assert calls == STEPS
    assert torch.equal(same, exact)
    counts = [closed_form_run(LazyCache, threshold)[1] for threshold in (0.02, 0.1, 0.5)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_nothing_is_skipped_outside_the_span() -> None:
    _, calls = closed_form_run(LazyCache, 3.0, start_percent=0.9, end_percent=1.0)
    assert calls >= STEPS * 0.55
    _, everywhere = closed_form_run(LazyCache, 3.0, start_percent=0.0, end_percent=1.0)
    assert everywhere <= 3


@torch.inference_mode()
def test_the_networks_outputs_are_reused_for_each_entry() -> None:
    model = patcher(UNetBase())
    forwards: list[int] = []
    model.model.diffusion_model.register_forward_hook(
        lambda module, args, out: forwards.append(args[0].shape[0])
    )
    inner: list[int] = []
    original = model.model.diffusion_model._forward

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        inner.append(1)
        return original(*args, **kwargs)

    model.model.diffusion_model._forward = counted
    view = EasyCache.execute(model, 0.3, 0.0, 1.0, False)[0]
    latent = torch.zeros(1, 4, 16, 24)
    for _ in range(2):  # a run does not see what an earlier one left
        inner.clear()
        forwards.clear()
        run.sample(
            view, noise.prepare_noise(latent, 1), 12, 3.0, "euler", "karras", text(1), text(2),
            latent, disable_pbar=True, seed=1,
        )  # fmt: skip
        assert len(forwards) == 12
        assert 2 <= len(inner) < 12


def test_a_cache_predicts_input_plus_difference_for_each_key() -> None:
    cache = StepCache(1.0, 100.0, 0.0)
    x = torch.arange(8.0).reshape(2, 1, 2, 2)
    cache.learn(x, x + torch.tensor([1.0, 2.0]).reshape(2, 1, 1, 1), ["a", "b"])
    made = cache.predict(torch.zeros(2, 1, 2, 2), ["b", "a"])
    assert made[:, 0, 0, 0].tolist() == [2.0, 1.0]
    assert not cache.skips(x, 5.0, ["a"])  # no rate is known yet
    assert not cache.skips(x, 5.0, ["c"])


def decisions(inputs: list[float], outputs: list[float], watches_all: bool) -> list[bool]:
    """Whether each step is skipped, by the rule in words: levels 10, 9...; the span is 9 to 3."""
    cache = StepCache(0.5, 9.0, 2.0, watches_all=watches_all)
    made = []
    for step, (entering, leaving) in enumerate(zip(inputs, outputs)):
        x = torch.full((1, 2, 3, 4), entering)
        x[..., 1:] = 99.0 * step  # cells beside the eighths do not count for changes
        beside = torch.full((1, 3, 3, 4), 7.0 * step)  # nor do channels beside the latent
        whole = torch.cat([x, beside], dim=1)
        made.append(cache.skips(whole, 10.0 - step, ["k"]))
        if not made[-1]:
            output = torch.full((1, 2, 3, 4), 4.0)
            output[..., 0, 0] = leaving
            cache.learn(whole, output, ["k"])
    return made


def test_the_way_since_the_last_computed_step_is_added_up() -> None:
    # Rate 1 from steps at 9 and 8, the output's mean size (11 cells of 4, one of 2) 23/6 = 3.83.
    # From there: ways 1 and 2 (0.26, 0.78: computed), 0.5 and 1 since that one, and so on.
    inputs = [0.0, 1.0, 2.0, 3.0, 4.0, 4.5, 5.0, 5.1, 5.2]
    outputs = [0.0, 1.0, 2.0, 3.0, 4.0, 4.5, 5.0, 5.1, 5.2]
    rule = [False, False, False, True, False, True, True, False, False]
    assert decisions(inputs, outputs, watches_all=False) == rule


def test_steps_before_the_span_teach_only_what_watches_all() -> None:
    inputs = outputs = [0.0, 0.1, 0.2, 0.3]
    assert decisions(inputs, outputs, watches_all=True) == [False, False, True, True]
    assert decisions(inputs, outputs, watches_all=False) == [False, False, False, True]


@pytest.mark.parametrize("node", [EasyCache, LazyCache])
@torch.inference_mode()
def test_estimates_at_one_level_are_decided_one_by_one(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heun's second slope and the first one of the next step have one level and two inputs."""
    decided: list[float] = []
    decide = StepCache._decide

    def noting(cache: StepCache, x: Tensor) -> bool:
        decided.append(float(cache._seen.sigma or 0))
        return decide(cache, x)

    monkeypatch.setattr(StepCache, "_decide", noting)
    view = node.execute(patcher(UNetBase()), 0.2, 0.0, 1.0, False)[0]
    latent = torch.zeros(1, 4, 8, 8)
    run.sample(
        view, noise.prepare_noise(latent, 1), 3, 1.0, "heun", "karras", text(1), text(2),
        latent, disable_pbar=True, seed=1,
    )  # fmt: skip
    first, *between = sorted(set(decided), reverse=True)
    assert decided == [first, *(sigma for sigma in between for _ in range(2))]
    assert len(between) == 2


@pytest.mark.parametrize("shape", [(1, 4, 16, 16), (1, 4, 3, 8, 8), (1, 8, 20)])
def test_latents_of_any_rank_are_measured(shape: tuple[int, ...]) -> None:
    cache = StepCache(10.0, 100.0, 0.0)
    for step, sigma in enumerate((5.0, 4.0, 3.0)):
        x = torch.full(shape, 5.0 - step)
        if not cache.skips(x, sigma, ["k"]):
            cache.learn(x, x * 0.5, ["k"])
    assert (cache.computed, cache.skipped) == (2, 1)


@torch.inference_mode()
def test_what_is_skipped_does_not_depend_on_how_entries_share_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latent = torch.zeros(1, 4, 16, 24)
    made = []
    for free in (1e12, 0.0):  # both entries in a call, each in its own
        monkeypatch.setattr(batching.memory, "recent_free_memory", lambda device, free=free: free)
        model = patcher(UNetBase())
        monkeypatch.setattr(model.model, "memory_required", lambda shape, cond_shapes=None: 1e6)
        view = EasyCache.execute(model, 0.3, 0.0, 1.0, False)[0]
        rows: list[int] = []
        model.model.diffusion_model.register_forward_hook(
            lambda module, args, out, rows=rows: rows.append(args[0].shape[0])
        )
        made.append(
            run.sample(
                view, noise.prepare_noise(latent, 1), 12, 3.0, "euler", "karras", text(1), text(2),
                latent, disable_pbar=True, seed=1,
            )
        )  # fmt: skip
        assert set(rows) == ({2} if free else {1})
    torch.testing.assert_close(made[0], made[1], rtol=1e-4, atol=1e-4)


def test_each_window_has_differences_of_its_own() -> None:
    cache = StepCache(10.0, 100.0, 0.0)
    wrapper, calls = CachedNetwork(cache), []
    windows = [IndexListContextWindow(list(part), dim=2) for part in ((0, 1), (2, 3))]

    def network(x: Tensor, **_: Any) -> Tensor:
        calls.append(1)
        return 0.5 * x + float(x.mean() > 10)

    for step in range(4):
        for place, window in enumerate(windows):
            x = torch.full((1, 1, 2, 4), 5.0 - step + 20 * place)
            options = {
                "uuids": ["a"],
                "sigmas": torch.tensor([9.0 - step]),
                "context_window": window,
            }
            made = wrapper(network, x, transformer_options=options)
            if step < 2:
                continue
            computed_at = torch.full((1, 1, 2, 4), 5.0 - 1 + 20 * place)
            torch.testing.assert_close(made, x + (network(computed_at) - computed_at))
    assert len(calls) == 4 + 4  # two steps of two windows, and those for the comparison


FURTHER = {
    "PAG": lambda m: nodes_pag.PerturbedAttentionGuidance.execute(m, 2.0)[0],
    "SAG": lambda m: nodes_sag.SelfAttentionGuidance.execute(m, 0.5, 2.0)[0],
    "SLG": lambda m: nodes_slg.SkipLayerGuidanceDiT.execute(m, 2.0, 0.0, 1.0, "7")[0],
}


@pytest.mark.parametrize("name", FURTHER)
@torch.inference_mode()
def test_a_further_estimate_of_an_entry_does_not_stand_in_for_the_first(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: dict[float, list[Any]] = {}
    decide = StepCache.skips

    def noting(cache: StepCache, x: Tensor, sigma: float, keys: Any) -> bool:
        kinds.setdefault(sigma, []).extend(keys)
        return decide(cache, x, sigma, keys)

    monkeypatch.setattr(StepCache, "skips", noting)
    view = EasyCache.execute(FURTHER[name](patcher(UNetBase())), 0.3, 0.0, 1.0, False)[0]
    latent = torch.zeros(1, 4, 16, 24)
    run.sample(
        view, noise.prepare_noise(latent, 1), 3, 3.0, "euler", "karras", text(1), text(2),
        latent, disable_pbar=True, seed=1,
    )  # fmt: skip
    first, *others = kinds.values()
    assert len(first) == len(set(first)) == 3
    # SAG knows nothing to blur where the network was not called.
    assert all(set(first[:2]) <= set(other) <= set(first) for other in others)


def test_a_network_whose_output_has_another_shape_is_always_called() -> None:
    cache = StepCache(10.0, 100.0, 0.0)
    for step in range(4):
        x = torch.full((1, 4, 8, 8), 5.0 - step)
        assert not cache.skips(x, 9.0 - step, ["k"])
        cache.learn(x, torch.zeros(1, 8, 8, 8), ["k"])
