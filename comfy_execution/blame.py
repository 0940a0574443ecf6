"""Which outputs of a prompt an error reaches.

All loops here are linear in the prompt, however many outputs and errors there are: the graph is
walked once with a set, and once with bit sets of bounded length.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from comfy_execution.turns import Turns

MOST_TRACED = 4096
"""Failing outputs that are named as dependent on nodes in error; of more, the first ones."""

MOST_NAMED = 100_000
"""Names in all these lists together; once they are given, a list has one."""

Links = Mapping[str, Sequence[str]]


async def sound_outputs(
    outputs: Sequence[str],
    order: Iterable[str],
    links: Links,
    at_fault: Container[str],
    turns: Turns,
) -> list[str]:
    """The outputs that neither are at fault nor need a node that is.

    Args:
        order: Every node the outputs need, sources first; whoever closes a cycle is at fault.
        links: The sources of each node.
    """
    reached: set[str] = set()
    for node_id in order:
        if node_id in at_fault or not reached.isdisjoint(links[node_id]):
            reached.add(node_id)
        if turns.due:
            await turns.give()
    return [output for output in outputs if output not in reached]


async def dependent_outputs(
    failing: Sequence[str],
    order: Sequence[str],
    links: Links,
    at_fault: Iterable[str],
    turns: Turns,
) -> dict[str, list[str]]:
    """For each node at fault the failing outputs that need it, in their order."""
    traced = failing[:MOST_TRACED]
    bits: dict[str, int] = dict.fromkeys(order, 0)
    for place, output in enumerate(traced):
        bits[output] |= 1 << place
    for node_id in reversed(order):
        for source in links[node_id] if bits[node_id] else ():
            bits[source] |= bits[node_id]
        if turns.due:
            await turns.give()
    untraced = set(failing[MOST_TRACED:])
    left, found = MOST_NAMED, {}
    for node_id in at_fault:
        names = found[node_id] = [node_id] if node_id in untraced else []
        for name in _named(bits[node_id], traced):
            if names and left <= 0:
                break
            names.append(name)
            left -= 1
            if turns.due:
                await turns.give()
    return found


def _named(bits: int, names: Sequence[str]) -> Iterator[str]:
    """The names whose bits are set, in order."""
    while bits:
        lowest = bits & -bits
        yield names[lowest.bit_length() - 1]
        bits ^= lowest
