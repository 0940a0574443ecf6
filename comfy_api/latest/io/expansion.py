"""Dynamic inputs between their two forms: dotted names in prompts, nested dictionaries in nodes.

`Expansion` collects, for the inputs one prompt gives to one node, the plain inputs that the
dynamic ones stand for. The executor handles those like any others; just before the node runs,
`nest` folds their values into the dictionaries that `execute` expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Path = tuple[str, ...]


class Expansion:
    """The inputs of one node as one prompt uses them.

    Attributes:
        live: Names in the prompt, with literal values or links `[node_id, output_index]`.
        sections: `required` and `optional`: dotted name -> (type name, options).
        paths: Dotted name -> keys leading to the value in nested form; plain inputs are absent.
        containers: Dictionaries that exist in nested form even when nothing is in them.
    """

    def __init__(self, live: Mapping[str, Any]) -> None:
        self.live = live
        self.sections: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {"required": {}}
        self.paths: dict[str, Path] = {}
        self.containers: list[Path] = []

    def add(
        self, path: Path, io_type: str, options: dict[str, Any], optional: bool, inner: Path = ()
    ) -> None:
        """Adds a plain input.

        Args:
            path: Parts of the dotted name.
            io_type, options: Its declaration.
            optional: Whether the prompt may leave it out.
            inner: Further keys below the dotted name in nested form.
        """
        name = ".".join(path)
        section = self.sections.setdefault("optional" if optional else "required", {})
        section[name] = (io_type, options)
        if len(path) > 1 or inner:
            self.paths[name] = path + inner

    def nest(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values by dotted name, folded into nested dictionaries; `values` is not modified."""
        if not self.paths and not self.containers:
            return dict(values)
        nested: dict[str, Any] = {}
        for container in self.containers:
            _descend(nested, container)
        for name, value in values.items():
            path = self.paths.get(name, (name,))
            _descend(nested, path[:-1])[path[-1]] = value
        return nested


def _descend(tree: dict[str, Any], path: Path) -> dict[str, Any]:
    """The dictionary at `path` below `tree`, made where it is missing."""
    for key in path:
        tree = tree.setdefault(key, {})
    return tree
