"""Random draws against recorded ones: these are exact."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from comfy.nested_tensor import NestedTensor, pack, unpack
from comfy.sampling import brownian, noise, noise_levels, schedules, solvers
from comfy.sampling.parameterisation import CONST


@pytest.fixture(scope="module")
def prepared(golden_tensors: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    return golden_tensors("noise_and_masks.safetensors")


@pytest.fixture(scope="module")
def sources(golden_tensors: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    return golden_tensors("noise_sources.safetensors")


def test_start_noise_is_bit_equal(prepared: dict[str, Tensor]) -> None:
    compared = 0
    for key, expected in prepared.items():
        found = re.search(r"^prepare/.*/seed(\d+)(?:/noise_inds_([\d_]+))?$", key)
        if found is None:
            continue
        indices = None if found[2] is None else [int(index) for index in found[2].split("_")]
        made = noise.prepare_noise(torch.zeros_like(expected), int(found[1]), indices)
        assert torch.equal(made, expected), key
        compared += 1
    assert compared >= 9


def test_nested_latents_draw_one_after_the_other(prepared: dict[str, Tensor]) -> None:
    parts = [prepared["prepare/nested/0_1_8_2_4_4"], prepared["prepare/nested/1_1_8_5_2"]]
    latent = NestedTensor([torch.zeros_like(part) for part in parts])
    for seed in (42, 7):
        made = noise.prepare_noise(latent, seed).unbind()
        if torch.equal(made[0], parts[0]):
            break
    assert all(torch.equal(a, b) for a, b in zip(made, parts))
    packed, shapes = pack(made)
    assert torch.equal(packed, prepared["prepare/nested/packed"])
    assert all(torch.equal(a, b) for a, b in zip(unpack(packed, shapes), parts))


def test_the_largest_seed_is_accepted_everywhere() -> None:
    x = torch.zeros(1, 4, 8, 8)
    made = noise.prepare_noise(x, 2**64 - 1)
    assert torch.isfinite(made).all()
    step = noise.default_noise_sampler(x, seed=2**64 - 1)(1.0, 0.5)
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(step, torch.randn(x.shape, generator=generator))


@pytest.mark.parametrize("seed", [-1, np.int64(-1), [-1], -(2**63)])
def test_a_seed_below_zero_counts_down_from_the_largest(seed: Any) -> None:
    x, same = torch.zeros(1, 4, 8, 8), (int(np.atleast_1d(seed)[0])) % 2**64
    assert torch.equal(
        noise.BrownianTreeNoiseSampler(x, 0.1, 10.0, seed=seed)(3.0, 1.0),
        noise.BrownianTreeNoiseSampler(x, 0.1, 10.0, seed=same)(3.0, 1.0),
    )
    if not isinstance(seed, list):
        assert torch.equal(noise.prepare_noise(x, seed), noise.prepare_noise(x, same))
        step, other = (noise.default_noise_sampler(x, number)(3.0, 1.0) for number in (seed, same))
        assert torch.equal(step, other)


def test_step_noise_starts_one_seed_after_the_start_noise(sources: dict[str, Tensor]) -> None:
    sampler = noise.default_noise_sampler(torch.zeros(1, 4, 8, 8), seed=42)
    made = torch.stack([sampler(1.0, 0.5) for _ in range(3)])
    assert torch.equal(made, sources["default_noise_sampler_seed42_calls0_3"])


def test_brownian_noise_is_bit_equal_and_consistent(sources: dict[str, Tensor]) -> None:
    sigmas = sources["brownian/sigmas"]
    x = torch.zeros(1, 4, 8, 8)
    sampler = noise.BrownianTreeNoiseSampler(x, 0.0291675, 14.614642, seed=42, cpu=True)
    levels = [sigma for sigma in sigmas if sigma > 0]
    made = torch.stack([sampler(a, b) for a, b in pairwise(levels)])
    assert torch.equal(made, sources["brownian/noise_per_step"])
    assert torch.equal(sampler(levels[0], levels[1]), sources["brownian/repeat_step0_after"])
    here = noise.BrownianTreeNoiseSampler(x, 0.0291675, 14.614642, seed=42, cpu=False)
    made = torch.stack([here(a, b) for a, b in pairwise(levels)])
    assert torch.equal(made, sources["brownian/noise_per_step_cpuFalse"])


def test_brownian_noise_of_half_an_interval_and_of_a_batch(sources: dict[str, Tensor]) -> None:
    sigmas = sources["brownian/sigmas"]
    x = torch.zeros(1, 4, 8, 8)
    sampler = noise.BrownianTreeNoiseSampler(x, 0.0291675, 14.614642, seed=42, cpu=True)
    half = sampler(sigmas[0], (sigmas[0] * sigmas[1]).sqrt())
    assert torch.equal(half, sources["brownian/half_interval_0"])
    both = noise.BrownianTreeNoiseSampler(
        x.repeat(2, 1, 1, 1), 0.0291675, 14.614642, seed=42, cpu=True
    )
    assert torch.equal(both(sigmas[0], sigmas[1]), sources["brownian/batch2_step0"])


def test_the_first_draws_are_those_of_plain_generators(sources: dict[str, Tensor]) -> None:
    x = torch.zeros(1, 4, 8, 8)
    assert torch.equal(noise.prepare_noise(x, 42), sources["randn_manual_seed42_first"])
    step = noise.default_noise_sampler(x, seed=42)(1.0, 0.5)
    assert torch.equal(step, sources["default_noise_equals_generator_seed43"])


def test_brownian_noise_can_have_a_seed_for_each_item() -> None:
    x = torch.zeros(2, 4, 4, 4)
    both = noise.BrownianTreeNoiseSampler(x, 0.1, 10.0, seed=[5, 6])(3.0, 1.0)
    alone = noise.BrownianTreeNoiseSampler(x[:1], 0.1, 10.0, seed=[6])(3.0, 1.0)
    assert torch.equal(both[1:], alone)
    with pytest.raises(ValueError, match="3 seeds for a batch of 2"):
        noise.BrownianTreeNoiseSampler(x, 0.1, 10.0, seed=[1, 2, 3])


def test_the_global_generator_continues_after_the_start_noise() -> None:
    x = torch.zeros(1, 4, 8, 8)
    noise.prepare_noise(x, 42)
    after = torch.randn(3)
    generator = torch.Generator().manual_seed(42)
    torch.randn(x.shape, generator=generator)
    assert torch.equal(after, torch.randn(3, generator=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize(("low", "high"), [(0.0291675, 14.614642), (0.002, 80.0), (0.1, 4518.75)])
def test_brownian_motion_is_bit_equal_to_the_library_that_seeds_were_made_with(
    low: float, high: float, dtype: torch.dtype
) -> None:
    library = pytest.importorskip("torchsde")
    like = torch.zeros(1, 3, 5, 7, dtype=dtype)
    theirs = library.BrownianTree(low, like, high, entropy=2**63 + 5)
    ours = brownian.BrownianTree(like, low, high, 2**63 + 5)
    draw = random.Random(4)
    levels = sorted((draw.uniform(low, high) for _ in range(9)), reverse=True)
    spans = [(end, start) for start, end in pairwise(levels)]
    spans += [tuple(sorted((draw.uniform(low, high), draw.uniform(low, high)))) for _ in range(4)]
    low, high = round(low, brownian.DECIMALS), round(high, brownian.DECIMALS)
    for start, end in [*spans, (low, high), (low, levels[-1]), (levels[0], high)]:
        made, expected = ours(start, end), theirs(start, end)  # half precision overflows in both
        assert torch.allclose(made, expected, rtol=0, atol=0, equal_nan=True), (start, end)


def test_brownian_motion_forgets_without_changing(monkeypatch: pytest.MonkeyPatch) -> None:
    like, spans = torch.zeros(1, 2, 3), [(1.0, 2.0), (2.0, 7.5), (0.3, 9.0), (1.0, 2.0)]
    kept = [brownian.BrownianTree(like, 0.1, 10.0, 3)(*span) for span in spans]
    monkeypatch.setattr(brownian, "KEPT_AT_LEAST", 1)
    monkeypatch.setattr(brownian, "KEPT_BYTES", 1)
    tree = brownian.BrownianTree(like, 0.1, 10.0, 3)
    assert all(torch.equal(tree(*span), before) for span, before in zip(spans, kept))
    assert len(tree._firsts) == 1
    total = tree(0.3, 1.0) + tree(1.0, 9.0)
    torch.testing.assert_close(total, tree(0.3, 9.0))


def test_brownian_motion_over_no_time_is_nothing() -> None:
    tree = brownian.BrownianTree(torch.zeros(2, 2), 0.1, 10.0, 3)
    assert not tree(1.0, 1.0).any()
    assert not tree(1.0, 1.0000001).any()


def test_seeds_of_places_are_those_of_numpy() -> None:
    draw = random.Random(1)
    for bits in (0, 1, 31, 32, 33, 63, 64, 90):
        entropy = draw.getrandbits(bits) if bits else 0
        seeds = brownian.PlaceSeeds(entropy)
        for place in [(0, 0), (1, 1), (2**32, 33), (draw.getrandbits(40), draw.randrange(60))]:
            whole = np.random.SeedSequence(
                entropy=entropy, spawn_key=place, pool_size=brownian.POOL_SIZE
            )
            assert seeds(place) == int(whole.generate_state(4)[0]), (entropy, place)


@pytest.mark.parametrize("seed", [7, [7, 8]])
def test_noise_drawn_ahead_has_the_same_bits(seed: Any) -> None:
    x, levels = torch.zeros(2, 4, 3, 5), [10.0, 6.0, 2.5, 0.7, 0.1]

    def run(ahead: Callable[[Any, float, float], None]) -> list[Tensor]:
        sampler = noise.BrownianTreeNoiseSampler(x, 0.1, 10.0, seed=seed)
        made = []
        for sigma, sigma_next in pairwise(levels):
            ahead(sampler, sigma, sigma_next)
            made.append(sampler(sigma, sigma_next))
        return made

    plain = run(lambda sampler, a, b: None)
    ahead = run(lambda sampler, a, b: sampler.prepare(a, b))
    another = run(lambda sampler, a, b: sampler.prepare(a, (a + b) / 2))
    with torch.inference_mode():
        inside = run(lambda sampler, a, b: (sampler.prepare(a, b), sampler.prepare(a, b))[0])
    for made in (ahead, another, inside):
        assert all(torch.equal(one, other) for one, other in zip(made, plain, strict=True))


@pytest.mark.parametrize("sampler", ["dpmpp_sde", "dpmpp_2m_sde", "dpmpp_3m_sde"])
def test_sde_samplers_say_ahead_what_they_draw(sampler: str) -> None:
    asked: list[tuple[float, float]] = []
    drawn: list[tuple[float, float]] = []

    class Watched:
        def prepare(self, sigma: Tensor, sigma_next: Tensor) -> None:
            asked.append((sigma.item(), sigma_next.item()))

        def __call__(self, sigma: Tensor, sigma_next: Tensor) -> Tensor:
            drawn.append((sigma.item(), sigma_next.item()))
            return torch.zeros(1, 4, 2, 2)

    for eta in (1.0, 0.0):
        solvers.find(sampler).function(
            lambda x, sigma: x * 0.5, torch.ones(1, 4, 2, 2), torch.tensor([9.0, 3.0, 1.0, 0.0]),
            extra_args={}, disable=True, eta=eta, noise_sampler=Watched(),
        )  # fmt: skip
    assert asked == drawn
    assert len(drawn) == (4 if sampler == "dpmpp_sde" else 2)


class Halving:
    """A denoiser of one kind of model."""

    def __init__(self, sampling: Any) -> None:
        self.inner_model = SimpleNamespace(inner_model=SimpleNamespace(model_sampling=sampling))

    def __call__(self, x: Tensor, sigma: Tensor) -> Tensor:
        return x * 0.5


@pytest.mark.parametrize("kind", ["EPS", "EDM", "FLOW", "FLUX"])
@pytest.mark.parametrize("r", [0.5, 0.8])
def test_a_motion_is_asked_between_two_levels_where_single_precision_puts_it(
    kind: str, r: float
) -> None:
    # A motion is known in millionths of a level: of a short step one is a hundredth of the noise.
    sampling = noise_levels.build_model_sampling(kind)
    is_flow = isinstance(sampling, CONST)
    for scheduler in ("karras", "normal", "simple", "beta"):
        sigmas = schedules.calculate_sigmas(sampling, scheduler, 30)
        asked: list[float] = []

        def draw(sigma: Tensor, sigma_next: Tensor, asked: list[float] = asked) -> Tensor:
            asked.append(sigma_next.item())
            return torch.zeros(1, 1, 2, 2)

        solvers.find("dpmpp_sde").function(
            Halving(sampling), torch.ones(1, 1, 2, 2), sigmas, extra_args={}, disable=True, r=r,
            noise_sampler=draw,
        )  # fmt: skip
        between = []
        if is_flow and sigmas[0] >= 1:
            sigmas[0] = sampling.percent_to_sigma(1e-4)
        for start, end in pairwise(sigmas[:-1]):
            high, low = (-(torch.logit if is_flow else torch.log)(level) for level in (start, end))
            middle = high + r * (low - high)
            between.append((torch.sigmoid if is_flow else torch.exp)(-middle).item())
        assert asked[::2] == between, scheduler
