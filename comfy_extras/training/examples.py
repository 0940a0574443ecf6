"""Pairs of a latent and its conditioning, and which of them a step sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comfy_nodes.latent_basics import KINDS

Latent = dict[str, Any]
Conditioning = list[list[Any]]


@dataclass(frozen=True)
class Example:
    """A latent [1, C, ...] and what it is to be made from."""

    latent: Tensor
    conditioning: Conditioning


def own_copy(value: Any) -> Any:
    """Tensors within lists, tuples and dicts as copies that gradients can be taken of."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: own_copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(own_copy(item) for item in value)
    return value


def paired(latents: list[Latent], positive: list[Conditioning]) -> list[list[Example]]:
    """Examples, by the latent that they came in.

    Args:
        latents: Each of one or more items.
        positive: One for all; or one entry, or one conditioning, for each item.

    Raises:
        ValueError: The numbers differ.
    """
    groups = [
        [one for one in own_copy(latent["samples"]).split(1) if one.shape[0]] for latent in latents
    ]
    count = sum(len(group) for group in groups)
    if count == 0:
        raise ValueError("latents: expected at least one latent, found none")
    for group in groups:
        if group and group[0].ndim not in KINDS:
            raise ValueError(
                f"latents: expected latents of pictures, videos or sounds, found one of shape "
                f"{tuple(group[0].shape)}"
            )
    entries = [[entry] for conditioning in positive for entry in conditioning]
    if len(positive) == 1 and len(entries) != count:
        chosen = list(positive) * count
    elif len(entries) == count:
        chosen = entries
    elif len(positive) == count:
        chosen = list(positive)
    else:
        raise ValueError(
            f"positive: expected one conditioning, or one for each of {count} latents, found "
            f"{len(positive)} with {len(entries)} entries"
        )
    chosen = own_copy(chosen)
    examples = []
    for group in groups:
        examples.append([Example(latent, chosen.pop(0)) for latent in group])
    return [group for group in examples if group]


class Picks:
    """Which examples the steps see.

    Args:
        groups: Examples; a step sees such of one group only.
        batch_size: How many a step sees, if the group has them.
        generator: Source of the choice.
    """

    def __init__(
        self, groups: list[list[Example]], batch_size: int, generator: torch.Generator
    ) -> None:
        self.groups, self.batch_size, self.generator = groups, batch_size, generator
        self._sizes = torch.tensor([float(len(group)) for group in groups])

    def next(self) -> list[Example]:
        """The examples of a step; larger groups come more often."""
        chosen = torch.multinomial(self._sizes, 1, generator=self.generator)
        group = self.groups[int(chosen)]
        order = torch.randperm(len(group), generator=self.generator)
        return [group[number] for number in order[: self.batch_size].tolist()]
