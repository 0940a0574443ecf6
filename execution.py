"""Running prompts, under the names node packages import and replace."""

from __future__ import annotations

import importlib
from typing import Any

from comfy.public import write_through
from comfy_execution.caching import CacheSet, CacheType
from comfy_execution.calls import _async_map_node_over_list, get_output_data
from comfy_execution.executor import PromptExecutor, execute
from comfy_execution.failures import full_type_name
from comfy_execution.graph import DynamicPrompt, ExecutionList, get_input_info
from comfy_execution.graph_utils import ExecutionBlocker, GraphBuilder, is_link
from comfy_execution.items import SENSITIVE_EXTRA_DATA_KEYS, ExecutionStatus
from comfy_execution.progress import get_progress_state
from comfy_execution.queue import MAXIMUM_HISTORY_SIZE, PromptQueue
from comfy_execution.run import ExecutionResult
from comfy_execution.types import accepts as validate_node_input
from comfy_execution.validation import validate_prompt

__all__ = [
    "MAXIMUM_HISTORY_SIZE",
    "SENSITIVE_EXTRA_DATA_KEYS",
    "CacheSet",
    "CacheType",
    "DynamicPrompt",
    "ExecutionBlocker",
    "ExecutionList",
    "ExecutionResult",
    "ExecutionStatus",
    "GraphBuilder",
    "PromptExecutor",
    "PromptQueue",
    "_async_map_node_over_list",
    "execute",
    "full_type_name",
    "get_input_info",
    "get_output_data",
    "get_progress_state",
    "is_link",
    "validate_node_input",
    "validate_prompt",
]


def __getattr__(name: str) -> Any:
    """The modules that packages reach through this one, imported when they are asked for."""
    if name in ("nodes", "server"):
        return importlib.import_module(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


write_through(
    __name__,
    SENSITIVE_EXTRA_DATA_KEYS="comfy_execution.items",
    MAXIMUM_HISTORY_SIZE="comfy_execution.queue",
)
