"""What each way of saving work costs in quality, on pictures of the demo model.

    python benchmarks/quality.py [--pictures 4] [--steps 20] [--size 192] [--compile]

Each setting makes the same pictures from the same seeds as the plain model. Printed are the share
of the network's forwards that was saved, the time beside the plain run, and the PSNR of the decoded
pictures beside the plain ones (40 dB is hard to see, 30 dB is visible beside each other, 20 dB is
another picture). A minute on two cores. Token merging is left out: it acts on the largest grid of
tokens only, where the demo model attends to nothing. `--compile` adds the node TorchCompileModel:
minutes, and a C++ compiler.

Attention back ends of packages (flash, sage, xformers) are in the list where they are installed;
they compute on an accelerator, or with `--interpreted`, and only in half precision:

    python benchmarks/quality.py --interpreted --half float16 --steps 12 --size 256

makes pictures by the packages' own Triton kernels on the CPU, without the other settings
(`benchmarks/interpreted.py` says which versions, and what must be in the environment); half an
hour a package. With `--half` attention of packages and, for comparison, torch's gets its inputs in
that type while all else stays in float32. How much of it a package computed stands behind its name:
the rest (77 text tokens, say) torch's kernel did.
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

from benchmarks import interpreted
from benchmarks.attention import TorchInstead
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


def attention_by(function: Any, dtype: torch.dtype | None = None) -> Callable[[Any], Any]:
    """Another attention function for all layers, with inputs of another type if one is given."""

    def attend(_: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inputs = (x.to(dtype or x.dtype) for x in (q, k, v))
        made: Tensor = function(*inputs, *args, **kwargs)
        return made.to(q.dtype)

    def change(model: Any) -> Any:
        changed = model.clone()
        options = changed.model_options.setdefault("transformer_options", {})
        options[attention.OVERRIDE_KEY] = attend
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


class OfPackage:
    """The attention function of a package, with a count of what it does itself."""

    def __init__(self, function: Any, instead: TorchInstead) -> None:
        self.calls, self._function, self._instead = 0, function, instead
        self.left = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        before = self._instead.calls
        made: Tensor = self._function(*args, **kwargs)
        self.calls += 1
        self.left += self._instead.calls > before
        return made

    @property
    def share(self) -> float:
        return 1 - self.left / max(1, self.calls)


def of_packages() -> dict[str, OfPackage]:
    """The attention back ends whose package is installed."""
    instead = TorchInstead()
    rows = [row for row in attention.BACKENDS if row.package and row.is_available()]
    return {f"attention {row.name}": OfPackage(row.function, instead) for row in rows}


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


def settings_of(
    args: argparse.Namespace, packages: dict[str, OfPackage]
) -> dict[str, Callable[[Any], Any]]:
    """What is compared with the plain model."""
    half = getattr(torch, args.half) if args.half else None
    settings = {} if args.interpreted else dict(SETTINGS)
    if half is not None:
        settings[f"attention in {args.half}"] = attention_by(attention.attention_pytorch, half)
    settings |= {name: attention_by(function, half) for name, function in packages.items()}
    if args.compile:
        settings["compiled"] = compiled
    return settings


def main() -> None:
    """Prints a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=192)
    parser.add_argument("--compile", action="store_true", help="TorchCompileModel too")
    parser.add_argument(
        "--half", choices=("float16", "bfloat16"), help="type of attention's inputs"
    )
    parser.add_argument("--interpreted", action="store_true", help="packages' kernels, on the CPU")
    args = parser.parse_args()
    if args.interpreted:
        interpreted.accept_cpu_tensors()
    packages = of_packages()
    settings = settings_of(args, packages)
    studio = Studio(args.pictures, args.steps, args.size)
    studio.make(SETTINGS["plain"])  # loads and warms up
    plain = studio.make(SETTINGS["plain"])
    sys.stdout.write(f"{'setting':28} {'saved':>6} {'time':>6} {'median dB':>10} {'worst dB':>9}\n")
    for name, change in settings.items():
        made = plain if name == "plain" else studio.make(change)
        ratios = [psnr(one, other) for one, other in zip(made.pictures, plain.pictures)]
        saved = 1 - made.forwards / plain.forwards
        own = f" ({packages[name].share:.0%} own)" if name in packages else ""
        sys.stdout.write(
            f"{name + own:28} {saved:6.0%} {made.seconds / plain.seconds:6.2f} "
            f"{statistics.median(ratios):10.1f} {min(ratios):9.1f}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
