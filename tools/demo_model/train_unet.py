"""Step 4: train the noise predictor together with the text encoder on stored latents.

Usage: python -m tools.demo_model.train_unet --latents work/latents --out work/unet.pt
           (--text work/text.pt | --start FILE.safetensors | --resume work/unet.pt)

Each step takes pictures of one size, as many as make up a fixed area. Every few minutes the run
writes its state: `average` (the weights to release) and `raw` (the weights to resume from).
"""

from __future__ import annotations

import argparse
import logging
import random
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tools.demo_model.checkpoint import TEXT, UNET, component
from tools.demo_model.text_encoder import TextEncoder
from tools.demo_model.tokens import Tokenizer, compact_numbers, used_tokens
from tools.demo_model.training import (
    SIZE_SHARES,
    Budget,
    RunningMeans,
    WeightAverage,
    save_atomically,
    start_training,
    training_parser,
)
from tools.demo_model.unet import UNet

logger = logging.getLogger(__name__)

TEXT_RATE = 0.15  # the text encoder learns at this share of the UNet's rate
NO_TEXT_SHARE = 0.1  # of the captions are emptied, which classifier-free guidance needs
CLIP_SKIP_SHARE = 0.12  # of the steps use the next-to-last text layer, so that clip skip 2 works


def alphas_cumprod() -> Tensor:
    """The family's signal share per timestep [1000]: betas linear in their square root."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, 0).float()


def loss_weights(kind: str) -> Tensor:
    """A weight per timestep [1000] for the squared error of the noise.

    "detail" caps the signal-to-noise ratio at 5 (https://arxiv.org/abs/2303.09556); "layout" is
    1/sqrt(SNR) (https://arxiv.org/abs/2310.08442): more say for the noisy steps, where shape and
    place are decided.
    """
    signal = alphas_cumprod()
    ratio = signal / (1 - signal)
    weights = {"detail": ratio.clamp(max=5) / ratio, "layout": ratio.rsqrt().clamp(0.1, 4.0)}
    return weights[kind]


class LatentPool:
    """The shards of `make_latents`, by picture size; looks for new shards from time to time."""

    def __init__(self, folder: Path, numbers: Tensor, area: float, seed: int) -> None:
        self.folder, self.numbers, self.area = folder, numbers, area
        self.rng = random.Random(seed)
        self.known: set[Path] = set()
        self.shards: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        self.empty = numbers[torch.tensor(Tokenizer()(""))]
        self.refresh()

    def refresh(self) -> None:
        """Load shards that have appeared."""
        for path in sorted(self.folder.glob("*.pt")):
            if path not in self.known:
                shard = torch.load(path)
                height, width = (8 * edge for edge in shard["latents"].shape[-2:])
                entry = (shard["latents"], self.numbers[shard["tokens"].long()])
                self.shards.setdefault((width, height), []).append(entry)
                self.known.add(path)
        if not self.shards:
            raise FileNotFoundError(f"no shards in {self.folder}; run make_latents first")

    def batch(self) -> tuple[Tensor, Tensor]:
        """Latents [B, 4, H, W] and token rows [B, 77] of one size."""
        sizes = list(self.shards)
        size = self.rng.choices(sizes, [SIZE_SHARES[s] for s in sizes])[0]
        count = max(1, round(self.area * 128 * 128 / (size[0] * size[1])))
        latents, tokens = [], []
        for _ in range(count):
            shard_latents, shard_tokens = self.rng.choice(self.shards[size])
            i = self.rng.randrange(len(shard_latents))
            latents.append(shard_latents[i].float())
            tokens.append(self.rng.choice(list(shard_tokens[i])))
        return torch.stack(latents), self._disturb(torch.stack(tokens))

    def _disturb(self, tokens: Tensor) -> Tensor:
        """Empty some captions and put unknown words (row 0) into others."""
        count = len(tokens)
        tokens[torch.rand(count) < NO_TEXT_SHARE] = self.empty
        unknown = (torch.rand(tokens.shape) < 0.02) & (torch.rand(count, 1) < 0.25)
        unknown[:, 0] = False
        return tokens.masked_fill(unknown, 0)


class Model(nn.ModuleDict):
    """UNet and text encoder, with the compact vocabulary."""

    def __init__(self, used: list[int]) -> None:
        super().__init__({"unet": UNet(), "text": TextEncoder(len(used) + 1)})
        self.used = used

    def load_checkpoint(self, path: Path) -> None:
        """Continue from a released single file."""
        state_dict = load_file(path)
        self["unet"].load_state_dict(component(state_dict, UNET))
        text = component(state_dict, TEXT)
        text.pop("text_model.embeddings.position_ids", None)
        name = "text_model.embeddings.token_embedding.weight"
        rows = text[name][torch.tensor(self.used)]
        text[name] = torch.cat([torch.zeros_like(rows[:1]), rows])
        self["text"].load_state_dict(text)

    def optimiser(self) -> torch.optim.Optimizer:
        """AdamW; `share` of a group is its part of the learning rate."""
        parameters = list(self["unet"].parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01, "share": 1.0},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, "share": 1.0},
            {"params": self["text"].parameters(), "weight_decay": 0.0, "share": TEXT_RATE},
        ]
        return torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True)


def noise_errors(model: Model, latents: Tensor, tokens: Tensor, rng: random.Random) -> tuple:
    """Squared error of the predicted noise [B], and the timesteps [B] it was measured at."""
    count = len(latents)
    timesteps = ((torch.arange(count) + torch.rand(count)) / count * 1000).long()  # stratified
    noise = torch.randn_like(latents)
    signal = alphas_cumprod()[timesteps][:, None, None, None]
    noisy = signal.sqrt() * latents + (1 - signal).sqrt() * noise
    context = model["text"](tokens, skip=int(rng.random() < CLIP_SKIP_SHARE))
    predicted = model["unet"](noisy, timesteps, context)
    return (predicted - noise).pow(2).mean((1, 2, 3)), timesteps


def train(model: Model, pool: LatentPool, arguments: argparse.Namespace) -> None:
    """Train until the time is up, writing the state every 400 steps and at the end."""
    optimiser, average = model.optimiser(), WeightAverage(model, 0.998)
    weights, rng = loss_weights(arguments.weighting), random.Random(arguments.seed)
    unknown_row = model["text"].text_model.embeddings.token_embedding.weight
    budget, means = Budget(arguments.minutes), RunningMeans()
    for step in budget.steps():
        rate = budget.learning_rate(step, arguments.rate, arguments.hold)
        for group in optimiser.param_groups:
            group["lr"] = rate * group["share"]
        errors, timesteps = noise_errors(model, *pool.batch(), rng)
        loss = (errors * weights[timesteps]).mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        unknown_row.grad[0] = 0
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        average.update()
        means.add(loss=loss.item(), mse=errors.mean().item())
        if step % 100 == 99:
            logger.info("%d %.0f s rate %.6f %s", step + 1, budget.elapsed, rate, means.flush())
            pool.refresh()
        if step % 400 == 399:
            save(model, average, arguments)
    save(model, average, arguments)


def save(model: Model, average: WeightAverage, arguments: argparse.Namespace) -> None:
    """Write the training state."""
    state = {"average": average.average, "raw": model.state_dict(), "used": model.used}
    save_atomically(state, arguments.out)


def main() -> None:
    """Command line."""
    parser = training_parser(__doc__.splitlines()[0], minutes=120)
    parser.add_argument("--latents", type=Path, required=True, help="folder of make_latents")
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--text", type=Path, help="text encoder of step 2")
    start.add_argument("--start", type=Path, help="single-file checkpoint to start from")
    start.add_argument("--resume", type=Path, help="state of an earlier run")
    parser.add_argument("--rate", type=float, default=9e-4, help="peak learning rate")
    parser.add_argument("--hold", type=float, default=0.3, help="share of the time at that rate")
    parser.add_argument("--area", type=float, default=16, help="pictures of 128x128 per step")
    parser.add_argument("--weighting", choices=["detail", "layout"], default="layout")
    arguments = parser.parse_args()
    start_training(arguments)
    used = used_tokens(Tokenizer())
    model = Model(used)
    if arguments.text:
        model["text"].load_state_dict(torch.load(arguments.text))
    elif arguments.start:
        model.load_checkpoint(arguments.start)
    else:
        model.load_state_dict(torch.load(arguments.resume)["raw"])
    pool = LatentPool(arguments.latents, compact_numbers(used), arguments.area, arguments.seed)
    train(model, pool, arguments)


if __name__ == "__main__":
    main()
