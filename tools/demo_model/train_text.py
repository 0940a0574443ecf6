"""Step 2: teach the text encoder to read, on captions alone.

Usage: python -m tools.demo_model.train_text --out work/text.pt

From the end token, from one padding token and from the mean of all it must name what the scene
holds. Three minutes of this give cross-attention useful directions from its first step; without
them no colour was obeyed after a thousand steps of the diffusion model's training.
"""

from __future__ import annotations

import argparse
import logging
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model.captions import caption
from tools.demo_model.scenes import (
    ABOVE,
    COLOUR_NAMES,
    GROUNDS,
    LAYOUTS,
    OBJECTS,
    POSITIONS,
    SHAPES,
    SIDES,
    SIZES,
    SKIES,
    TEXTURES,
    Scene,
    random_scene,
)
from tools.demo_model.text_encoder import WIDTH, TextEncoder
from tools.demo_model.tokens import END, LENGTH, START, Tokenizer, compact_numbers, used_tokens
from tools.demo_model.training import (
    Budget,
    RunningMeans,
    save_atomically,
    start_training,
    training_parser,
)

logger = logging.getLogger(__name__)

FIRST_SEED = 50_000_000  # scenes of their own, apart from those of the other steps
BATCH = 64
WINDOW = 46  # tokens a training text has; the paddings among them stand at random places of 77
NOT_SAID = -1
QUESTIONS: dict[str, list] = {
    "layout": LAYOUTS,
    "texture": TEXTURES,
    "background": COLOUR_NAMES,
    "second": COLOUR_NAMES,
    "kind 0": SHAPES + OBJECTS,
    "colour 0": COLOUR_NAMES,
    "size 0": list(SIZES),
    "position 0": list(POSITIONS),
    "kind 1": SHAPES + OBJECTS,
    "colour 1": COLOUR_NAMES,
    "vertical": [False, True],
    "sky": SKIES,
    "ground": GROUNDS,
    "above": ABOVE,
    "side": SIDES,
}


def answers(scene: Scene) -> list[int]:
    """The right answer's number for each question; -1 where the scene has none."""
    found: dict[str, object] = {"layout": scene.layout}
    if scene.background is not None:
        found["texture"], found["background"] = scene.background.texture, scene.background.colour
        if scene.background.texture not in ("plain", "stars"):
            found["second"] = scene.background.second
    for i, thing in enumerate(scene.things):
        found[f"kind {i}"], found[f"colour {i}"] = thing.kind, thing.colour
    if scene.layout == "single":
        found["size 0"], found["position 0"] = scene.things[0].size, scene.things[0].position
    elif scene.layout == "pair":
        found["vertical"] = scene.is_vertical
    if scene.landscape is not None:
        view = scene.landscape
        found.update(sky=view.sky, ground=view.ground, above=view.above, side=view.side)
    return [
        options.index(found[question]) if found.get(question) is not None else NOT_SAID
        for question, options in QUESTIONS.items()
    ]


@dataclass(frozen=True)
class TextBatch:
    """Token rows, places and end-token places of some texts, and what they say."""

    tokens: Tensor
    positions: Tensor
    ends: Tensor
    answers: Tensor


class TextFeed:
    """Phrases scene after scene."""

    def __init__(self, numbers: Tensor, tokenizer: Tokenizer, seed: int) -> None:
        self.numbers, self.tokenizer = numbers, tokenizer
        self.rng, self.next_seed = random.Random(seed), FIRST_SEED

    def _text(self, scene: Scene) -> list[int]:
        words = self.tokenizer.words(caption(scene, self.rng))[: WINDOW - 3]
        rows = [int(self.numbers[token]) for token in [START, *words, END]]
        if self.rng.random() < 0.2:  # an unknown word
            rows.insert(self.rng.randrange(1, len(rows)), 0)
        return rows

    def batch(self) -> TextBatch:
        """The next texts."""
        tokens, positions, ends, labels = [], [], [], []
        for seed in range(self.next_seed, self.next_seed + BATCH):
            scene = random_scene(seed)
            rows = self._text(scene)
            padding = WINDOW - len(rows)
            tokens.append(rows + [int(self.numbers[END])] * padding)
            places = sorted(self.rng.sample(range(len(rows), LENGTH), padding))
            positions.append([*range(len(rows)), *places])
            ends.append(len(rows) - 1)
            labels.append(answers(scene))
        self.next_seed += BATCH
        return TextBatch(*(torch.tensor(part) for part in (tokens, positions, ends, labels)))


def reading_loss(text: TextEncoder, head: nn.Linear, batch: TextBatch) -> tuple[Tensor, float]:
    """Cross-entropy over all questions, and the share of right answers at the end token."""
    hidden = text(batch.tokens, positions=batch.positions)
    row = torch.arange(BATCH)
    span = WINDOW - 1 - batch.ends
    padding = (batch.ends + 1 + (torch.rand(BATCH) * span).long()).clamp(max=WINDOW - 1)
    views = torch.stack([hidden[row, batch.ends], hidden[row, padding], hidden.mean(1)], 1)
    parts = head(views).split([len(options) for options in QUESTIONS.values()], dim=-1)
    loss, right = torch.zeros(()), []
    for logits, label in zip(parts, batch.answers.T):
        said = label != NOT_SAID
        if said.any():
            chosen, target = logits[said], label[said]
            cross_entropy = F.cross_entropy(chosen.flatten(0, 1), target.repeat_interleave(3))
            loss = loss + cross_entropy * said.float().mean()
            right.append((chosen[:, 0].argmax(-1) == target).float().mean().item())
    return loss, sum(right) / len(right)


def train(text: TextEncoder, feed: TextFeed, arguments: argparse.Namespace) -> None:
    """Train until the time is up."""
    head = nn.Linear(WIDTH, sum(len(options) for options in QUESTIONS.values()))
    parameters = [*text.parameters(), *head.parameters()]
    optimiser = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    unknown_row = text.text_model.embeddings.token_embedding.weight
    budget, means = Budget(arguments.minutes), RunningMeans()
    for step in budget.steps():
        for group in optimiser.param_groups:
            group["lr"] = budget.learning_rate(step, arguments.rate)
        loss, right = reading_loss(text, head, feed.batch())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        unknown_row.grad[0] = 0
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        means.add(loss=loss.item(), right=right)
        if step % 100 == 99:
            logger.info("%d %.0f s %s", step + 1, budget.elapsed, means.flush())


def main() -> None:
    """Command line."""
    parser = training_parser(__doc__.splitlines()[0], minutes=4)
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate")
    arguments = parser.parse_args()
    start_training(arguments)
    tokenizer = Tokenizer()
    used = used_tokens(tokenizer)
    text = TextEncoder(len(used) + 1)
    train(text, TextFeed(compact_numbers(used), tokenizer, arguments.seed), arguments)
    save_atomically(text.state_dict(), arguments.out)


if __name__ == "__main__":
    main()
