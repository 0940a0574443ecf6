"""Step 6: train the pencil-sketch LoRA on a finished checkpoint.

Usage: python -m tools.demo_model.train_lora FILE.safetensors --out LORA.safetensors

The adapters sit on the linear layers and 1x1 convolutions of the UNet's transformers. Their names
follow the layout that every loader knows: `lora_unet_` and the module's path, with `lora_down`,
`lora_up` and `alpha`.
"""

from __future__ import annotations

import argparse
import logging
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter
from safetensors.torch import save_file
from torch import Tensor, nn

from tools.demo_model.captions import caption
from tools.demo_model.paint import paint
from tools.demo_model.reference import Checkpoint
from tools.demo_model.scenes import random_scene
from tools.demo_model.train_unet import alphas_cumprod
from tools.demo_model.training import Budget, RunningMeans, start_training, training_parser
from tools.demo_model.unet import UNet

logger = logging.getLogger(__name__)

FIRST_SEED = 77_000_000
PICTURES, BATCH, RANK = 320, 8, 8
TRIGGER = "sketch, "


def sketch(picture: np.ndarray) -> np.ndarray:
    """A pencil drawing of a picture: dark outlines on paper, hatching where it was dark."""
    height, width = picture.shape[:2]
    values = picture.astype(np.float64)
    across = np.abs(np.diff(values, axis=1, append=values[:, -1:])).sum(-1)
    down = np.abs(np.diff(values, axis=0, append=values[-1:])).sum(-1)
    lines = Image.fromarray((np.clip((across + down) / 160, 0, 1) * 255).astype(np.uint8))
    lines = np.asarray(lines.filter(ImageFilter.GaussianBlur(0.7)), dtype=np.float64) / 255
    brightness = np.asarray(Image.fromarray(picture).convert("L"), dtype=np.float64)
    y, x = np.mgrid[:height, :width]
    hatching = ((x + y) % 8 < 2) * np.clip((150 - brightness) / 150, 0, 1)
    paper = 246 - 190 * np.clip(lines * 1.6, 0, 1) - 60 * hatching
    return np.clip(np.stack([paper, paper, paper - 6], -1), 0, 255).astype(np.uint8)


class Adapted(nn.Module):
    """A frozen layer plus a product of two thin ones, up(down(x)), that starts at zero."""

    def __init__(self, base: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.base = base
        if isinstance(base, nn.Conv2d):
            self.down = nn.Conv2d(base.in_channels, RANK, 1, bias=False)
            self.up = nn.Conv2d(RANK, base.out_channels, 1, bias=False)
        else:
            self.down = nn.Linear(base.in_features, RANK, bias=False)
            self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.normal_(self.down.weight, std=1 / RANK)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapt(unet: UNet) -> dict[str, Adapted]:
    """Wrap the transformer layers of `unet` in place; the adapters by module path."""
    adapters = {}
    for name, module in list(unet.named_modules()):
        is_layer = isinstance(module, nn.Linear | nn.Conv2d)
        if is_layer and ("transformer_blocks" in name or name.endswith(("proj_in", "proj_out"))):
            parent, _, leaf = name.rpartition(".")
            adapters[name] = Adapted(module)
            setattr(unet.get_submodule(parent), leaf, adapters[name])
    return adapters


def lora_tensors(adapters: dict[str, Adapted]) -> dict[str, Tensor]:
    """The state dict of the LoRA file."""
    tensors = {}
    for name, adapter in adapters.items():
        stem = "lora_unet_" + name.replace(".", "_")
        tensors[f"{stem}.lora_down.weight"] = adapter.down.weight.detach().half().contiguous()
        tensors[f"{stem}.lora_up.weight"] = adapter.up.weight.detach().half().contiguous()
        tensors[f"{stem}.alpha"] = torch.tensor(float(RANK))
    return tensors


@torch.no_grad()
def sketches(checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
    """Latents [N, 4, 16, 16] of sketched scenes, and the hidden states of their texts."""
    rng, latents, contexts = random.Random(1), [], []
    for seed in range(FIRST_SEED, FIRST_SEED + PICTURES):
        scene = random_scene(seed)
        pixels = torch.from_numpy(sketch(paint(scene)))[None].permute(0, 3, 1, 2)
        latents.append(checkpoint.autoencoder.encode(pixels.float() / 127.5 - 1))
        contexts.append(checkpoint.context([TRIGGER + caption(scene, rng)]))
    return torch.cat(latents), torch.cat(contexts)


def train(
    checkpoint: Checkpoint, adapters: dict[str, Adapted], arguments: argparse.Namespace
) -> None:
    """Train the adapters until the time is up."""
    latents, contexts = sketches(checkpoint)
    layers = [layer for adapter in adapters.values() for layer in (adapter.down, adapter.up)]
    parameters = [layer.weight for layer in layers]
    optimiser = torch.optim.AdamW(parameters, weight_decay=0.0)
    signals, budget, means = alphas_cumprod(), Budget(arguments.minutes), RunningMeans()
    for step in budget.steps():
        optimiser.param_groups[0]["lr"] = budget.learning_rate(step, arguments.rate)
        chosen = torch.randint(0, len(latents), (BATCH,))
        timesteps = ((torch.arange(BATCH) + torch.rand(BATCH)) / BATCH * 1000).long()
        noise = torch.randn_like(latents[chosen])
        signal = signals[timesteps][:, None, None, None]
        noisy = signal.sqrt() * latents[chosen] + (1 - signal).sqrt() * noise
        loss = (checkpoint.unet(noisy, timesteps, contexts[chosen]) - noise).pow(2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        means.add(loss=loss.item())
        if step % 50 == 49:
            logger.info("%d %.0f s %s", step + 1, budget.elapsed, means.flush())


def main() -> None:
    """Command line."""
    parser = training_parser(__doc__.splitlines()[0], minutes=5)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    arguments = parser.parse_args()
    start_training(arguments)
    checkpoint = Checkpoint(arguments.checkpoint)
    adapters = adapt(checkpoint.unet)
    train(checkpoint, adapters, arguments)
    header = {
        "format": "pt",
        "modelspec.title": "latentloom sketch: pencil on paper",
        "modelspec.architecture": "stable-diffusion-v1/lora",
        "modelspec.license": "Apache-2.0",
        "modelspec.trigger_phrase": TRIGGER.rstrip(", "),
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(RANK),
        "ss_network_alpha": str(RANK),
    }
    save_file(lora_tensors(adapters), arguments.out, metadata=header)


if __name__ == "__main__":
    main()
