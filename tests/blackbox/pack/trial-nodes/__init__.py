"""Nodes that the black-box tests are made of: one class for each corner of the node contract.

Classic nodes stand in a table, as most packs have it; some schema nodes are put into the same
table, which the host must accept too. A second pack, `trial_schema`, uses `comfy_entrypoint`.
"""

from __future__ import annotations

from typing import Any

from . import (
    asynchronous,
    changes,
    checks,
    expansion,
    hostile,
    lazy,
    lists,
    loops,
    open_ended,
    progress,
    schema,
    smart,
    values,
)

MODULES = (
    asynchronous, changes, checks, expansion, hostile, lazy, lists, loops, open_ended, progress,
    schema, smart, values,
)  # fmt: skip

NODE_CLASS_MAPPINGS: dict[str, Any] = {
    f"Trial{kind.__name__}": kind for module in MODULES for kind in module.NODES
}
NODE_DISPLAY_NAME_MAPPINGS = {name: f"Trial: {name[5:]}" for name in NODE_CLASS_MAPPINGS}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
