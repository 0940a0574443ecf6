"""Noise on what a network is shown beside the latent, so that it need not be followed closely.

The amount is a step 0..T-1 of a noise schedule, of which the network is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comfy.nn.timesteps import timestep_embedding

STEPS = 1000
SEED_DISTANCE = 10  # seeds of this noise keep away from that of the latent's noise
LARGEST_BETA = 0.999
COSINE_OFFSET = 0.008


def linear_alphas(start: float = 1e-4, end: float = 2e-2) -> Tensor:
    """Share of the signal's variance after each step; the roots of beta grow linearly.

    Returns:
        [STEPS] in float64.
    """
    betas = torch.linspace(start**0.5, end**0.5, STEPS, dtype=torch.float64) ** 2
    return torch.cumprod(1.0 - betas, dim=0)


def cosine_alphas() -> Tensor:
    """Share of the signal's variance after each step of the capped squared-cosine schedule.

    Source: Nichol and Dhariwal 2021, https://arxiv.org/abs/2102.09672.
    """
    at = torch.arange(STEPS + 1, dtype=torch.float64) / STEPS
    share = torch.cos((at + COSINE_OFFSET) / (1 + COSINE_OFFSET) * math.pi / 2) ** 2
    betas = (1.0 - share[1:] / share[:-1]).clamp(max=LARGEST_BETA)
    return torch.cumprod(1.0 - betas, dim=0)


class NoiseAugmentation(nn.Module):
    """Adds noise of a step.

    Args:
        alphas: Makes the share of the signal's variance after each step.
        max_noise_level: Number of steps that may be asked for.
    """

    def __init__(self, alphas: Callable[[], Tensor], max_noise_level: int = STEPS) -> None:
        super().__init__()
        self.max_noise_level = max_noise_level
        self._alphas = alphas

    def noised(
        self,
        x: Tensor,
        noise_level: Tensor,
        seed: int | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """x [B, ...] with noise of the steps `noise_level` [B]: that given, or of a seed."""
        if noise is None:
            noise = torch.randn_like(x) if seed is None else noise_of_seed(x, seed)
        share = self._alphas().to(x)[noise_level.to(x.device)]
        share = share.reshape(-1, *[1] * (x.ndim - 1))
        return share.sqrt() * x + (1.0 - share).sqrt() * noise


class CLIPEmbeddingNoiseAugmentation(NoiseAugmentation):
    """Noise on image embeddings, in their standardised space.

    Args:
        noise_schedule_config: Accepted for compatibility; every published model has the squared
            cosine.
        max_noise_level: Number of steps that may be asked for.
        timestep_dim: Channels of an embedding.
    """

    data_mean: Tensor
    data_std: Tensor

    def __init__(
        self,
        noise_schedule_config: Mapping[str, Any] | None = None,
        max_noise_level: int = STEPS,
        timestep_dim: int = 256,
    ) -> None:
        del noise_schedule_config
        super().__init__(cosine_alphas, max_noise_level)
        self.dim = timestep_dim
        self.time_embed = Timestep(timestep_dim)
        self.register_buffer("data_mean", torch.zeros(1, timestep_dim), persistent=False)
        self.register_buffer("data_std", torch.ones(1, timestep_dim), persistent=False)

    def forward(
        self,
        x: Tensor,
        noise_level: Tensor,
        seed: int | None = None,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Embeddings [B, dim] with noise (see `noised`), and the steps as sinusoids [B, dim]."""
        mean, std = self.data_mean.to(x), self.data_std.to(x)
        noisy = self.noised((x - mean) / std, noise_level, seed, noise) * std + mean
        return noisy, self.time_embed(noise_level.to(x.device))


class Timestep(nn.Module):
    """Sinusoids of numbers.

    Args:
        dim: Channels of each.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, t: Tensor) -> Tensor:
        """Numbers [B] -> [B, dim]."""
        return timestep_embedding(t, self.dim)


def seed_beside(seed: int | None) -> int:
    """Seed of the noise on pictures in a run with this seed; one without a seed counts as 0."""
    return (seed or 0) - SEED_DISTANCE


def noise_of_seed(like: Tensor, seed: int) -> Tensor:
    """Noise as `like` has its shape, drawn on the CPU."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(like.shape, dtype=like.dtype, generator=generator).to(like.device)


def noise_after_a_picture(like: Tensor, seed: int) -> Tensor:
    """What the generators give next once a picture had its noise of this seed.

    That was drawn on the CPU, so there this is the second draw; elsewhere it is the first of the
    device's own generator, which starts from the same seed.
    """
    generator = torch.Generator(device=like.device).manual_seed(seed)
    options: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "generator": generator}
    if like.device.type == "cpu":
        torch.randn(like.shape, **options)
    return torch.randn(like.shape, **options)


def unclip_adm(
    unclip_conditioning: Sequence[Mapping[str, Any]],
    device: torch.device | str,
    noise_augmentor: CLIPEmbeddingNoiseAugmentation,
    noise_augment_merge: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """[1, 2 D]: the pictures' noisy embeddings by strength, and how noisy they are.

    Args:
        unclip_conditioning: One entry a picture, as `unCLIPConditioning` makes them.
        noise_augment_merge: Noise on the sum, where there are several pictures.
    """

    def with_noise(embedding: Tensor, amount: float, noise: Tensor | None = None) -> Tensor:
        level = round((noise_augmentor.max_noise_level - 1) * amount)
        told = torch.tensor([level], device=embedding.device)
        noisy, steps = noise_augmentor(embedding, noise_level=told, seed=seed, noise=noise)
        return torch.cat([noisy, steps], dim=1)

    made = [
        with_noise(embedding.reshape(1, -1).to(device), one["noise_augmentation"]) * one["strength"]
        for one in unclip_conditioning
        for embedding in one["clip_vision_output"].image_embeds
    ]
    if len(made) == 1:
        return made[0]
    joined = torch.stack(made).sum(dim=0)[:, : noise_augmentor.dim]
    noise = None if seed is None else noise_after_a_picture(joined, seed)
    return with_noise(joined, noise_augment_merge, noise)
