"""Loads the released file and samples from it, without the server.

Two samplers, guidance and decoding in a few lines: enough to measure a checkpoint while it is
trained. What users see is sampled by the server itself; tests/demo does that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tools.demo_model.autoencoder import LATENT_CHANNELS, Autoencoder
from tools.demo_model.checkpoint import AUTOENCODER, TEXT, UNET, component
from tools.demo_model.text_encoder import TextEncoder
from tools.demo_model.tokens import Tokenizer
from tools.demo_model.unet import UNet

Denoiser = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Settings:
    """How to sample; `size` is (width, height) in pixels."""

    steps: int = 20
    cfg: float = 4.0
    size: tuple[int, int] = (128, 128)
    solver: str = "dpmpp_2m"
    negative: str = ""


class Checkpoint:
    """The networks of a single file, ready for inference."""

    def __init__(self, path: Path) -> None:
        state_dict = load_file(path)
        self.unet, self.text, self.autoencoder = UNet(), TextEncoder(), Autoencoder()
        text = component(state_dict, TEXT)
        text.pop("text_model.embeddings.position_ids", None)
        self.text.load_state_dict(text)
        self.unet.load_state_dict(component(state_dict, UNET))
        self.autoencoder.load_state_dict(component(state_dict, AUTOENCODER))
        for network in (self.unet, self.text, self.autoencoder):
            network.eval().requires_grad_(False)
        signal = state_dict["alphas_cumprod"].double()
        self.sigmas = ((1 - signal) / signal).sqrt().float()
        self.tokenizer = Tokenizer()

    def context(self, texts: list[str]) -> Tensor:
        """Hidden states [B, 77, 128] of `texts`."""
        return self.text(torch.tensor([self.tokenizer(text) for text in texts]))

    def denoise(
        self, x: Tensor, sigma: Tensor, contexts: tuple[Tensor, Tensor], cfg: float
    ) -> Tensor:
        """The clean latent that guidance between (text, negative text) points to."""
        timestep = (self.sigmas.log() - sigma.log()).abs().argmin().expand(len(x))
        scaled = x / (sigma**2 + 1).sqrt()
        noise = self.unet(scaled, timestep, contexts[0])
        if cfg != 1:
            unwanted = self.unet(scaled, timestep, contexts[1])
            noise = unwanted + cfg * (noise - unwanted)
        return x - sigma * noise

    @torch.inference_mode()
    def sample(self, texts: list[str], seed: int, settings: Settings) -> np.ndarray:
        """Pictures uint8 [B, H, W, 3]; picture i starts from noise of seed + i."""
        width, height = (edge // 8 for edge in settings.size)
        noise = [
            torch.randn(
                LATENT_CHANNELS, height, width, generator=torch.Generator().manual_seed(seed + i)
            )
            for i in range(len(texts))
        ]
        contexts = self.context(texts), self.context([settings.negative] * len(texts))
        steps = torch.linspace(len(self.sigmas) - 1, 0, settings.steps).round().long()
        sigmas = torch.cat([self.sigmas[steps], torch.zeros(1)])
        x = torch.stack(noise) * (sigmas[0] ** 2 + 1).sqrt()
        latents = _SOLVERS[settings.solver](
            lambda x, sigma: self.denoise(x, sigma, contexts, settings.cfg), x, sigmas
        )
        pictures = (self.autoencoder.decode(latents).clamp(-1, 1) + 1) * 127.5
        return pictures.round().byte().permute(0, 2, 3, 1).numpy()


def _euler(model: Denoiser, x: Tensor, sigmas: Tensor) -> Tensor:
    for sigma, following in pairwise(sigmas):
        x = x + (x - model(x, sigma)) / sigma * (following - sigma)
    return x


def _dpmpp_2m(model: Denoiser, x: Tensor, sigmas: Tensor) -> Tensor:
    """DPM-Solver++(2M), https://arxiv.org/abs/2211.01095, in terms of sigma."""
    previous = None
    for i, (sigma, following) in enumerate(pairwise(sigmas)):
        denoised = model(x, sigma)
        if following == 0:
            return denoised
        step = (sigma / following).log()
        target = denoised
        if previous is not None:
            ratio = (sigmas[i - 1] / sigma).log() / step
            target = denoised + (denoised - previous) / (2 * ratio)
        x = following / sigma * x - torch.expm1(-step) * target
        previous = denoised
    return x


_SOLVERS = {"euler": _euler, "dpmpp_2m": _dpmpp_2m}
