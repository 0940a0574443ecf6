"""Turns an older checkpoint's UNet into the latent basis of a newly trained autoencoder.

Usage: python -m tools.demo_model.realign OLD.safetensors --autoencoder work/autoencoder.pt --out
work/start.safetensors

Needed between steps 3 and 4 when a released file is improved: training the autoencoder further
ends with a new choice of basis, and the old UNet would otherwise have to find it by itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.demo_model.autoencoder import Autoencoder
from tools.demo_model.checkpoint import AUTOENCODER, component
from tools.demo_model.latent_space import rotate_unet
from tools.demo_model.training import painted_batch


def best_rotation(old: Tensor, new: Tensor) -> Tensor:
    """The orthogonal [4, 4] that brings latents [B, 4, H, W] closest to `new` (Procrustes)."""
    a, b = (latents.transpose(0, 1).flatten(1).double() for latents in (old, new))
    u, _, vt = torch.linalg.svd(b @ a.T)
    return (u @ vt).float()


@torch.no_grad()
def encode_with(weights: dict[str, Tensor], pictures: Tensor) -> Tensor:
    """Latents of `pictures` by an autoencoder of these weights."""
    autoencoder = Autoencoder().eval()
    autoencoder.load_state_dict(weights)
    return torch.cat([autoencoder.encode(batch) for batch in pictures.split(8)])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="released checkpoint")
    parser.add_argument("--autoencoder", type=Path, required=True, help="by train_autoencoder")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint to start step 4 from")
    arguments = parser.parse_args()
    state_dict = load_file(arguments.old)
    pictures = painted_batch(range(900_000, 900_040), (128, 128))
    old = encode_with(component(state_dict, AUTOENCODER), pictures)
    new = encode_with(torch.load(arguments.autoencoder), pictures)
    rotation = best_rotation(old, new)
    error = (new - torch.einsum("ij,bjhw->bihw", rotation, old)).pow(2).mean() / new.var()
    save_file(rotate_unet(state_dict, rotation), arguments.out)
    print(f"latents agree but for {100 * error:.1f} % of their variance")


if __name__ == "__main__":
    main()
