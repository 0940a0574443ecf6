"""Asking node classes what their results depend on beside their inputs (``IS_CHANGED``)."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Any

from comfy_execution import calls
from comfy_execution.breaker import CallGuard
from comfy_execution.calls import Call
from comfy_execution.graph import DynamicPrompt
from comfy_execution.graph_utils import ExecutionBlocker
from comfy_execution.inputs import gather_inputs, hidden_values
from comfy_execution.registry import SpecTable
from comfy_execution.spec import NodeSpec

logger = logging.getLogger(__name__)


async def note_change(
    node_id: str,
    prompt: DynamicPrompt,
    specs: SpecTable,
    extra_data: Mapping[str, Any],
    changed: dict[str, Any],
    guard: CallGuard | None = None,
) -> None:
    """Asks the node's class, if it has an opinion, what its result depends on beside its inputs.

    Args:
        guard: For a check that is to be broken out of when its prompt is cancelled.
    """
    node = prompt.get_node(node_id)
    spec = specs[node["class_type"]]
    if spec.fingerprint is None:
        return
    try:
        changed[node_id] = await _fingerprint(node_id, node, spec, prompt, extra_data, guard)
    except Exception:  # foreign code; the reference runs such a node every time, and so do we
        logger.warning(
            "%s.%s of node %s failed; the node will run", spec.class_type, spec.fingerprint,
            node_id, exc_info=True,
        )  # fmt: skip
        changed[node_id] = math.nan


async def _fingerprint(
    node_id: str,
    node: Mapping[str, Any],
    spec: NodeSpec,
    prompt: DynamicPrompt,
    extra_data: Mapping[str, Any],
    guard: CallGuard | None,
) -> list[Any]:
    assert spec.fingerprint is not None
    values = gather_inputs(node_id, node, spec, lambda _: None).values  # constants only
    hidden = hidden_values(spec, node_id, prompt, extra_data)
    bound = spec.bind(spec.node_class, hidden, node.get("inputs") or {})
    if spec.hidden_as_arguments:
        values = values | {name: [value] for name, value in hidden.items()}
    answers = await calls._async_map_node_over_list(
        "", node_id, bound.target, values, spec.fingerprint, False, None, None,
        Call(spec, bound, guard),
    )  # fmt: skip
    done = [await a if isinstance(a, asyncio.Future) else a for a in answers]
    return [None if isinstance(answer, ExecutionBlocker) else answer for answer in done]
