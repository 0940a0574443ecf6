"""What a node returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class UiContent(Protocol):
    """Something to show in the editor: anything with a dictionary form, values being lists."""

    def as_dict(self) -> dict[str, Any]: ...


class NodeOutput:
    """The values a node returns, and what else comes of running it.

    Args:
        *args: One value per output.
        ui: What the editor shows on the node: an object of `comfy_api.latest.ui`, or a dictionary.
        expand: A graph in prompt form that runs in the node's place; links in `args` point into it.
        block_execution: Stops everything downstream and shows this message; an empty text says
            nothing.
    """

    def __init__(
        self,
        *args: Any,
        ui: UiContent | Mapping[str, Any] | None = None,
        expand: Mapping[str, Any] | None = None,
        block_execution: str | None = None,
    ) -> None:
        self.args = args
        self.ui = ui
        self.expand = expand
        self.block_execution = block_execution

    @property
    def result(self) -> tuple[Any, ...] | None:
        """The values, or None if the node returned none."""
        return self.args or None

    def __getitem__(self, index: int) -> Any:
        return self.args[index]

    def __len__(self) -> int:
        return len(self.args)

    def __bool__(self) -> bool:
        return True

    def ui_dict(self) -> dict[str, Any] | None:
        """What the editor shows, as a plain dictionary."""
        if self.ui is None:
            return None
        return dict(self.ui.as_dict() if isinstance(self.ui, UiContent) else self.ui)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NodeOutput:
        """A classic node's return dictionary (`result`, `ui`, `expand`) in this form."""
        result = data.get("result")
        args = tuple(result) if isinstance(result, (tuple, list)) else ()
        if result is not None and not isinstance(result, (tuple, list)):
            args = (result,)
        return cls(
            *args,
            ui=data.get("ui"),
            expand=data.get("expand"),
            block_execution=data.get("block_execution"),
        )
