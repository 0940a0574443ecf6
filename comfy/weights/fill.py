"""Gives a whole network its weights, or says by count and example what does not fit.

`assign_weights` reports; here a report that leaves the network unusable becomes an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping

import torch
from torch import nn

from comfy.weights.assign import assign_weights
from comfy.weights.contents import contents_in_words
from comfy.weights.contents import in_words as in_words

logger = logging.getLogger(__name__)

# Buffers of old text encoders that count 0, 1, 2, ...: usual in files, needed by nobody.
COUNTING_BUFFERS = ("position_ids",)


class IncompleteWeightsError(ValueError):
    """Weights that cannot make a network work: none fits, some are missing, or a shape is wrong."""


class UnknownWeightsError(IncompleteWeightsError):
    """Weights of another kind than was asked for, or of none that is known."""


def fill(
    module: nn.Module,
    weights: MutableMapping[str, torch.Tensor],
    part: str,
    defaults: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
) -> None:
    """Fill a network, whose parameters may be on the meta device, from tensors by its keys.

    Args:
        module: The network.
        weights: Tensors by key; not changed.
        part: Name of the network for messages.
        defaults: Last part of a key (its final one or two names) -> maker of the value that
            parameter has when the file lacks it; it is given the empty parameter.
    Raises:
        IncompleteWeightsError: See the class.
    """
    try:
        report = assign_weights(module, weights)
    except RuntimeError as error:  # torch names the key and both shapes, one line for each
        wrong = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        if not wrong:
            raise
        raise IncompleteWeightsError(f"the {part} has a wrong shape: {wrong[0]}") from error
    if not report.matched:
        raise IncompleteWeightsError(
            f"none of the {len(weights)} tensors fits the {part}; "
            f"it needs {in_words(report.missing)}, found {contents_in_words(list(weights))}"
        )
    made = {key: maker for key in report.missing if (maker := _maker(key, defaults or {}))}
    missing = [key for key in report.missing if key not in made]
    if missing:
        raise IncompleteWeightsError(f"the {part} lacks {in_words(missing)}; fetch the file again")
    if made:
        own = module.state_dict(keep_vars=True)
        values = {key: maker(_empty_like(own[key])) for key, maker in made.items()}
        module.load_state_dict(values, strict=False, assign=True)
        module.requires_grad_(False)
    unexpected = [key for key in report.unexpected if not key.endswith(COUNTING_BUFFERS)]
    if unexpected:
        logger.info("%s: no place for %s", part, in_words(unexpected))


def _empty_like(weight: torch.Tensor) -> torch.Tensor:
    """Memory for a weight; torch.empty_like of a meta tensor would import sympy, a second long."""
    return torch.empty(weight.shape, dtype=weight.dtype, device="cpu")


def _maker(
    key: str, defaults: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    names = key.split(".")
    return defaults.get(names[-1]) or defaults.get(".".join(names[-2:]))
