"""Turning the latent space changes no picture."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tools.demo_model.autoencoder import Autoencoder
from tools.demo_model.checkpoint import AUTOENCODER, UNET, component
from tools.demo_model.latent_space import (
    SD1_RGB_FACTORS,
    fit_rgb,
    rotate_autoencoder,
    rotate_state_dict,
    rotation_to_sd1,
)
from tools.demo_model.realign import best_rotation
from tools.demo_model.training import painted_batch
from tools.demo_model.unet import UNet

CHECKPOINT = Path(__file__).parents[2] / "models" / "checkpoints" / "latentloom-demo.safetensors"


@pytest.fixture(scope="module")
def rotation() -> torch.Tensor:
    q, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
    return q


@pytest.fixture(scope="module")
def state_dict() -> dict[str, torch.Tensor]:
    return load_file(CHECKPOINT)


def _autoencoder(state_dict: dict[str, torch.Tensor]) -> Autoencoder:
    autoencoder = Autoencoder().requires_grad_(False)
    autoencoder.load_state_dict(component(state_dict, AUTOENCODER))
    return autoencoder


def test_a_turned_and_scaled_autoencoder_paints_the_same_pictures(
    state_dict: dict[str, torch.Tensor], rotation: torch.Tensor
) -> None:
    autoencoder = _autoencoder(state_dict)
    pictures = painted_batch(range(2), (64, 64))
    latents = autoencoder.encode(pictures)
    output = autoencoder.decode(latents)
    mean, std = torch.tensor([0.1, -0.2, 0.3, 0.0]), torch.tensor(1.3)
    rotate_autoencoder(autoencoder, rotation, mean, std)
    expected = torch.einsum("ij,bjhw->bihw", rotation, (latents - mean[:, None, None]) / std)
    turned = autoencoder.encode(pictures)
    torch.testing.assert_close(turned, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(autoencoder.decode(turned), output, atol=1e-4, rtol=1e-4)


def test_a_turned_checkpoint_predicts_the_turned_noise(
    state_dict: dict[str, torch.Tensor], rotation: torch.Tensor
) -> None:
    exact = {key: value.float() for key, value in state_dict.items()}
    plain, turned = UNet().requires_grad_(False), UNet().requires_grad_(False)
    plain.load_state_dict(component(exact, UNET))
    turned.load_state_dict(component(rotate_state_dict(exact, rotation), UNET))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, 8, 8, generator=generator)
    context = torch.randn(2, 77, 128, generator=generator)
    timesteps = torch.tensor([10, 900])

    def turn(tensor: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,bjhw->bihw", rotation, tensor)

    expected = turn(plain(x, timesteps, context))
    torch.testing.assert_close(turned(turn(x), timesteps, context), expected, atol=1e-4, rtol=1e-4)


def test_the_best_turn_undoes_a_known_one(rotation: torch.Tensor) -> None:
    recovered = rotation_to_sd1(rotation.T @ SD1_RGB_FACTORS)
    torch.testing.assert_close(recovered.T @ SD1_RGB_FACTORS, rotation.T @ SD1_RGB_FACTORS)


def test_fitting_finds_a_linear_preview(rotation: torch.Tensor) -> None:
    latents = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(2))
    colours = torch.einsum("bchw,cr->brhw", latents, SD1_RGB_FACTORS) + 0.1
    pictures = torch.nn.functional.interpolate(colours, scale_factor=8)
    factors, bias, explained = fit_rgb(latents, pictures)
    torch.testing.assert_close(factors, SD1_RGB_FACTORS, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(bias, torch.full((3,), 0.1), atol=1e-5, rtol=1e-5)
    assert explained.min() > 0.999


def test_realigning_finds_the_turn_between_two_sets_of_latents(rotation: torch.Tensor) -> None:
    old = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(3))
    new = torch.einsum("ij,bjhw->bihw", rotation, old)
    torch.testing.assert_close(best_rotation(old, new), rotation, atol=1e-5, rtol=1e-5)
