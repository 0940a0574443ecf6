"""Node classes by name, adapted on lookup."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from comfy_execution.spec import NodeSpec, spec_from_class

logger = logging.getLogger(__name__)


class Registry(Protocol):
    """Where validation and execution find node classes."""

    def get(self, class_type: str) -> NodeSpec | None: ...


class NodeRegistry:
    """A live view of the public table of node classes, which packages change in place."""

    def __init__(
        self, classes: Mapping[str, Any], display_names: Mapping[str, str] | None = None
    ) -> None:
        self.classes = classes
        self.display_names = display_names if display_names is not None else {}

    def get(self, class_type: str) -> NodeSpec | None:
        """A fresh spec for the class of this name; None if there is none."""
        node_class = self.classes.get(class_type)
        return spec_from_class(class_type, node_class) if node_class is not None else None

    def display_name(self, class_type: str) -> str | None:
        """The name a package gave the class for the editor."""
        return self.display_names.get(class_type)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.classes))

    def __len__(self) -> int:
        return len(self.classes)


class SpecTable:
    """The specs of one prompt: each class is looked up once, so all its nodes see the same."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._specs: dict[str, NodeSpec] = {}

    def get(self, class_type: str) -> NodeSpec | None:
        """The spec, or None for an unknown class."""
        spec = self._specs.get(class_type)
        if spec is None:
            spec = self._registry.get(class_type)
            if spec is not None:
                self._specs[class_type] = spec
        return spec

    def __getitem__(self, class_type: str) -> NodeSpec:
        spec = self.get(class_type)
        if spec is None:
            raise UnknownNodeError(class_type)
        return spec


class UnknownNodeError(KeyError):
    """No node class has this name."""

    def __init__(self, class_type: str) -> None:
        super().__init__(class_type)
        self.class_type = class_type

    def __str__(self) -> str:
        return (
            f"node class {self.class_type!r} does not exist; install the package that provides "
            "it, or correct class_type"
        )


_installed: list[Registry] = []


def install(registry: Registry) -> None:
    """Sets the registry behind the public functions that take none, such as validate_prompt."""
    _installed[:] = [registry]


def installed() -> Registry:
    """The registry main installed.

    Raises:
        RuntimeError: nobody installed one.
    """
    if not _installed:
        raise RuntimeError("no node registry; main calls comfy_execution.registry.install first")
    return _installed[0]
