"""Turns a checkpoint's latent space so that ordinary SD 1.x previews show its colours.

Usage: python -m tools.demo_model.rebase OLD.safetensors --out NEW.safetensors

An exact change of basis without training, see `latent_space`. Pictures stay what they are, but
for one thing: a seed's noise now means other noise, as its channels are mixed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from safetensors.torch import load_file, save_file

from tools.demo_model.checkpoint import AUTOENCODER, component
from tools.demo_model.export import HEADER
from tools.demo_model.latent_space import fit_rgb, rotate_state_dict, rotation_to_sd1
from tools.demo_model.realign import encode_with
from tools.demo_model.training import painted_batch


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="checkpoint to turn")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint to write")
    arguments = parser.parse_args()
    state_dict = load_file(arguments.old)
    pictures = painted_batch(range(900_000, 900_192), (128, 128))
    latents = encode_with(component(state_dict, AUTOENCODER), pictures)
    factors, _, _ = fit_rgb(latents, pictures)
    turned = rotate_state_dict(state_dict, rotation_to_sd1(factors))
    save_file(turned, arguments.out, metadata=HEADER)
    latents = encode_with(component(turned, AUTOENCODER), pictures)
    factors, bias, explained = fit_rgb(latents, pictures)
    print(f"preview factors {factors.tolist()}\nbias {bias.tolist()}")
    print(f"explained {explained.tolist()}")


if __name__ == "__main__":
    main()
