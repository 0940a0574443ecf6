"""Closed sets of words that input declarations use: displays, upload kinds, folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of `values` without the entries that are None: an unset option is not sent at all."""
    return {key: value for key, value in values.items() if value is not None}


class Word(str, Enum):
    """An enumeration whose members are the strings that go over the wire."""

    def __str__(self) -> str:
        return str(self.value)


class FolderType(Word):
    """The three folders a stored file can lie in."""

    input = "input"
    output = "output"
    temp = "temp"


class UploadType(Word):
    """What a combo's upload button accepts; the value is the option the editor reads."""

    image = "image_upload"
    audio = "audio_upload"
    video = "video_upload"
    model = "file_upload"


class NumberDisplay(Word):
    """How the editor draws a number."""

    number = "number"
    slider = "slider"
    gradient_slider = "gradientslider"


class ControlAfterGenerate(Word):
    """What the editor does to a value after each queued run."""

    fixed = "fixed"
    increment = "increment"
    decrement = "decrement"
    randomize = "randomize"


@dataclass
class RemoteOptions:
    """Where the editor fetches the options of a combo from.

    Attributes:
        route: Path on this server (no prefix is added) or URL that answers with a JSON list.
        refresh_button: Whether a button to fetch again is shown.
        control_after_refresh: Which option is selected after a refresh.
        timeout: Milliseconds until a request counts as failed.
        max_retries: How often a failed request is repeated.
        refresh: Milliseconds after which the list is fetched again; None or 0: never.
    """

    route: str
    refresh_button: bool
    control_after_refresh: Literal["first", "last"] = "first"
    timeout: int | None = None
    max_retries: int | None = None
    refresh: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """The wire form, without unset entries."""
        return without_none(
            {
                "route": self.route,
                "refresh_button": self.refresh_button,
                "control_after_refresh": self.control_after_refresh,
                "timeout": self.timeout,
                "max_retries": self.max_retries,
                "refresh": self.refresh,
            }
        )


def word(value: Any) -> Any:
    """The plain value of an enumeration member; anything else unchanged."""
    return value.value if isinstance(value, Enum) else value
