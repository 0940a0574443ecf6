"""Tracks as users write them: JSON lists of points with numbers x and y."""

from __future__ import annotations

import json
import math
from typing import Any

EXAMPLE = '[[{"x": 1, "y": 2}, {"x": 3, "y": 4}]]'
Track = list[tuple[float, float]]


def read_json(text: str, id: str) -> Any:
    """The value that a text writes; single quotes serve too.

    Raises:
        ValueError: It writes none.
    """
    try:
        return json.loads(text.replace("'", '"'))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{id}: expected JSON such as {EXAMPLE}, found none ({error})") from error


def read_track(points: Any, id: str) -> Track:
    """The points of one track.

    Raises:
        ValueError: It is no list of points with finite coordinates.
    """
    try:
        track = [(float(point["x"]), float(point["y"])) for point in points]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{id}: expected lists of points with numbers x and y, such as {EXAMPLE}, found "
            f"something else ({type(error).__name__}: {error})"
        ) from error
    if not all(math.isfinite(side) for point in track for side in point):
        raise ValueError(f"{id}: expected points with finite x and y, found {track}")
    return track
