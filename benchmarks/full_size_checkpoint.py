"""A full-size Stable Diffusion 1.5 checkpoint through the loader: time per step and peak memory.

    python benchmarks/full_size_checkpoint.py [--size 512] [--steps 3] [--bf16] [--keep PATH]

Writes a checkpoint with the networks of v1-5 (UNet of 860 M weights, CLIP ViT-L, autoencoder) in
random float16 weights, about 2.1 GB, to a temporary folder; loads it in a fresh process through the
same code the nodes use, encodes a text, samples, decodes; prints times and the peak of resident
memory; and removes the file.

Goal for the peak on the CPU in float32: 1.15 x the weights' size in the dtype of use + 1 GB. The
file is memory-mapped and its pages are given back as weights are converted, so it is never held
twice.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from comfy.devices.heap import HEAP
from comfy.devices.policies import MemoryPolicy, PrecisionPolicy
from comfy.devices.runtime import build_runtime, install_runtime

GIB = 1024**3
UNET: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "num_res_blocks": [2, 2, 2, 2],
    "channel_mult": [1, 2, 4, 4],
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
    "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    "transformer_depth_middle": 1,
    "context_dim": 768,
    "num_heads": 8,
}
AUTOENCODER: dict[str, Any] = {
    "ch": 128,
    "out_ch": 3,
    "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_resolutions": [],
    "in_channels": 3,
    "resolution": 256,
    "z_channels": 4,
    "double_z": True,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Shape of every weight by the key it has in a v1-5 file."""
    from comfy.ldm.autoencoder.kl import AutoencoderKL
    from comfy.ldm.clip.text import CLIPTextModel
    from comfy.ldm.unet.model import UNetModel
    from comfy.ops import disable_weight_init

    networks = {
        "model.diffusion_model.": UNetModel(**UNET, device="meta"),
        "first_stage_model.": AutoencoderKL(ddconfig=AUTOENCODER, embed_dim=4, device="meta"),
        "cond_stage_model.transformer.": CLIPTextModel(
            {}, torch.float16, "meta", disable_weight_init
        ),
    }
    return {
        prefix + key: tuple(value.shape)
        for prefix, network in networks.items()
        for key, value in network.state_dict().items()
        if not key.startswith("text_projection")
    }


def random_weight(key: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A weight that keeps activations finite: norms near 1, others with the inverse fan-in."""
    value = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        value /= math.sqrt(math.prod(shape[1:]))
    else:
        value *= 0.02
        value += 1.0 if key.endswith("weight") else 0.0
    return value.half()


def write_checkpoint(path: Path) -> int:
    """Writes the file tensor by tensor and returns the number of weights."""
    layout = shapes()
    header: dict[str, Any] = {}
    end = 0
    for key, shape in layout.items():
        start, end = end, end + 2 * math.prod(shape)
        header[key] = {"dtype": "F16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for key, shape in layout.items():
            random_weight(key, shape, generator).numpy().tofile(file)
    return sum(math.prod(shape) for shape in layout.values())


def memory() -> dict[str, float]:
    """Resident memory now and at most, in GiB, with its anonymous and file-backed parts."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    names = {"peak": "VmHWM", "now": "VmRSS", "anonymous": "RssAnon", "file": "RssFile"}
    return {name: int(fields[entry].split()[0]) / 1024**2 for name, entry in names.items()}


def phases(path: Path, size: int, steps: int) -> Iterator[tuple[str, float]]:
    """Runs the job and yields each phase with its seconds."""
    import nodes
    from comfy import loading

    started = time.perf_counter()

    def lap() -> float:
        nonlocal started
        before, started = started, time.perf_counter()
        return started - before

    parts = loading.load_checkpoint_guess_config(str(path))
    yield "load", lap()
    with torch.inference_mode():
        encode = nodes.CLIPTextEncode().encode
        positive, negative = encode(parts.clip, "a red circle")[0], encode(parts.clip, "")[0]
        yield "text", lap()
        latent = nodes.EmptyLatentImage().generate(size, size)[0]
        arguments = (7.0, "euler", "normal", positive, negative)
        sampled = nodes.KSampler().sample(parts.model, 1, steps, *arguments, latent)[0]
        yield f"{steps} steps", lap()
        picture = nodes.VAEDecode().decode(parts.vae, sampled)[0]
        yield "decode", lap()
    assert picture.shape == (1, size, size, 3), picture.shape
    assert torch.isfinite(picture).all()


def measure(path: Path, size: int, steps: int, bf16: bool) -> None:
    """Body of the fresh process: prints one JSON line per phase."""
    precision = PrecisionPolicy(cpu_bf16=bf16)  # what `--fast cpu_bf16` asks for
    install_runtime(build_runtime(MemoryPolicy(cpu=True), precision))
    HEAP.keep_pages()  # as the server does
    base = memory()
    for name, seconds in phases(path, size, steps):
        print(json.dumps({"phase": name, "seconds": seconds, **memory()}), flush=True)
    print(json.dumps({"phase": "before", "seconds": 0.0, **base}), flush=True)


def report(lines: list[dict[str, Any]], weights: int, steps: int) -> None:
    """Prints the figures and whether the goal is met."""
    for line in lines:
        print(
            f"{line['phase']:>10}  {line['seconds']:7.2f} s   now {line['now']:.2f} GiB "
            f"(anonymous {line['anonymous']:.2f}, file {line['file']:.2f}), "
            f"peak {line['peak']:.2f} GiB"
        )
    sampling = next(line for line in lines if line["phase"].endswith("steps"))
    print(f"time per step (cfg 7, two predictions): {sampling['seconds'] / steps:.2f} s")
    peak = max(line["peak"] for line in lines)
    goal = 1.15 * weights * 4 / GIB + 1e9 / GIB
    verdict = "met" if peak <= goal else "missed"
    print(f"peak resident memory {peak:.2f} GiB, goal {goal:.2f} GiB in float32: {verdict}")


def main() -> None:
    """Writes the file, measures in a process of its own, reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=512, help="side of the picture in pixels")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--bf16", action="store_true", help="as with --fast cpu_bf16")
    parser.add_argument("--keep", type=Path, help="write the checkpoint here and keep it")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.size, options.steps, options.bf16)
        return
    with tempfile.TemporaryDirectory(prefix="latentloom-bench-") as folder:
        path = options.keep or Path(folder) / "v1-5-layout-random.safetensors"
        weights = write_checkpoint(path)
        print(
            f"{weights / 1e6:.0f} M weights, {path.stat().st_size / GIB:.2f} GiB on disk in float16"
        )
        command = [sys.executable, __file__, "--measure", str(path)]
        command += ["--size", str(options.size), "--steps", str(options.steps)]
        command += ["--bf16"] if options.bf16 else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    report(lines, weights, options.steps)


if __name__ == "__main__":
    main()
