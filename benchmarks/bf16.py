"""What bfloat16 gains on this processor, and what it costs in accuracy.

    python benchmarks/bf16.py [--pixels 512]

Prints how fast the processor multiplies it, the time of a forward of a full-size Stable Diffusion
1.5 UNet (random weights, cfg) in float32 and in bfloat16, and how far the demo model's pictures
move when the diffusion model, the VAE or both compute in bfloat16. Goal, where products are fast:
2 x.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.beside_diffusers import random_weights
from benchmarks.full_size_checkpoint import UNET
from comfy import loading
from comfy.devices import processor
from comfy.devices.policies import MemoryPolicy, PrecisionPolicy
from comfy.devices.runtime import build_runtime, install_runtime
from comfy.ldm.unet.model import UNetModel
from comfy.weights.layout import arrange_convolutions

GOAL = 2.0
TEXTS = ("a red circle on a blue background", "two green squares", "a small white star on black")
BF16 = torch.bfloat16


def forward_seconds(dtype: torch.dtype, pixels: int) -> float:
    """The faster of two forwards after one that warms caches up."""
    network = UNetModel(**UNET, device="meta", dtype=dtype)
    network.load_state_dict(random_weights(network, dtype), assign=True)
    arrange_convolutions(network.eval(), "cpu")
    x = torch.randn(2, 4, pixels // 8, pixels // 8, dtype=dtype)
    inputs = (x, torch.full((2,), 500.0), torch.randn(2, 77, 768, dtype=dtype))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        network(*inputs)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def pictures(**policy: Any) -> list[Tensor]:
    """Pictures of the demo model under a precision policy."""
    import nodes

    install_runtime(build_runtime(MemoryPolicy(cpu=True), PrecisionPolicy(**policy)))
    path = next((ROOT / "models" / "checkpoints").glob("*.safetensors"))
    parts = loading.load_checkpoint_guess_config(str(path))
    encode = nodes.CLIPTextEncode().encode
    negative = encode(parts.clip, "")[0]
    made = []
    for seed, text in enumerate(TEXTS):
        latent = nodes.EmptyLatentImage().generate(128, 128)[0]
        arguments = (12, 5.0, "euler", "normal", encode(parts.clip, text)[0], negative, latent)
        sampled = nodes.KSampler().sample(parts.model, seed, *arguments)[0]
        made.append(nodes.VAEDecode().decode(parts.vae, sampled)[0])
    return made


def psnr(picture: Tensor, reference: Tensor) -> float:
    """Decibels; pictures in 0..1."""
    return -10 * math.log10(max(1e-12, (picture - reference).square().mean().item()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pixels", type=int, default=512, help="side of the picture")
    args = parser.parse_args()
    speed = processor.bf16_speed()
    verdict = "worth it" if processor.multiplies_bf16() else "not worth it"
    print(f"products in bfloat16: {speed:.2f} x as fast as in float32 ({verdict})")
    wide, narrow = (forward_seconds(dtype, args.pixels) for dtype in (torch.float32, BF16))
    print(f"forward in float32 {wide:.2f} s, in bfloat16 {narrow:.2f} s: {wide / narrow:.2f} x")
    print(f"goal where products are worth it: {GOAL:g} x")
    reference = pictures()
    for part, policy in (
        ("diffusion model", {"unet_dtype": BF16}),
        ("VAE", {"vae_dtype": BF16}),
        ("both", {"unet_dtype": BF16, "vae_dtype": BF16}),
    ):
        made = pictures(**policy)
        worst = min(psnr(*pair) for pair in zip(made, reference))
        apart = max((one - other).abs().max().item() for one, other in zip(made, reference))
        print(f"{part:16s} PSNR at least {worst:.1f} dB, at most {255 * apart:.1f} of 255 apart")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
