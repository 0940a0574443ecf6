"""Loops in graphs: where one begins, what lies in it, and the graph of its next round.

A loop is what leads from a Start Loop node to an End Loop node. The posted nodes are its first
round; the End Loop node puts a turn in its place, and each turn but the last a graph with copies of
the nodes between both, and the next turn. A turn does not run, and nothing comes out of the loop,
where the round before it is blocked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from comfy_execution.graph_utils import GraphBuilder, Link, is_link

START, ROUND, END, TURN, JOIN = "StartLoop", "LoopRound", "EndLoop", "LoopTurn", "CreateList"
BEGINNING = "initial_iteration_value"
FROM_ROUND_BEFORE = "value"  # of a later round: leads out of it, into the one before


def links_of(prompt: Any, name: str) -> Iterator[tuple[str, Link]]:
    """The connected inputs of a node."""
    for key, value in prompt.get_node(name)["inputs"].items():
        if is_link(value):
            yield key, value


def before(prompt: Any, name: str, stop: str | None = None) -> list[str]:
    """All nodes that lead to `name`, but for earlier rounds and for what leads to `stop`."""
    found: dict[str, None] = {}
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current == stop:
            continue
        is_round = prompt.get_node(current)["class_type"] == ROUND
        for key, (source, _) in links_of(prompt, current):
            if source not in found and not (is_round and key == FROM_ROUND_BEFORE):
                found[source] = None
                waiting.append(source)
    return list(found)


def start_of(prompt: Any, end: str, known: dict[str, str] | None = None) -> str:
    """The node that begins the loop which `end` ends: of those before it the innermost one whose
    loop has not ended yet.

    Args:
        known: Starts by end, of the loops that were looked at already; found ones are added.
    Raises:
        ValueError: There is none, or more than one.
    """
    kinds = {name: prompt.get_node(name)["class_type"] for name in before(prompt, end)}
    known = {} if known is None else known
    ended = set()
    for name, kind in kinds.items():
        if kind == END:
            ended.add(known.get(name) or start_of(prompt, name, known))
    begun = [name for name, kind in kinds.items() if kind in (START, ROUND) and name not in ended]
    outer = {other for name in begun for other in before(prompt, name)}
    innermost = [name for name in begun if name not in outer]
    if len(innermost) != 1:
        shown = ", ".join(sorted(map(prompt.get_display_node_id, innermost))) or "none"
        raise ValueError(
            "output_value, next_iteration_value, terminations: expected what comes from one Start "
            f"Loop node whose loop no other End Loop node ends, found {len(innermost)} ({shown}); "
            "connect the end of its loop here, and its parent_iteration where one loop is in "
            "another"
        )
    known[end] = innermost[0]
    return innermost[0]


def body_of(prompt: Any, start: str, end: str) -> list[str]:
    """The nodes between both: they lead to `end`, and `start` leads to them."""
    followers: dict[str, list[str]] = {}
    for name in before(prompt, end, stop=start):
        if name != start:
            for _, (source, _) in links_of(prompt, name):
                followers.setdefault(source, []).append(name)
    reached: dict[str, None] = {}
    waiting = [start]
    while waiting:
        for name in followers.get(waiting.pop(), ()):
            if name not in reached:
                reached[name] = None
                waiting.append(name)
    return list(reached)


def first_turn(prompt: Any, end: str) -> tuple[dict[str, Any], Link]:
    """The graph that takes the place of an End Loop node, and where its result is."""
    start = start_of(prompt, end)
    graph = GraphBuilder()
    told = {**prompt.get_node(end)["inputs"], "is_last": [start, 2], "turn": 0}
    turn = graph.node(TURN, id="turn", **told, start=start, end=end)
    return graph.finalize(), turn.out(0)


def next_turn(
    prompt: Any, name: str, posted: tuple[str, str], number: int, gathers: bool
) -> tuple[dict[str, Any], Link]:
    """The graph of the round after the one that turn `name` ends, and where its result is.

    Args:
        posted: Where the loop starts and ends: the posted nodes (or those that an outer loop
            copied).
        number: Of the next round, from 1.
        gathers: Whether what rounds give is kept until the end.
    """
    start, end = posted
    graph = GraphBuilder()
    own = prompt.get_node(name)["inputs"]
    copies = {start: graph.node(ROUND, id="start")}
    for inner in body_of(prompt, start, end):
        copies[inner] = graph.node(prompt.get_node(inner)["class_type"], id=f"body {inner}")
    for original, copy in copies.items():
        copy.set_override_display_id(prompt.get_display_node_id(original))

    def here(value: Any) -> Any:
        """An input of the first round, in this one."""
        is_inner = is_link(value) and value[0] in copies
        return copies[value[0]].out(value[1]) if is_inner else value

    for original, copy in copies.items():
        if original != start:
            copy.inputs = {k: here(v) for k, v in prompt.get_node(original)["inputs"].items()}
    begun = dict(prompt.get_node(start)["inputs"])
    kept = begun.pop(BEGINNING, None)
    value = own.get("next_iteration_value", begun.pop(FROM_ROUND_BEFORE, kept))
    copies[start].inputs = begun | {"turn": number}
    copies[start].set_input(FROM_ROUND_BEFORE, value)
    told = {key: here(value) for key, value in prompt.get_node(end)["inputs"].items()}
    turn = graph.node(TURN, id="turn", **told, start=start, end=end, turn=number)
    turn.set_input("is_last", copies[start].out(2))
    turn.set_input("earlier", _gathered(graph, own) if gathers else None)
    return graph.finalize(), turn.out(0)


def _gathered(graph: GraphBuilder, own: dict[str, Any]) -> Any:
    """What all rounds so far gave, as a link."""
    values = [own[key] for key in ("earlier", "output_value") if key in own]
    if len(values) < 2:
        return values[0] if values else None
    slots = {f"inputs.input{place}": value for place, value in enumerate(values)}
    return graph.node(JOIN, id="gathered", **slots).out(0)
