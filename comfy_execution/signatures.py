"""Signatures: what a node's result depends on, as a digest.

A signature covers the class, the constant inputs, what the class says about change
(``IS_CHANGED``), the node id where the class asks for it, the user where the result is private,
and, through links, the signatures of the ancestors. Equal signatures mean equal results. Whatever
cannot be compared (NaN, live objects) makes a signature that equals no other.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from comfy_execution.graph import DynamicPrompt
from comfy_execution.graph_utils import is_link
from comfy_execution.privacy import Privacy
from comfy_execution.registry import SpecTable

_fresh = itertools.count()

_MISSING_SOURCE = "?"


@dataclass(frozen=True, slots=True)
class Parts:
    """What went into a signature: kept to explain why a node ran again."""

    class_type: str
    changed: str
    inputs: dict[str, str]


class Signatures:
    """Signatures of the nodes of one prompt, computed once each.

    Args:
        changed: Node id -> what its ``IS_CHANGED`` gave; nodes without are absent.
        privacy: Which classes' results are not shared among users; by default all are.
    """

    def __init__(
        self,
        prompt: DynamicPrompt,
        specs: SpecTable,
        changed: Mapping[str, Any],
        privacy: Privacy | None = None,
    ) -> None:
        self._prompt = prompt
        self._specs = specs
        self._changed = changed
        self._privacy = privacy or Privacy()
        self._digests: dict[str, str] = {}
        self.parts: dict[str, Parts] = {}

    def get(self, node_id: str) -> str:
        """The signature of a node; its ancestors' are computed on the way, without recursion."""
        found = self._digests.get(node_id)
        if found is not None:
            return found
        for current in self._ancestors_first(node_id):
            if current not in self._digests:
                self._digests[current] = self._compute(current)
        return self._digests[node_id]

    def forget(self) -> None:
        """Computes every signature anew: a class has turned out to be private."""
        self._digests.clear()

    def known(self) -> Iterable[str]:
        """All signatures computed so far."""
        return self._digests.values()

    def _ancestors_first(self, node_id: str) -> Iterable[str]:
        """Unsigned ancestors of a node and the node, sources before consumers; cycles are cut."""
        order: list[str] = []
        entered: set[str] = set()
        stack = [(node_id, False)]
        while stack:
            current, done = stack.pop()
            if done:
                order.append(current)
                continue
            if current in entered or current in self._digests:
                continue
            entered.add(current)
            stack.append((current, True))
            for value in (self._prompt.get_node(current).get("inputs") or {}).values():
                if is_link(value) and value[0] not in entered and self._prompt.has_node(value[0]):
                    stack.append((value[0], False))
        return order

    def _compute(self, node_id: str) -> str:
        node = self._prompt.get_node(node_id)
        class_type = node["class_type"]
        spec = self._specs[class_type]
        inputs = {}
        for name, value in (node.get("inputs") or {}).items():
            if is_link(value):
                inputs[name] = f"{self._digests.get(value[0], _MISSING_SOURCE)}@{value[1]}"
            else:
                inputs[name] = encode(value)
        changed = encode(self._changed[node_id]) if node_id in self._changed else ""
        self.parts[node_id] = Parts(class_type, changed, inputs)
        owner = node_id if spec.takes_unique_id or not spec.is_shareable else ""
        user = self._privacy.owner_of(class_type)
        text = "\x1f".join(
            (class_type, changed, owner, user, *map("\x1e".join, sorted(inputs.items())))
        )
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def encode(value: Any) -> str:
    """Text that is equal for equal values of equal type, and unique for what has no equal."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return repr(value)
    if isinstance(value, float):
        return f"!{next(_fresh)}" if math.isnan(value) else repr(float(value))
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(encode, value))}]"
    if isinstance(value, Mapping):
        items = sorted((encode(key), encode(item)) for key, item in value.items())
        return f"{{{','.join(map(':'.join, items))}}}"
    if isinstance(value, (str, bytes, int)):
        return repr(value)
    return f"!{next(_fresh)}"


def explain(before: Parts | None, after: Parts) -> str:
    """Why a node ran, in words: what differs from the last time this node id was signed."""
    if before is None or before.class_type != after.class_type:
        return "not run before"
    names = [*after.inputs, *(name for name in before.inputs if name not in after.inputs)]
    differing = [name for name in names if before.inputs.get(name) != after.inputs.get(name)]
    if differing:
        return f"changed input: {', '.join(differing)}"
    if before.changed != after.changed:
        return "the node reports a change (IS_CHANGED)"
    return "its result was not kept"
