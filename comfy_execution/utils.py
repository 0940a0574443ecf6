"""Public names of comfy_execution.context."""

from comfy_execution.context import ExecutionContext, executing, get_executing_context

CurrentNodeContext = executing

__all__ = ["CurrentNodeContext", "ExecutionContext", "executing", "get_executing_context"]
