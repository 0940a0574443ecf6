"""Socket types whose widget is an instrument of the editor: camera, colours, boxes, curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from comfy_api.latest.io.base import ComfyTypeI, ComfyTypeIO, WidgetInput, comfytype
from comfy_api.latest.io.options import without_none


@comfytype("WEBCAM")
class Webcam(ComfyTypeIO):
    """A picture taken in the editor."""

    Type = str

    class Input(WidgetInput):
        """The camera view."""


@comfytype("COLOR")
class Color(ComfyTypeIO):
    """A colour as `#rrggbb`."""

    Type = str

    class Input(WidgetInput):
        """A colour picker."""

        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            socketless: bool | None = True,
            advanced: bool | None = None,
            default: str = "#ffffff",
        ) -> None:
            super().__init__(
                id, display_name, optional, tooltip, None, default, socketless, advanced=advanced
            )


class BoundingBoxContents(TypedDict):
    """A box in a picture, in pixels from the upper left corner."""

    x: int
    y: int
    width: int
    height: int


@comfytype("BOUNDING_BOX")
class BoundingBox(ComfyTypeIO):
    """A box in a picture."""

    Type = BoundingBoxContents

    class Input(WidgetInput):
        """A box the user draws; `component` names the editor's widget for it."""

        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            socketless: bool | None = True,
            default: Mapping[str, int] | None = None,
            component: str | None = None,
            force_input: bool | None = None,
        ) -> None:
            box = dict(default) if default else {"x": 0, "y": 0, "width": 512, "height": 512}
            super().__init__(
                id, display_name, optional, tooltip, None, box, socketless, None, force_input
            )
            self.component = component

        def as_dict(self) -> dict[str, Any]:
            return super().as_dict() | without_none({"component": self.component})


@comfytype("CURVE")
class Curve(ComfyTypeIO):
    """Points of a curve, x ascending, both axes 0..1."""

    Type = list[tuple[float, float]]

    class Input(WidgetInput):
        """A curve the user draws; a straight line at first."""

        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            socketless: bool | None = True,
            default: list[tuple[float, float]] | None = None,
            advanced: bool | None = None,
        ) -> None:
            line = default if default is not None else [(0.0, 0.0), (1.0, 1.0)]
            super().__init__(
                id, display_name, optional, tooltip, None, line, socketless, advanced=advanced
            )


@comfytype("IMAGECOMPARE")
class ImageCompare(ComfyTypeI):
    """A view of two pictures with a slider between them."""

    Type = dict[str, Any]

    class Input(WidgetInput):
        """The view; it has no socket."""

        def __init__(
            self,
            id: str,
            display_name: str | None = None,
            optional: bool = False,
            tooltip: str | None = None,
            socketless: bool | None = True,
            advanced: bool | None = None,
        ) -> None:
            super().__init__(
                id, display_name, optional, tooltip, None, None, socketless, advanced=advanced
            )
