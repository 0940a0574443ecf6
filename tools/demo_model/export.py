"""Step 5: join the trained parts into one file of the Stable Diffusion 1.x layout.

Usage: python -m tools.demo_model.export --unet work/unet.pt --autoencoder work/autoencoder.pt
--out FILE.safetensors

What tensor shapes cannot tell, head and group counts, goes into the header as JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tools.demo_model import autoencoder, text_encoder, unet
from tools.demo_model.checkpoint import AUTOENCODER, TEXT, UNET
from tools.demo_model.tokens import LENGTH, VOCABULARY_SIZE
from tools.demo_model.train_unet import alphas_cumprod

HEADER = {
    "format": "pt",
    "modelspec.sai_model_spec": "1.0.0",
    "modelspec.architecture": "stable-diffusion-v1",
    "modelspec.title": "latentloom demo: shapes and landscapes",
    "modelspec.description": "Small text-to-image model trained on procedurally painted pictures",
    "modelspec.resolution": "128x128",
    "modelspec.prediction_type": "epsilon",
    "modelspec.license": "Apache-2.0",
    "unet_config": json.dumps({"num_heads": unet.HEADS, "norm_num_groups": unet.NORM_GROUPS}),
    "vae_config": json.dumps({"norm_num_groups": autoencoder.NORM_GROUPS}),
    "text_config": json.dumps({"num_attention_heads": text_encoder.HEADS}),
}


def full_embedding(rows: Tensor, used: list[int]) -> Tensor:
    """Spread the rows of a compact vocabulary [1 + n, D] over CLIP's table; other rows are zero."""
    table = torch.zeros(VOCABULARY_SIZE, rows.shape[1])
    table[torch.tensor(used)] = rows[1:]
    return table


def single_file(state: dict, autoencoder_weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the released file, float16 but for the noise schedule and integers.

    Args:
        state: What `train_unet` writes.
        autoencoder_weights: What `train_autoencoder` writes.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in state["average"].items():
        part, _, key = name.partition(".")
        if key == "text_model.embeddings.token_embedding.weight":
            tensor = full_embedding(tensor, state["used"])
        tensors[(UNET if part == "unet" else TEXT) + key] = tensor
    tensors.update({AUTOENCODER + key: tensor for key, tensor in autoencoder_weights.items()})
    tensors = {key: tensor.half().contiguous() for key, tensor in tensors.items()}
    tensors[TEXT + "text_model.embeddings.position_ids"] = torch.arange(LENGTH)[None]
    tensors["alphas_cumprod"] = alphas_cumprod()
    return tensors


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unet", type=Path, required=True, help="state written by train_unet")
    parser.add_argument("--autoencoder", type=Path, required=True, help="by train_autoencoder")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint to write")
    arguments = parser.parse_args()
    tensors = single_file(torch.load(arguments.unet), torch.load(arguments.autoencoder))
    save_file(tensors, arguments.out, metadata=HEADER)
    print(f"{arguments.out}: {len(tensors)} tensors, {arguments.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
