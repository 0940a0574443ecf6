"""A dry run: what a prompt would do, without doing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comfy_execution.caching import ResultCache
from comfy_execution.changes import note_change
from comfy_execution.graph import DynamicPrompt, linked_nodes, needed_nodes
from comfy_execution.privacy import Privacy
from comfy_execution.registry import Registry, SpecTable
from comfy_execution.signatures import Signatures
from comfy_execution.turns import Turns


@dataclass(frozen=True)
class Plan:
    """What would happen to the nodes that the outputs of a prompt need.

    Attributes:
        cached: Nodes whose results are known.
        would_run: Nodes that would run, and nodes that may (behind lazy inputs).
        unneeded: Nodes that stand behind known results only.
    """

    cached: list[str]
    would_run: list[str]
    unneeded: list[str]


async def plan_prompt(
    prompt: dict[str, Any],
    outputs: Sequence[str],
    registry: Registry,
    cache: ResultCache,
    extra_data: Mapping[str, Any] | None = None,
    privacy: Privacy | None = None,
) -> Plan:
    """Plans a validated prompt; may be called while another one runs.

    Args:
        outputs: Output nodes to run.
        cache: The executor's results; only looked at.
        extra_data: What would be posted with the prompt.
        privacy: The executor's knowledge of whose results are whose.
    """
    graph, specs = DynamicPrompt(prompt), SpecTable(registry)
    needed = needed_nodes(graph, outputs)
    changed: dict[str, Any] = {}
    turns = Turns()
    for node_id in needed:
        await note_change(node_id, graph, specs, dict(extra_data or {}), changed)
        if turns.due:
            await turns.give()
    signatures = Signatures(graph, specs, changed, privacy)
    for node_id in reversed(needed):  # sources first, or one would sign all the others at once
        signatures.get(node_id)
        if turns.due:
            await turns.give()
    cached = [node_id for node_id in needed if cache.has(signatures.get(node_id))]
    known, would_run = set(cached), []
    reached, stack = set(outputs), list(outputs)
    while stack:
        node_id = stack.pop()
        if node_id in known:
            continue
        would_run.append(node_id)
        for source in linked_nodes(prompt[node_id].get("inputs") or {}):
            if source in needed and source not in reached:
                reached.add(source)
                stack.append(source)
    done = known | set(would_run)
    return Plan(cached, would_run[::-1], [name for name in needed if name not in done])
