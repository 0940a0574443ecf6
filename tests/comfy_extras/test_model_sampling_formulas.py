"""Nodes that replace the sampling object, at settings without a recording, against the formulas.

Each row gives what a node must make: levels as a function of the step, the timestep of a level, the
level of a percentage, and the weights (alpha, skip, gain, ...) of its prediction, all in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from comfy.sampling import noise_levels
from comfy_extras import nodes_lt
from comfy_extras import nodes_model_advanced as nodes
from tests.comfy.sampling.support import ClosedFormModel, patcher

Array = NDArray[np.float64]
Curve = Callable[[Any], Any]
PERCENTS = (0.001, 0.21, 0.5, 0.8765, 0.999)
BEFORE_ALL = 999999999.9


@dataclass(frozen=True)
class Kind:
    """What a sampling object must answer.

    Attributes:
        table: Ascending levels.
        timestep: Of a level.
        at_percent: Level of a percentage strictly between 0 and 1.
        prediction: Name in `PREDICTIONS`.
        data: Spread of the data.
        unit: Timestep of pure noise, where a timestep's level is shifted and its own is not.
        near: Relative precision, three times what single precision was found to lose.
        clear: The same without the lowest fiftieth of the levels.
    """

    table: Array
    timestep: Curve
    at_percent: Curve
    prediction: str
    data: float = 1.0
    unit: float | None = None
    near: float = 1.5e-6
    clear: float = 1.5e-6


def of_alpha_bar(alpha_bar: Any) -> Any:
    return np.sqrt((1 - alpha_bar) / alpha_bar)


def trained_alpha_bar(zsnr: bool) -> Array:
    """Alpha-bar of Stable Diffusion 1.x; with `zsnr` as algorithm 1 of Lin et al. 2023 has it."""
    alpha_bar = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
    if zsnr:
        root = np.sqrt(alpha_bar)
        alpha_bar = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
        alpha_bar[-1] = 4.8973451890853435e-08  # in place of zero, as checkpoints use it
    return alpha_bar


def discrete(prediction: str, zsnr: bool) -> Kind:
    table = of_alpha_bar(trained_alpha_bar(zsnr))
    if prediction == "lcm":
        table = table[19::20]
    logs = np.log(table)

    def nearest(sigma: Any) -> Any:
        return np.abs(logs[:, None] - np.log(sigma)[None]).argmin(0)

    def at(step: float) -> float:
        return math.exp(np.interp(step, np.arange(len(logs)), logs))

    # Between the last two levels with no signal at the end, a place's last digit is seen.
    near = 5e-5 if zsnr else Kind.near
    if prediction == "lcm":
        return Kind(
            table, lambda s: 20 * nearest(s) + 19, lambda p: at((999 * (1 - p) - 19) / 20), "lcm",
            near=near,
        )  # fmt: skip
    return Kind(table, nearest, lambda p: at(999 * (1 - p)), prediction, near=near)


def log_uniform(low: float, high: float, timestep: Curve, prediction: str, data: float) -> Kind:
    return Kind(
        np.geomspace(low, high, 1000), timestep, lambda p: high * (low / high) ** p, prediction,
        data,
    )  # fmt: skip


def edm(choice: str, low: float, high: float) -> Kind:
    prediction, data = {"edm_playground_v2.5": ("edm", 0.5), "edm": ("edm", 0.5)}.get(
        choice, (choice, 1.0)
    )
    told = (lambda s: s / (1 + s)) if choice == "cosmos_rflow" else (lambda s: np.log(s) / 4)
    return log_uniform(low, high, told, prediction, data)


def shifted(ratio: float, told: float, steps: int) -> Kind:
    """A flow whose time t becomes ratio t / (1 + (ratio - 1) t)."""

    def at(time: Any) -> Any:
        return ratio * time / (1 + (ratio - 1) * time)

    times = np.arange(1, steps + 1) / steps
    return Kind(at(times), lambda s: s * told, lambda p: at(1 - p), "flow", 1.0, told)


def flux(most: float, least: float, tokens: float, low: int) -> Kind:
    exponent = least + (most - least) * (tokens - low) / (4096 - low)
    return shifted(math.exp(exponent), 1.0, 10000)


def cascade(shift: float) -> Kind:
    def cosine(time: Any) -> Any:
        return np.cos((time + 0.008) / 1.008 * np.pi / 2) ** 2

    start = cosine(0.0)

    def at(time: Any) -> Any:
        level = of_alpha_bar(cosine(time) / start) * shift
        return of_alpha_bar(np.clip(1 / (1 + level**2), 0.0001, 0.9999))

    def told(sigma: Any) -> Any:
        return np.arccos(np.sqrt(start / (sigma**2 + 1))) * 2 / np.pi * 1.008 - 0.008

    # Near a cosine of 1 single precision, in which models were sampled, has few digits.
    table = at(np.arange(1, 10001) / 10000)
    return Kind(table, told, lambda p: at(1 - p), "eps", 1.0, 1.0, 0.015, 4e-4)


def lcm(x: Array, out: Array, s: float, data: float, told: float) -> Array:
    time, spread = 10 * told, 0.5
    total = time**2 + spread**2
    return (x - s * out) * time / math.sqrt(total) + x * spread**2 / total


# Name -> scale of the network's input, clean estimate.
PREDICTIONS: dict[str, tuple[Callable[[float, float], float], Callable[..., Array]]] = {
    "eps": (lambda s, d: 1 / math.hypot(s, d), lambda x, out, s, d, _: x - s * out),
    "v_prediction": (
        lambda s, d: 1 / math.hypot(s, d),
        lambda x, out, s, d, _: x * d**2 / (s**2 + d**2) - out * s * d / math.hypot(s, d),
    ),
    "edm": (
        lambda s, d: 1 / math.hypot(s, d),
        lambda x, out, s, d, _: x * d**2 / (s**2 + d**2) + out * s * d / math.hypot(s, d),
    ),
    "lcm": (lambda s, d: 1 / math.hypot(s, d), lcm),
    "x0": (lambda s, d: 1 / math.hypot(s, d), lambda x, out, s, d, _: out),
    "img_to_img": (lambda s, d: 1.0, lambda x, out, s, d, _: out),
    "cosmos_rflow": (lambda s, d: 1 / (1 + s), lambda x, out, s, d, _: (x - s * out) / (1 + s)),
    "flow": (lambda s, d: 1.0, lambda x, out, s, d, _: x - s * out),
}

Node = Callable[..., Any]
Row = tuple[Node, tuple[Any, ...], Kind]


def rows() -> Iterator[Row]:
    """Node, its inputs beside the model, and what it must make."""
    for choice in nodes.DISCRETE_KINDS:
        for zsnr in (False, True):
            yield nodes.ModelSamplingDiscrete().patch, (choice, zsnr), discrete(choice, zsnr)
    for choice in nodes.CONTINUOUS_KINDS:
        for low, high in ((0.029, 14.6), (0.3, 700.0)):
            made = edm(choice, low, high)
            yield nodes.ModelSamplingContinuousEDM().patch, (choice, high, low), made
    for low, high in ((0.002, 80.0), (0.5, 3.0)):
        made = log_uniform(low, high, lambda s: np.arctan(s) * 2 / np.pi, "v_prediction", 1.0)
        yield nodes.ModelSamplingContinuousV().patch, ("v_prediction", high, low), made
    for shift in (0.25, 1.0, 7.5, 100.0):
        yield nodes.ModelSamplingSD3().patch, (shift,), shifted(shift, 1000, 1000)
        yield nodes.ModelSamplingAuraFlow().patch_aura, (shift,), shifted(shift, 1, 1000)
        yield nodes.ModelSamplingStableCascade().patch, (shift,), cascade(shift)
    for most, least, *size in ((1.15, 0.5, 832, 1216), (0.9, 2.5, 520, 24), (3.0, 0.0, 2048, 2048)):
        made = flux(most, least, math.prod(size) / 256, 256)
        yield nodes.ModelSamplingFlux().patch, (most, least, *size), made
    ltxv: Node = nodes_lt.ModelSamplingLTXV.execute
    for shape in ((1, 128, 5, 9, 11), (2, 16, 1, 40, 30)):
        latent = {"samples": torch.zeros(shape)}
        yield ltxv, (2.05, 0.7, latent), flux(2.05, 0.7, math.prod(shape[2:]), 1024)
    yield ltxv, (1.3, 2.0), flux(1.3, 2.0, 4096, 1024)


def told_name(row: Row) -> str:
    node, inputs, _ = row
    return f"{node.__qualname__} {inputs!r:.40}"


def check_levels(made: Any, kind: Kind) -> None:
    """Table, percentages, timesteps and the levels of these."""
    clear = len(kind.table) // 50
    np.testing.assert_allclose(made.sigmas[clear:], kind.table[clear:], rtol=kind.clear)
    np.testing.assert_allclose(made.sigmas, kind.table, rtol=kind.near)
    for percent in PERCENTS:
        found = made.percent_to_sigma(percent)
        assert found == pytest.approx(kind.at_percent(percent), rel=kind.near), percent

    levels = kind.table[np.linspace(0, len(kind.table) - 1, 7).round().astype(int)]
    told = made.timestep(torch.tensor(levels, dtype=torch.float32))
    np.testing.assert_allclose(told, kind.timestep(levels), 6e-7, kind.clear / 100)
    if kind.unit is None:
        np.testing.assert_allclose(made.sigma(told)[1:], levels[1:], rtol=2e-5)
    else:
        at = [kind.at_percent(1 - percent) for percent in PERCENTS]
        np.testing.assert_allclose(made.sigma(torch.tensor(PERCENTS) * kind.unit), at, kind.near)


@pytest.mark.parametrize("row", list(rows()), ids=told_name)
def test_a_node_follows_its_formulas(row: Row) -> None:
    node, inputs, kind = row
    base: Any = ClosedFormModel()
    base.model_config = SimpleNamespace(sampling_settings={})
    made = node(patcher(base), *inputs)[0].get_model_object("model_sampling")
    flow = kind.prediction == "flow"
    check_levels(made, kind)
    assert made.percent_to_sigma(0.0) == (1.0 if flow else BEFORE_ALL)
    assert made.percent_to_sigma(1.0) == 0.0
    levels = kind.table[np.linspace(0, len(kind.table) - 1, 7).round().astype(int)]
    x, out, latent = np.random.default_rng(3).standard_normal((3, 2, 4, 3, 5))
    scale, estimate = PREDICTIONS[kind.prediction]
    pair = levels[[2, 4]]
    sigma, x32, out32, latent32 = (
        torch.tensor(value, dtype=torch.float32) for value in (pair, x, out, latent)
    )
    answers = {
        "input": made.calculate_input(sigma, x32),
        "denoised": made.calculate_denoised(sigma, out32, x32),
        "noised": made.noise_scaling(sigma, x32, latent32),
        "noised most": made.noise_scaling(sigma, x32, latent32, max_denoise=True),
        "unmixed": made.inverse_noise_scaling(sigma, x32),
    }
    for item, s in enumerate(map(float, pair)):
        keep = 1 - s if flow else 1.0
        most = s if kind.prediction in ("flow", "cosmos_rflow") else math.hypot(1, s)
        step = float(kind.timestep(np.array([s]))[0])
        expected = {
            "input": x[item] * scale(s, kind.data),
            "denoised": estimate(x[item], out[item], s, kind.data, step),
            "noised": s * x[item] + keep * latent[item],
            "noised most": most * x[item] + keep * latent[item],
            "unmixed": x[item] / keep,
        }
        for name, value in expected.items():
            np.testing.assert_allclose(
                answers[name][item].numpy(),
                value,
                rtol=5e-7 + 1e-7 / keep,
                atol=5e-7 * max(1, s),
                err_msg=name,
            )


@pytest.mark.parametrize("shift", [0.59, 1.7, 3.3])
def test_levels_of_cascade_lose_the_digits_that_single_precision_loses(shift: float) -> None:
    sampling = noise_levels.StableCascadeSampling()
    sampling.set_parameters(shift)
    offset, turn = torch.tensor(0.008), math.pi * 0.5

    def level(time: float) -> float:
        cosines = (torch.cos((t + offset) / (1 + offset) * turn) ** 2 for t in (time, 0.0))
        alpha_bar = next(cosines) / next(cosines)
        log_snr = (alpha_bar / (1 - alpha_bar)).log() + 2 * torch.log(1 / torch.tensor(shift))
        kept = log_snr.sigmoid().clamp(0.0001, 0.9999)
        return (((1 - kept) / kept) ** 0.5).item()

    expected = [level(step / 10000) for step in range(1, 10001, 61)]
    assert sampling.sigmas[::61].tolist() == pytest.approx(expected, rel=5e-7)


@pytest.mark.parametrize("multiplier", [0.0, 0.35, 1.0])
def test_rescaled_guidance_in_velocities(multiplier: float) -> None:
    """v = alpha noise - sigma x0 on the unit circle; its spread goes from guided to positive."""
    x, positive, negative = np.random.default_rng(4).standard_normal((3, 2, 4, 3, 5)) * 2
    sigma, scale = 1.7, 6.0
    alpha, beta = 1 / math.hypot(1, sigma), sigma / math.hypot(1, sigma)

    def velocity(clean: Array) -> Array:
        made: Array = alpha * (x - clean) / sigma - beta * clean
        return made

    first, second = velocity(positive), velocity(negative)
    guided = second + scale * (first - second)
    for item in range(2):
        spread = first[item].std() / guided[item].std()
        guided[item] *= multiplier * spread + 1 - multiplier
    expected = alpha**2 * x - beta * guided

    view = nodes.RescaleCFG().patch(patcher(ClosedFormModel()), multiplier)[0]
    facts = {"input": x, "cond": x - positive, "uncond": x - negative, "sigma": [sigma, sigma]}
    made = view.model_options["sampler_cfg_function"](
        {name: torch.tensor(value) for name, value in facts.items()} | {"cond_scale": scale}
    )
    np.testing.assert_allclose(x - made.numpy(), expected, rtol=1e-6, atol=1e-6)
