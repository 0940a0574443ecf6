"""Loads the optional built-in nodes of `comfy_extras`.

One that fails to load is logged and left out, like a pack: a missing codec must not cost the rest.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from comfy_extras.modules import MODULES
from comfy_nodes.custom_packs import offered_nodes

logger = logging.getLogger(__name__)


async def init_builtin_extra_nodes(
    add_nodes: Callable[[Mapping[str, Any], Mapping[str, str]], None],
    modules: Iterable[str] = MODULES,
) -> list[str]:
    """Loads the modules and adds their nodes.

    Args:
        add_nodes: Takes node classes and display names into the node table.
        modules: Names below `comfy_extras`.

    Returns:
        Names of modules that failed.
    """
    failed = []
    for name in modules:
        dotted = f"comfy_extras.{name}"
        try:
            nodes, titles = await offered_nodes(importlib.import_module(dotted))
        except Exception:
            logger.exception("cannot load %s; its nodes are missing", dotted)
            failed.append(name)
            continue
        for node in (nodes or {}).values():
            node.RELATIVE_PYTHON_MODULE = dotted
        add_nodes(nodes or {}, titles)
    return failed
