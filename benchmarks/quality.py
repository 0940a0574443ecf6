"""What each way of saving work costs in quality, on pictures of the demo model.

    python benchmarks/quality.py [--pictures 4] [--steps 20] [--size 192] [--compile]

Each setting makes the same pictures from the same seeds as the plain model. Printed are the share
of the network's forwards that was saved, the time beside the plain run, and the PSNR of the decoded
pictures beside the plain ones (40 dB is hard to see, 30 dB is visible beside each other, 20 dB is
another picture). A minute on two cores. Token merging is left out: it acts on the largest grid of
tokens only, where the demo model attends to nothing. `--compile` adds the node TorchCompileModel:
minutes, and a C++ compiler. Attention back ends of packages (flash, sage, xformers) are in the list
where they are installed; they act on an accelerator in half precision only.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from comfy.loading import load_checkpoint_guess_config
from comfy.nn import attention
from comfy.sampling import noise, run
from comfy_extras import nodes_context_windows, nodes_easycache, nodes_hypertile

CHECKPOINT = ROOT / "models" / "checkpoints" / "latentloom-demo.safetensors"
TEXTS = (
    "a red circle on a blue background",
    "a small green triangle on the left of a yellow background",
    "two white squares on a black background",
    "a large purple star on a grey background",
)


def cached(node: Any, threshold: float) -> Callable[[Any], Any]:
    return lambda model: node.execute(model, threshold, 0.15, 0.95, False)[0]


def windows(length: int, overlap: int) -> Callable[[Any], Any]:
    """Windows over the rows of a picture, as over the frames of a video."""
    return lambda model: nodes_context_windows.windowed(
        model, "standard_static", "pyramid", False, context_length=length,
        context_overlap=overlap, dim=2,
    )  # fmt: skip


def attention_by(function: Any) -> Callable[[Any], Any]:
    """Another attention function for all layers."""

    def change(model: Any) -> Any:
        changed = model.clone()
        options = changed.model_options.setdefault("transformer_options", {})
        options[attention.OVERRIDE_KEY] = lambda _, *args, **kwargs: function(*args, **kwargs)
        return changed

    return change


def compiled(model: Any) -> Any:
    from comfy_extras.nodes_torch_compile import TorchCompileModel

    return TorchCompileModel.execute(model, "inductor")[0]


SETTINGS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "EasyCache 0.05": cached(nodes_easycache.EasyCache, 0.05),
    "EasyCache 0.2": cached(nodes_easycache.EasyCache, 0.2),
    "LazyCache 0.05": cached(nodes_easycache.LazyCache, 0.05),
    "LazyCache 0.2": cached(nodes_easycache.LazyCache, 0.2),
    "context windows 3/4": windows(18, 8),
    "HyperTile 48": lambda m: nodes_hypertile.HyperTile.execute(m, 48, 2, 2, False)[0],
    "attention split": attention_by(attention.attention_split),
    "attention sub_quad": attention_by(attention.attention_sub_quad),
}


def of_packages() -> dict[str, Callable[[Any], Any]]:
    """The attention back ends whose package is installed."""
    rows = [row for row in attention.BACKENDS if row.package and row.is_available()]
    return {f"attention {row.name}": attention_by(row.function) for row in rows}


class Made(NamedTuple):
    """Pictures of a setting.

    Attributes:
        pictures: [pictures, H, W, 3] in 0..1.
        forwards: Calls of the network.
        seconds: Time of sampling, decoding left out.
    """

    pictures: Tensor
    forwards: int
    seconds: float


class Studio:
    """The demo model with its texts encoded."""

    def __init__(self, pictures: int, steps: int, size: int) -> None:
        parts: Any = load_checkpoint_guess_config(str(CHECKPOINT))
        self.model, self.clip, self.vae = parts[:3]
        self.pictures, self.steps, self.cells = pictures, steps, size // 8
        self.forwards = 0
        network = self.model.model.diffusion_model
        original = network._forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.forwards += 1
            return original(*args, **kwargs)

        network._forward = counted

    def encode(self, text: str) -> Any:
        return self.clip.encode_from_tokens_scheduled(self.clip.tokenize(text))

    @torch.inference_mode()
    def make(self, change: Callable[[Any], Any]) -> Made:
        """Pictures of the model with a change, one for each seed."""
        self.forwards, seconds, decoded = 0, 0.0, []
        negative = self.encode("")
        for seed in range(self.pictures):
            positive = self.encode(TEXTS[seed % len(TEXTS)])
            latent = torch.zeros(1, 4, self.cells, self.cells)
            start = time.perf_counter()
            made = run.sample(
                change(self.model), noise.prepare_noise(latent, seed), self.steps, 5.0, "euler",
                "normal", positive, negative, latent, disable_pbar=True, seed=seed,
            )  # fmt: skip
            seconds += time.perf_counter() - start
            decoded.append(self.vae.decode(made).clamp(0, 1))
        return Made(torch.cat(decoded), self.forwards, seconds)


def psnr(one: Tensor, other: Tensor) -> float:
    """Peak signal-to-noise ratio of two pictures in dB."""
    error = float(((one - other) ** 2).mean())
    return math.inf if error == 0 else -10 * math.log10(error)


def main() -> None:
    """Prints a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=192)
    parser.add_argument("--compile", action="store_true", help="TorchCompileModel too")
    args = parser.parse_args()
    settings = {**SETTINGS, **of_packages()}
    if args.compile:
        settings["compiled"] = compiled
    studio = Studio(args.pictures, args.steps, args.size)
    studio.make(SETTINGS["plain"])  # loads and warms up
    plain = studio.make(SETTINGS["plain"])
    lines = [f"{'setting':22} {'saved':>6} {'time':>6} {'median dB':>10} {'worst dB':>9}"]
    for name, change in settings.items():
        made = plain if name == "plain" else studio.make(change)
        ratios = [psnr(one, other) for one, other in zip(made.pictures, plain.pictures)]
        saved = 1 - made.forwards / plain.forwards
        lines.append(
            f"{name:22} {saved:6.0%} {made.seconds / plain.seconds:6.2f} "
            f"{statistics.median(ratios):10.1f} {min(ratios):9.1f}"
        )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
