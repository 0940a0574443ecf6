"""Node instances that are kept between prompts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class ObjectCache:
    """Node instances, kept for the same node id and class so that nodes can keep state."""

    def __init__(self) -> None:
        self._instances: dict[tuple[str, str], tuple[Any, Any, str]] = {}

    def get(self, node_id: str, class_type: str, node_class: Any) -> Any | None:
        """The instance, unless the class has been replaced since."""
        found = self._instances.get((node_id, class_type))
        return found[1] if found is not None and found[0] is node_class else None

    def put(
        self, node_id: str, class_type: str, node_class: Any, instance: Any, owner: str
    ) -> None:
        """Keeps an instance; ``owner`` is the posted node it belongs to."""
        self._instances[node_id, class_type] = (node_class, instance, owner)

    def keep_only(self, posted: Collection[str]) -> None:
        """Drops instances whose posted node is not among these."""
        for key, (_, _, owner) in list(self._instances.items()):
            if owner not in posted:
                del self._instances[key]

    def clear(self) -> None:
        """Drops all instances."""
        self._instances.clear()
