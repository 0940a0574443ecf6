"""Step 3: paint, encode and phrase scenes once; store them for the diffusion model's training.

Usage: python -m tools.demo_model.make_latents --autoencoder work/autoencoder.pt --out work/latents

A shard holds scenes of one picture size: `latents` [N, 4, H, W] float16 and `tokens` [N, 3, 77]
(three phrasings).
"""

from __future__ import annotations

import argparse
import logging
import random
from pathlib import Path

import numpy as np
import torch

from tools.demo_model.autoencoder import Autoencoder
from tools.demo_model.captions import caption
from tools.demo_model.scenes import random_scene
from tools.demo_model.tokens import Tokenizer
from tools.demo_model.training import SIZE_SHARES, painted_batch, save_atomically

logger = logging.getLogger(__name__)

PHRASINGS = 3
SHARD_SIZE = 250


def shard_sizes(count: int) -> list[tuple[int, int]]:
    """Picture sizes of `count` shards: any prefix of them has about the right shares.

    The share of a size is its share of the training steps, whose batches have equal area: so
    fewer pictures of the larger sizes are needed.
    """
    need = {size: share / (size[0] * size[1]) for size, share in SIZE_SHARES.items()}
    made = dict.fromkeys(need, 0)
    order = []
    for _ in range(count):
        size = max(need, key=lambda s: need[s] / (made[s] + 1))
        made[size] += 1
        order.append(size)
    return order


@torch.no_grad()
def make_shard(
    autoencoder: Autoencoder, tokenizer: Tokenizer, number: int, size: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """The shard with scenes number * SHARD_SIZE onwards."""
    rng = random.Random(number)
    seeds = range(number * SHARD_SIZE, (number + 1) * SHARD_SIZE)
    step = max(1, 16 * 128 * 128 // (size[0] * size[1]))
    batches = [seeds[i : i + step] for i in range(0, SHARD_SIZE, step)]
    latents = torch.cat([autoencoder.encode(painted_batch(batch, size)) for batch in batches])
    tokens = [
        [tokenizer(caption(random_scene(seed), rng)) for _ in range(PHRASINGS)] for seed in seeds
    ]
    return {"latents": latents.half(), "tokens": torch.from_numpy(np.array(tokens, np.int32))}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--autoencoder", type=Path, required=True, help="state dict of step 1")
    parser.add_argument("--out", type=Path, required=True, help="folder of the shards")
    parser.add_argument("--shards", type=int, default=160, help="number of shards in all")
    parser.add_argument("--first", type=int, default=0, help="first shard this process makes")
    parser.add_argument("--stride", type=int, default=1, help="make every STRIDE-th shard")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(arguments.threads)
    autoencoder = Autoencoder()
    autoencoder.load_state_dict(torch.load(arguments.autoencoder))
    autoencoder.to(memory_format=torch.channels_last).eval()
    tokenizer = Tokenizer()
    arguments.out.mkdir(parents=True, exist_ok=True)
    sizes = shard_sizes(arguments.shards)
    for number in range(arguments.first, arguments.shards, arguments.stride):
        shard = make_shard(autoencoder, tokenizer, number, sizes[number])
        save_atomically(shard, arguments.out / f"{number:04d}.pt")
        logger.info("shard %d of %d: %s", number + 1, arguments.shards, sizes[number])


if __name__ == "__main__":
    main()
