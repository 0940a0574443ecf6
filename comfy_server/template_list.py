"""Which workflow templates the page lists: those whose nodes are all here.

The template packages are newer than the interface this server speaks, and most of what they hold
calls paid services. A template that opens as red boxes teaches nobody anything, so the page's index
names only those that this server can run; a pack that brings the nodes brings the templates back.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

INDEX = re.compile(r"index(\.[A-Za-z-]+)?\.json")  # one for each language
OF_THE_PAGE = frozenset({"MarkdownNote", "Note", "PrimitiveNode", "Reroute"})

FindFile = Callable[[str], Path | None]


class TemplateList:
    """Reads each template once; any thread may ask."""

    def __init__(self, find_file: FindFile) -> None:
        """`find_file` gives the file of a relative path below the templates."""
        self._find_file = find_file
        self._needed: dict[str, frozenset[str] | None] = {}
        self._has_told = False

    def index(self, path: Path, known: Container[str]) -> list[dict[str, Any]] | None:
        """The groups of an index with the templates whose nodes are all `known`.

        Returns:
            The groups that are not empty then; None when the file holds something else.
        """
        groups = _read(path)
        if not isinstance(groups, list) or not all(map(_is_group, groups)):
            return None
        left_out: list[str] = []
        shown = []
        for group in groups:
            usable = [row for row in group["templates"] if self._runs(row, known, left_out)]
            if usable:
                shown.append({**group, "templates": usable})
        self._tell(left_out, sum(len(group["templates"]) for group in groups))
        return shown

    def _runs(self, row: Mapping[str, Any], known: Container[str], left_out: list[str]) -> bool:
        name = str(row.get("name"))
        if name not in self._needed:
            path = self._find_file(f"{name}.json")
            self._needed[name] = None if path is None else nodes_needed(_read(path))
        needed = self._needed[name]
        if needed is not None and all(kind in known for kind in needed):
            return True
        left_out.append(name)
        return False

    def _tell(self, left_out: list[str], total: int) -> None:
        if left_out and not self._has_told:
            self._has_told = True
            logger.info(
                "%d of %d workflow templates are not listed: they need nodes that are not here, "
                "most of them of paid services or of newer versions",
                len(left_out), total,
            )  # fmt: skip


def nodes_needed(workflow: Any) -> frozenset[str] | None:
    """Class names that a workflow of the page's form needs a server to know; None if it is none."""
    if not isinstance(workflow, dict) or not isinstance(workflow.get("nodes"), list):
        return None
    definitions = workflow.get("definitions")
    inner = definitions.get("subgraphs") if isinstance(definitions, dict) else None
    subgraphs = _objects(inner)
    kinds = {
        node["type"]
        for graph in (workflow, *subgraphs)
        for node in _objects(graph.get("nodes"))
        if isinstance(node.get("type"), str)
    }
    own = {graph["id"] for graph in subgraphs if isinstance(graph.get("id"), str)}
    return frozenset(kinds - OF_THE_PAGE - own)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _is_group(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("templates"), list)
        and all(isinstance(row, dict) for row in value["templates"])
    )


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("the workflow template %s cannot be read: %s", path, error)
        return None
