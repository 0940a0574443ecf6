"""Judges pictures of one shape on a plain background: which colours, which shape, where.

No network and no learning: the border gives the background, what differs from it is the object,
its outline is compared with painted ones. On painted pictures the judge is right every time
(tests/demo/test_judge.py), so what it counts as wrong in a sampled picture is the model's doing.
NumPy, SciPy and Pillow only.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from tools.demo_model.brushes import PAINTERS, Brush
from tools.demo_model.captions import with_article
from tools.demo_model.scenes import (
    COLOUR_NAMES,
    COLOURS,
    POSITIONS,
    SHAPES,
    Background,
    Scene,
    Thing,
    is_similar,
)

OUTLINE_SIZE = 32  # outlines are compared at this many pixels square
POSITION_TOLERANCE = 0.14  # of width and height: half the distance between two named places is 0.12
_PHRASES = {
    "center": "",
    "left": " on the left",
    "right": " on the right",
    "top": " at the top",
    "bottom": " at the bottom",
}


@dataclass(frozen=True)
class Verdict:
    """What a picture shows. Colours and shapes are names; the centre is a fraction of the size.

    `colour` and `shape` are None when nothing stands out from the background.
    """

    background: str
    colour: str | None
    shape: str | None
    centre: tuple[float, float]
    covered: float

    def is_at(self, position: str) -> bool:
        """Whether the object's centre lies at a named place."""
        return all(
            abs(a - b) < POSITION_TOLERANCE for a, b in zip(self.centre, POSITIONS[position])
        )


@dataclass(frozen=True)
class Request:
    """A picture to ask for, and the words that ask for it."""

    colour: str
    shape: str
    position: str
    background: str

    @property
    def text(self) -> str:
        """For example "a red circle on the left on a blue background"."""
        place = _PHRASES.get(self.position, f" in the {self.position} corner")
        subject = with_article(f"{self.colour} {self.shape}")
        return f"{subject}{place} on {with_article(self.background)} background"

    def scene(self, seed: int) -> Scene:
        """The scene the painter would paint for these words."""
        thing = Thing(self.shape, self.colour, "", self.position)
        background = Background("plain", self.background, self.colour)
        return Scene(seed, "single", (thing,), background)

    def marks(self, verdict: Verdict) -> dict[str, bool]:
        """Which of the four wishes a picture fulfils."""
        return {
            "background": verdict.background == self.background,
            "colour": verdict.colour == self.colour,
            "shape": verdict.shape == self.shape,
            "position": verdict.colour is not None and verdict.is_at(self.position),
        }


def random_requests(seed: int) -> Iterator[Request]:
    """Requests without end; their two colours are never alike."""
    rng = random.Random(seed)
    places = ["center"] * 3 + list(POSITIONS)
    while True:
        background, colour = rng.choice(COLOUR_NAMES), rng.choice(COLOUR_NAMES)
        if not is_similar(background, colour):
            yield Request(colour, rng.choice(SHAPES), rng.choice(places), background)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of sRGB 0..255 [..., 3]: distances are about what the eye sees."""
    linear = np.asarray(rgb, dtype=np.float64) / 255
    linear = np.where(linear > 0.04045, ((linear + 0.055) / 1.055) ** 2.4, linear / 12.92)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = linear @ to_xyz.T / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    x, y, z = f[..., 0], f[..., 1], f[..., 2]
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


def colour_name(rgb: np.ndarray) -> str:
    """The named colour nearest to `rgb` (0..255)."""
    distances = ((lab(np.array(list(COLOURS.values()))) - lab(rgb)) ** 2).sum(-1)
    return COLOUR_NAMES[int(np.argmin(distances))]


def _normalised_outline(mask: np.ndarray) -> np.ndarray:
    """The object of a mask, centred and scaled to a square of 32, as coverage 0..1."""
    rows, columns = np.nonzero(mask)
    top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
    edge = max(bottom - top, right - left)
    x, y, scale = (left + right - edge) / 2, (top + bottom - edge) / 2, edge / OUTLINE_SIZE
    picture = Image.fromarray((mask * 255).astype(np.uint8)).transform(
        (OUTLINE_SIZE, OUTLINE_SIZE),
        Image.Transform.AFFINE,
        (scale, 0, x, 0, scale, y),
        Image.Resampling.BILINEAR,
    )
    return np.asarray(picture) / 255


@functools.cache
def _outlines() -> dict[str, list[np.ndarray]]:
    """Five painted outlines of each shape (their small turns differ)."""
    outlines: dict[str, list[np.ndarray]] = {}
    for shape in SHAPES:
        outlines[shape] = []
        for seed in range(5):
            image = Image.new("RGB", (384, 384))
            surface = ImageDraw.Draw(image)
            PAINTERS[shape](Brush(surface, 192, 192, 115, (255, 255, 255), random.Random(seed)))
            outlines[shape].append(_normalised_outline(np.asarray(image.reduce(3))[..., 0] > 127))
    return outlines


def _shape_name(mask: np.ndarray) -> str:
    """The shape whose outline overlaps most (intersection over union)."""
    seen = _normalised_outline(mask)

    def overlap(outline: np.ndarray) -> float:
        return float(np.minimum(seen, outline).sum() / np.maximum(seen, outline).sum())

    return max(SHAPES, key=lambda shape: max(overlap(outline) for outline in _outlines()[shape]))


def _object_mask(picture: np.ndarray, background: np.ndarray) -> np.ndarray:
    """Pixels of the largest connected region that differs from the background colour."""
    distance = np.sqrt(((lab(picture) - lab(background)) ** 2).sum(-1))
    mask = distance > max(14.0, 0.45 * float(np.percentile(distance, 99)))
    regions, count = ndimage.label(mask)
    if count > 1:
        areas = ndimage.sum_labels(mask, regions, np.arange(1, count + 1))
        mask = regions == 1 + int(np.argmax(areas))
    return mask


def judge(picture: np.ndarray) -> Verdict:
    """What `picture` (uint8 RGB [H, W, 3], any size) shows."""
    height, width = picture.shape[:2]
    rim = max(3, min(height, width) // 21)
    border = [picture[:rim], picture[-rim:], picture[:, :rim], picture[:, -rim:]]
    background = np.median(np.concatenate([part.reshape(-1, 3) for part in border]), axis=0)
    mask = _object_mask(picture, background)
    covered = float(mask.mean())
    if covered < 0.0025:
        return Verdict(colour_name(background), None, None, (0.5, 0.5), covered)
    rows, columns = np.nonzero(mask)
    x, y = (columns.min() + columns.max()) / 2 / width, (rows.min() + rows.max()) / 2 / height
    colour = colour_name(np.median(picture[mask], axis=0))
    return Verdict(
        colour_name(background), colour, _shape_name(mask), (float(x), float(y)), covered
    )
