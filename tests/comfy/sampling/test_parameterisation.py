"""Prediction types: recorded primitives, and agreement after conversion."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.sampling import noise_levels
from comfy.sampling import parameterisation as predictions


@pytest.fixture(scope="module")
def recorded(golden_tensors: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    return golden_tensors("model_conds.safetensors")


def test_primitives_are_the_recorded_ones(
    recorded: dict[str, Tensor], kind_settings: dict[str, Any]
) -> None:
    part = {name: recorded[f"model_sampling/{name}"] for name in ("x", "model_output", "latent")}
    sigma = recorded["model_sampling/sigma"]
    single = torch.tensor(0.7)
    for kind, row in kind_settings.items():
        config = SimpleNamespace(sampling_settings=row["sampling_settings"])
        sampling = noise_levels.build_model_sampling(row["sampling_type"], config)
        made = {
            "calculate_input": sampling.calculate_input(sigma, part["x"]),
            "calculate_denoised": sampling.calculate_denoised(
                sigma, part["model_output"], part["x"]
            ),
            "noise_scaling": sampling.noise_scaling(single, part["x"], part["latent"]),
            "noise_scaling_max_denoise": sampling.noise_scaling(
                single, part["x"], part["latent"], True
            ),
            "inverse_noise_scaling_0.7": sampling.inverse_noise_scaling(single, part["x"]),
        }
        for name, value in made.items():
            expected = recorded[f"model_sampling/{kind}/{name}"]
            torch.testing.assert_close(value, expected, rtol=5e-7, atol=1e-6, msg=f"{kind}/{name}")


X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
CLEAN = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", ["EPS", "V_PREDICTION", "EDM", "X0", "COSMOS_RFLOW", "CONST"])
@pytest.mark.parametrize("level", [0.05, 0.5, 0.9])
def test_the_right_output_gives_the_clean_latent(name: str, level: float) -> None:
    prediction = getattr(predictions, name)()
    prediction.sigma_data = 1.0
    sigma = torch.full((2,), level)
    noise = X
    noisy = prediction.noise_scaling(sigma, noise, CLEAN)
    total = (level**2 + 1) ** 0.5
    output = {
        "EPS": noise,
        "V_PREDICTION": (noise - level * CLEAN) / total,
        "EDM": (level * CLEAN - noise) / total,
        "X0": CLEAN,
        # d/dt of (1 - t) x0 + t noise, in the unit where x is divided by 1 + sigma
        "COSMOS_RFLOW": noise - CLEAN,
        "CONST": noise - CLEAN,
    }[name]
    made = prediction.calculate_denoised(sigma, output, noisy)
    torch.testing.assert_close(made, CLEAN, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["EPS", "V_PREDICTION", "EDM"])
def test_network_inputs_have_unit_variance_for_unit_data(name: str) -> None:
    prediction = getattr(predictions, name)()
    prediction.sigma_data = 0.5
    sigma = torch.full((2,), 3.0)
    scaled = prediction.calculate_input(sigma, torch.ones(2, 4, 8, 8))
    assert scaled.flatten()[0].item() == pytest.approx((3.0**2 + 0.5**2) ** -0.5)


@pytest.mark.parametrize("path", [predictions.EXPLODING, predictions.FLOW])
def test_a_path_inverts_its_signal_to_noise_ratio(path: predictions.NoisePath) -> None:
    for sigma in (1e-4, 0.1, 0.5, 0.999):
        assert path.sigma_at(path.half_log_snr(sigma)) == pytest.approx(sigma, rel=1e-9)


@pytest.mark.parametrize("path", [predictions.EXPLODING, predictions.FLOW])
@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
def test_an_ancestral_step_keeps_the_variance(path: predictions.NoisePath, eta: float) -> None:
    sigma, sigma_next = 0.9, 0.6
    down, scale, up = path.ancestral_step(sigma, sigma_next, eta)
    assert path.alpha(down) * scale == pytest.approx(path.alpha(sigma_next))
    assert (down * scale) ** 2 + up**2 == pytest.approx(sigma_next**2)
    assert (up == 0) == (eta == 0)


@pytest.mark.parametrize("kind", noise_levels.SAMPLING_KINDS)
def test_timesteps_of_the_table_give_back_its_levels(kind: str) -> None:
    sampling = noise_levels.build_model_sampling(kind)
    levels = sampling.sigmas[:: len(sampling.sigmas) // 50]
    if kind not in ("FLUX", "FLOW_COSMOS"):  # FLUX shifts on the way to sigma only
        back = sampling.sigma(sampling.timestep(levels))
        torch.testing.assert_close(back, levels, rtol=2e-3, atol=1e-5)
    assert (sampling.sigmas[1:] >= sampling.sigmas[:-1]).all()
    assert sampling.percent_to_sigma(0.0) >= float(sampling.sigma_max)


def test_an_unknown_kind_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown sampling kind 'EPZ'; known: EPS, "):
        noise_levels.build_model_sampling("EPZ")


@pytest.mark.parametrize(("sigma", "sigma_next"), [(4518.0, 0.03), (14.6, 0.0292), (700.0, 0.1)])
@pytest.mark.parametrize("eta", [0.3, 1.0, 1.7])
def test_an_ancestral_step_has_the_digits_of_single_precision(
    sigma: float, sigma_next: float, eta: float
) -> None:
    start, end = torch.tensor(sigma), torch.tensor(sigma_next)
    up = torch.minimum(end, eta * ((end**2 * (start**2 - end**2) / start**2) ** 0.5))
    down = (end**2 - up**2) ** 0.5
    assert predictions.split_ancestral(sigma, sigma_next, eta) == (down.item(), up.item())


def test_a_step_too_long_for_single_precision_keeps_no_old_noise() -> None:
    assert predictions.split_ancestral(4518.0, 0.03, 1.0)[0] == 0.0


def test_short_flow_steps_add_the_noise_that_single_precision_leaves() -> None:
    """So pictures were made: double precision leaves other digits of it."""
    for sigma in torch.linspace(0.03, 0.97, 40):
        after = sigma - 1e-3
        down = after * (1 + (after / sigma - 1) * 1.0)
        alpha, alpha_down = 1 - after, 1 - down
        added = (after**2 - down**2 * alpha**2 / alpha_down**2) ** 0.5
        made = predictions.FLOW.ancestral_step(sigma.item(), after.item(), 1.0)
        assert made == pytest.approx((down.item(), (alpha / alpha_down).item(), added.item()), 1e-7)
