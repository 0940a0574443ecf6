"""What nodes show in the editor: each class becomes one dictionary of lists."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from comfy_api.latest.io.options import FolderType


class UiOutput(ABC):
    """Something a node shows; `as_dict` is the form that goes to the editor and to history."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Keys as the editor knows them, each with a list."""


class SavedResult(dict[str, Any]):
    """One stored file: name, sub-folder and which of the three folders it lies in."""

    def __init__(self, filename: str, subfolder: str, type: FolderType | str) -> None:
        super().__init__(filename=filename, subfolder=subfolder, type=FolderType(type).value)

    @property
    def filename(self) -> str:
        """Name of the file without folders."""
        return str(self["filename"])

    @property
    def subfolder(self) -> str:
        """Path below the folder; empty for none."""
        return str(self["subfolder"])

    @property
    def type(self) -> FolderType:
        """The folder."""
        return FolderType(self["type"])


class SavedImages(UiOutput):
    """Stored pictures."""

    def __init__(self, results: Sequence[SavedResult], is_animated: bool = False) -> None:
        self.results = list(results)
        self.is_animated = is_animated

    def as_dict(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"images": self.results}
        if self.is_animated:
            shown["animated"] = [True]
        return shown


class SavedAudios(UiOutput):
    """Stored sounds."""

    def __init__(self, results: Sequence[SavedResult]) -> None:
        self.results = list(results)

    def as_dict(self) -> dict[str, Any]:
        return {"audio": self.results}


class PreviewVideo(UiOutput):
    """Stored videos."""

    def __init__(self, values: Sequence[SavedResult], **kwargs: Any) -> None:
        self.values = list(values)
        self.more = kwargs

    def as_dict(self) -> dict[str, Any]:
        return {"images": self.values, "animated": [True]}


class PreviewText(UiOutput):
    """A text."""

    def __init__(self, value: str, **kwargs: Any) -> None:
        self.value = value
        self.more = kwargs

    def as_dict(self) -> dict[str, Any]:
        return {"text": [self.value]}
