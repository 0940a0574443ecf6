"""Socket types that the editor draws as widgets: numbers, texts, switches, choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from comfy_api.latest.io import base
from comfy_api.latest.io.base import ComfyTypeIO, WidgetInput, comfytype
from comfy_api.latest.io.options import (
    ControlAfterGenerate,
    FolderType,
    NumberDisplay,
    RemoteOptions,
    UploadType,
    without_none,
    word,
)

Choices = Sequence[str] | Sequence[int] | type[Enum]


@comfytype("BOOLEAN")
class Boolean(ComfyTypeIO):
    """True or false."""

    Type = bool

    class Input(WidgetInput):
        """A switch; `label_on` and `label_off` name its two states."""

        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            default: bool | None = None,
            label_on: str | None = None,
            label_off: str | None = None,
            socketless: bool | None = None,
            force_input: bool | None = None,
            extra_dict: Mapping[str, Any] | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ) -> None:
            super().__init__(
                id, display_name, optional, tooltip, lazy, default, socketless, None, force_input,
                extra_dict, raw_link, advanced,
            )  # fmt: skip
            self.label_on = label_on
            self.label_off = label_off

        def as_dict(self) -> dict[str, Any]:
            labels = {"label_on": self.label_on, "label_off": self.label_off}
            return super().as_dict() | without_none(labels)


@comfytype("INT")
class Int(ComfyTypeIO):
    """A whole number."""

    Type = int

    class Input(WidgetInput):
        """A whole number between `min` and `max`; the editor moves it by `step`."""

        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            default: int | None = None,
            min: int | None = None,
            max: int | None = None,
            step: int | None = None,
            control_after_generate: bool | ControlAfterGenerate | None = None,
            display_mode: NumberDisplay | None = None,
            socketless: bool | None = None,
            force_input: bool | None = None,
            extra_dict: Mapping[str, Any] | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ) -> None:
            super().__init__(
                id, display_name, optional, tooltip, lazy, default, socketless, None, force_input,
                extra_dict, raw_link, advanced,
            )  # fmt: skip
            self.min = min
            self.max = max
            self.step = step
            self.control_after_generate = control_after_generate
            self.display_mode = display_mode

        def as_dict(self) -> dict[str, Any]:
            return super().as_dict() | without_none(
                {
                    "min": self.min,
                    "max": self.max,
                    "step": self.step,
                    "control_after_generate": word(self.control_after_generate),
                    "display": word(self.display_mode),
                }
            )


@comfytype("FLOAT")
class Float(ComfyTypeIO):
    """A number."""

    Type = float

    class Input(WidgetInput):
        """A number between `min` and `max`; the editor rounds it to multiples of `round`."""

        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            default: float | None = None,
            min: float | None = None,
            max: float | None = None,
            step: float | None = None,
            round: float | None = None,
            display_mode: NumberDisplay | None = None,
            gradient_stops: Sequence[Mapping[str, Any]] | None = None,
            socketless: bool | None = None,
            force_input: bool | None = None,
            extra_dict: Mapping[str, Any] | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ) -> None:
            super().__init__(
                id, display_name, optional, tooltip, lazy, default, socketless, None, force_input,
                extra_dict, raw_link, advanced,
            )  # fmt: skip
            self.min = min
            self.max = max
            self.step = step
            self.round = round
            self.display_mode = display_mode
            self.gradient_stops = gradient_stops

        def as_dict(self) -> dict[str, Any]:
            return super().as_dict() | without_none(
                {
                    "min": self.min,
                    "max": self.max,
                    "step": self.step,
                    "round": self.round,
                    "display": word(self.display_mode),
                    "gradient_stops": self.gradient_stops,
                }
            )


@comfytype("STRING")
class String(ComfyTypeIO):
    """A text."""

    Type = str

    class Input(WidgetInput):
        """A text, on one line or several; `dynamic_prompts` lets the editor expand `{a|b}`."""

        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            multiline: bool = False,
            placeholder: str | None = None,
            default: str | None = None,
            dynamic_prompts: bool | None = None,
            socketless: bool | None = None,
            force_input: bool | None = None,
            extra_dict: Mapping[str, Any] | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ) -> None:
            super().__init__(
                id, display_name, optional, tooltip, lazy, default, socketless, None, force_input,
                extra_dict, raw_link, advanced,
            )  # fmt: skip
            self.multiline = multiline
            self.placeholder = placeholder
            self.dynamic_prompts = dynamic_prompts

        def as_dict(self) -> dict[str, Any]:
            return super().as_dict() | without_none(
                {
                    "multiline": self.multiline,
                    "placeholder": self.placeholder,
                    "dynamicPrompts": self.dynamic_prompts,
                }
            )


def _choice_values(options: Choices | None) -> list[Any]:
    """The plain values to choose from; a class of enumeration members stands for their values."""
    if options is None:
        return []
    if isinstance(options, type):
        return [member.value for member in options]
    return [word(option) for option in options]


@comfytype("COMBO")
class Combo(ComfyTypeIO):
    """One of a list of values."""

    Type = str

    class Input(WidgetInput):
        """A choice among `options`, with an upload button or a remote list if asked for."""

        multiselect = False

        def __init__(
            self,
            id: str,
            options: Choices | None = None,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            default: str | int | Enum | None = None,
            control_after_generate: bool | ControlAfterGenerate | None = None,
            upload: UploadType | None = None,
            image_folder: FolderType | None = None,
            remote: RemoteOptions | None = None,
            socketless: bool | None = None,
            extra_dict: Mapping[str, Any] | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ) -> None:
            super().__init__(
                id, display_name, optional, tooltip, lazy, word(default), socketless, None, None,
                extra_dict, raw_link, advanced,
            )  # fmt: skip
            self.options = _choice_values(options)
            self.control_after_generate = control_after_generate
            self.upload = upload
            self.image_folder = image_folder
            self.remote = remote

        def as_dict(self) -> dict[str, Any]:
            return super().as_dict() | without_none(
                {
                    "multiselect": self.multiselect,
                    "options": self.options,
                    "control_after_generate": word(self.control_after_generate),
                    **({word(self.upload): True} if self.upload is not None else {}),
                    "image_folder": word(self.image_folder),
                    "remote": self.remote.as_dict() if self.remote else None,
                }
            )

    class Output(base.Output):
        """A value out of `options`."""

        def __init__(
            self,
            id: str | None = None,
            display_name: str | None = None,
            options: Choices | None = None,
            tooltip: str | None = None,
            is_output_list: bool | None = False,
        ) -> None:
            super().__init__(id, display_name, tooltip, is_output_list)
            self.options = _choice_values(options)


@comfytype("COMBO")
class MultiCombo(ComfyTypeIO):
    """Several of a list of values."""

    Type = list[str]

    class Input(Combo.Input):
        """A choice of any number of `options`; `chip` draws the chosen ones as chips."""

        multiselect = True

        def __init__(
            self,
            id: str,
            options: Choices,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            lazy: bool | None = None,
            default: list[str] | None = None,
            placeholder: str | None = None,
            chip: bool | None = None,
            control_after_generate: bool | ControlAfterGenerate | None = None,
            socketless: bool | None = None,
            extra_dict: Mapping[str, Any] | None = None,
            raw_link: bool | None = None,
            advanced: bool | None = None,
        ) -> None:
            super().__init__(
                id, options, display_name, optional, tooltip, lazy, None, control_after_generate,
                socketless=socketless, extra_dict=extra_dict, raw_link=raw_link, advanced=advanced,
            )  # fmt: skip
            self.default = default
            self.placeholder = placeholder
            self.chip = chip

        def as_dict(self) -> dict[str, Any]:
            look = without_none({"placeholder": self.placeholder, "chip": self.chip})
            return super().as_dict() | {"multi_select": look}
