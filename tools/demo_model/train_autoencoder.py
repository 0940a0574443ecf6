"""Step 1: train the autoencoder on painted pictures, from nothing or from an earlier checkpoint.

Usage: python -m tools.demo_model.train_autoencoder --out work/autoencoder.pt [--start
FILE.safetensors]

The loss is L1 on pixels, on edges (differences of neighbours: this is what makes outlines crisp)
and on 4x4 means (flat colours), plus a faint pull of the latent to a normal distribution and to
the colours which SD 1.x previews would show (see `latent_space`).
"""

from __future__ import annotations

import argparse
import logging
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tools.demo_model.autoencoder import LATENT_SCALE, Autoencoder
from tools.demo_model.checkpoint import AUTOENCODER, component
from tools.demo_model.latent_space import (
    SD1_RGB_FACTORS,
    fit_rgb,
    rotate_autoencoder,
    rotation_to_sd1,
)
from tools.demo_model.training import (
    Budget,
    RunningMeans,
    WeightAverage,
    painted_batch,
    random_size,
    save_atomically,
    start_training,
    training_parser,
)

logger = logging.getLogger(__name__)

FIRST_SEED = 10_000_000  # scenes of their own, apart from those of the other steps
PREVIEW_CONTRAST = (
    0.7  # with unit-variance latents our previews can reach this share of SD 1.x contrast
)


def differences(x: Tensor) -> tuple[Tensor, Tensor]:
    """Differences of horizontal and of vertical neighbours."""
    return x[..., :, 1:] - x[..., :, :-1], x[..., 1:, :] - x[..., :-1, :]


def losses(autoencoder: Autoencoder, pictures: Tensor) -> dict[str, Tensor]:
    """The parts of the loss for a batch [B, 3, H, W], each already weighted."""
    mean, log_variance = autoencoder.moments(pictures)
    noise = torch.randn_like(mean)
    latents = (mean + (0.5 * log_variance).exp() * noise) * LATENT_SCALE
    # The diffusion model's latents will be a little off: up to 6 % more noise teaches the decoder
    # tolerance.
    latents = latents + 0.06 * torch.rand(len(mean), 1, 1, 1) * torch.randn_like(mean)
    output = autoencoder.decode(latents)
    edges = [(a - b).abs().mean() for a, b in zip(differences(output), differences(pictures))]
    preview = torch.einsum("bchw,cr->brhw", mean * LATENT_SCALE, SD1_RGB_FACTORS * PREVIEW_CONTRAST)
    divergence = 0.5 * (mean.pow(2) + log_variance.exp() - 1 - log_variance).mean()
    return {
        "pixel": (output - pictures).abs().mean(),
        "edge": 0.7 * sum(edges),
        "flat": 0.5 * (F.avg_pool2d(output, 4) - F.avg_pool2d(pictures, 4)).abs().mean(),
        "preview": 0.05 * (preview - F.avg_pool2d(pictures, 8)).pow(2).mean(),
        "kl": 1e-4 * divergence,
    }


class PictureFeed:
    """Batches of about the same area: crops mostly, whole pictures on every fourth step."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.next_seed = FIRST_SEED

    def _paint(self, count: int, size: tuple[int, int]) -> Tensor:
        seeds = range(self.next_seed, self.next_seed + count)
        self.next_seed += count
        return painted_batch(seeds, size)

    def batch(self, step: int) -> Tensor:
        """Pictures [B, 3, H, W] in -1..1 for a step."""
        size = random_size(self.rng)
        if step % 4 == 3:
            return self._paint(max(1, 49152 // (size[0] * size[1])), size)
        crop = 80
        x, y = (self.rng.randrange(0, (edge - crop) // 8 + 1) * 8 for edge in size)
        return self._paint(7, size)[..., y : y + crop, x : x + crop].contiguous()


def train(autoencoder: Autoencoder, arguments: argparse.Namespace) -> None:
    """Train until the time is up; writes the averaged weights to `arguments.out`."""
    autoencoder.to(memory_format=torch.channels_last)
    if arguments.decoder_only:
        autoencoder.encoder.requires_grad_(False)
        autoencoder.quant_conv.requires_grad_(False)
    trained = [parameter for parameter in autoencoder.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    average = WeightAverage(autoencoder, 0.998)
    budget, means, feed = Budget(arguments.minutes), RunningMeans(), PictureFeed(arguments.seed)
    for step in budget.steps():
        for group in optimiser.param_groups:
            group["lr"] = budget.learning_rate(step, arguments.rate)
        pictures = feed.batch(step).to(memory_format=torch.channels_last)
        parts = losses(autoencoder, pictures)
        optimiser.zero_grad(set_to_none=True)
        sum(parts.values()).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        average.update()
        means.add(**{name: part.item() for name, part in parts.items()})
        if step % 100 == 99:
            logger.info("%d %.0f s %s", step + 1, budget.elapsed, means.flush())
        if step % 1000 == 999:
            save_atomically(average.average, arguments.out)
    autoencoder.load_state_dict(average.average)


@torch.no_grad()
def encode_all(autoencoder: Autoencoder, pictures: Tensor) -> Tensor:
    """Scaled latents of many pictures."""
    return torch.cat([autoencoder.encode(batch) for batch in pictures.split(16)])


@torch.no_grad()
def choose_basis(autoencoder: Autoencoder, pictures: Tensor) -> None:
    """Turn and scale the latent space, in place (see `latent_space`)."""
    latents = encode_all(autoencoder, pictures)
    factors, _, _ = fit_rgb(latents, pictures)
    mean = latents.mean((0, 2, 3))
    rotate_autoencoder(autoencoder, rotation_to_sd1(factors), mean, latents.std())


@torch.no_grad()
def report(autoencoder: Autoencoder, pictures: Tensor) -> None:
    """Log how well pictures are restored and what the latents are like."""
    latents = encode_all(autoencoder, pictures)
    output = torch.cat([autoencoder.decode(batch) for batch in latents.split(16)]).clamp(-1, 1)
    psnr = 10 * torch.log10(4 / (output - pictures).pow(2).mean())
    factors, bias, explained = fit_rgb(latents, pictures)
    logger.info("PSNR %.2f dB, latent mean %s", psnr, latents.mean((0, 2, 3)).tolist())
    logger.info("latent std %s", latents.std((0, 2, 3)).tolist())
    logger.info("preview factors %s bias %s", factors.tolist(), bias.tolist())
    logger.info("preview explains %s", explained.tolist())


def main() -> None:
    """Command line."""
    parser = training_parser(__doc__.splitlines()[0], minutes=45)
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--start", type=Path, help="checkpoint (.safetensors) or earlier output")
    parser.add_argument("--decoder-only", action="store_true", help="leave the latents as they are")
    arguments = parser.parse_args()
    start_training(arguments)
    autoencoder = Autoencoder()
    if arguments.start and arguments.start.suffix == ".safetensors":
        autoencoder.load_state_dict(component(load_file(arguments.start), AUTOENCODER))
    elif arguments.start:
        autoencoder.load_state_dict(torch.load(arguments.start))
    train(autoencoder, arguments)
    pictures = painted_batch(range(900_000, 900_192), (128, 128))
    if not arguments.decoder_only:
        choose_basis(autoencoder, pictures)
    report(autoencoder, pictures)
    save_atomically(autoencoder.state_dict(), arguments.out)


if __name__ == "__main__":
    main()
