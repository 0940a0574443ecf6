"""Fills a network with the tensors of a file and says exactly what did not fit."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence

from torch import Tensor, nn

from comfy.families.family import BrokenModelError
from comfy.weights.assign import assign_weights

logger = logging.getLogger(__name__)

EXAMPLES = 3  # keys named in a message beside the count


def fill_network(
    module: nn.Module, weights: MutableMapping[str, Tensor], part: str, consume: bool = True
) -> None:
    """Gives a network all of its weights.

    Args:
        module: The network; its parameters may be on the meta device and say which dtypes are
            wanted.
        weights: Tensors by the module's own keys; emptied unless `consume` is False.
        part: Name of the network for messages.

    Raises:
        BrokenModelError: A shape is wrong, no tensor fits, or some weight of the network is
            missing.
    """
    given = list(weights)
    try:
        report = assign_weights(module, weights, consume=consume)
    except RuntimeError as error:  # torch names the key and both shapes, one line for each
        lines = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        if not lines:
            raise
        raise BrokenModelError(
            f"the {part} has weights of contradictory sizes: {lines[0]}"
        ) from error
    if not report.matched:
        raise BrokenModelError(
            f"none of the {len(given)} tensors given fits the {part}; "
            f"it needs {keys_in_words(report.missing)}, found {keys_in_words(given)}"
        )
    if report.missing:
        raise BrokenModelError(
            f"the {part} lacks {keys_in_words(report.missing)}; fetch the file again"
        )
    if report.unexpected:
        logger.info("%s: no place for %s", part, keys_in_words(report.unexpected))


def keys_in_words(keys: Sequence[str]) -> str:
    """Count and examples, such as `12 keys (a.weight, a.bias, b.weight, ...)`."""
    if not keys:
        return "no keys"
    listed = ", ".join(keys[:EXAMPLES]) + (", ..." if len(keys) > EXAMPLES else "")
    return f"{len(keys)} key{'s' if len(keys) > 1 else ''} ({listed})"
