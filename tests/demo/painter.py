"""Asks the project's own nodes for a picture by the demo model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from comfy_nodes.conditioning import CLIPSetLastLayer, CLIPTextEncode
from comfy_nodes.latent import EmptyLatentImage
from comfy_nodes.loaders import CheckpointLoaderSimple, LoraLoader
from comfy_nodes.sampling import KSampler
from comfy_nodes.vae import VAEDecode

CHECKPOINT, LORA = "latentloom-demo.safetensors", "latentloom-sketch.safetensors"


@dataclass(frozen=True)
class Sampling:
    """The inputs of a KSampler node; size (width, height) and number of the pictures."""

    steps: int = 12
    cfg: float = 4.0
    sampler: str = "dpmpp_2m"
    scheduler: str = "normal"
    size: tuple[int, int] = (128, 128)
    count: int = 1
    denoise: float = 1.0
    latent: dict[str, Any] | None = field(default=None, compare=False)


class Painter:
    """A loaded checkpoint; each call runs text encoding, sampling and decoding nodes."""

    def __init__(self) -> None:
        loaded = CheckpointLoaderSimple().load_checkpoint(CHECKPOINT)
        self.model, self.clip, self.vae = loaded[:3]

    def with_lora(self, strength: float) -> Painter:
        """A painter whose model and text encoder carry the sketch LoRA."""
        other = object.__new__(Painter)
        arguments = (self.model, self.clip, LORA, strength, strength)
        other.model, other.clip = LoraLoader().load_lora(*arguments)[:2]
        other.vae = self.vae
        return other

    def with_last_layer(self, layer: int) -> Painter:
        """A painter that reads texts up to an earlier layer (-1 is the last)."""
        other = object.__new__(Painter)
        other.model, other.vae = self.model, self.vae
        (other.clip,) = CLIPSetLastLayer().set_last_layer(self.clip, layer)
        return other

    def paint(
        self, text: str, seed: int, negative: str = "", sampling: Sampling | None = None
    ) -> np.ndarray:
        """A picture as uint8 RGB [H, W, 3]; the first of its batch."""
        return self.paint_batch(text, seed, negative, sampling)[0]

    def paint_batch(
        self, text: str, seed: int, negative: str = "", sampling: Sampling | None = None
    ) -> np.ndarray:
        """A batch of pictures as uint8 RGB [B, H, W, 3]."""
        sampling = sampling or Sampling()
        latent = sampling.latent or EmptyLatentImage().generate(*sampling.size, sampling.count)[0]
        with torch.inference_mode():
            positive, unwanted = (
                CLIPTextEncode().encode(self.clip, words)[0] for words in (text, negative)
            )
            (sampled,) = KSampler().sample(
                self.model,
                seed,
                sampling.steps,
                sampling.cfg,
                sampling.sampler,
                sampling.scheduler,
                positive,
                unwanted,
                latent,
                denoise=sampling.denoise,
            )
            (pictures,) = VAEDecode().decode(self.vae, sampled)
        return (pictures.clamp(0, 1) * 255).round().byte().numpy()
