"""What a training picture shows, before anything is painted or phrased.

`random_scene(seed)` draws a `Scene`; painting (`paint.py`) and captions (`captions.py`) both
start from it, so a picture and its words always agree. The same seed means the same scene at
every picture size.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 40, 40),
    "orange": (247, 140, 30),
    "yellow": (250, 214, 50),
    "green": (46, 158, 70),
    "cyan": (60, 205, 215),
    "blue": (38, 84, 210),
    "purple": (130, 58, 180),
    "pink": (246, 140, 190),
    "brown": (128, 78, 40),
    "black": (24, 24, 28),
    "white": (246, 246, 244),
    "gray": (140, 143, 148),
}
COLOUR_NAMES = list(COLOURS)
SHAPES = ["circle", "square", "triangle", "star", "heart", "ring", "cross", "hexagon", "diamond"]
OBJECTS = [
    "house",
    "tree",
    "sun",
    "moon",
    "flower",
    "smiley face",
    "fish",
    "boat",
    "cloud",
    "mushroom",
]
OBJECTS += ["balloon", "cat"]
USUAL_COLOUR = {
    "sun": "yellow",
    "moon": "white",
    "smiley face": "yellow",
    "cloud": "white",
    "tree": "green",
    "mushroom": "red",
}
# Radius as a fraction of the picture's shorter side, (smallest, largest).
SIZES = {"small": (0.15, 0.19), "": (0.24, 0.31), "large": (0.36, 0.42)}
# Centre as a fraction of (width, height).
POSITIONS = {
    "center": (0.5, 0.5),
    "left": (0.26, 0.5),
    "right": (0.74, 0.5),
    "top": (0.5, 0.26),
    "bottom": (0.5, 0.74),
    "top left": (0.27, 0.27),
    "top right": (0.73, 0.27),
    "bottom left": (0.27, 0.73),
    "bottom right": (0.73, 0.73),
}
TEXTURES = ["plain", "gradient", "stripes", "checker", "dots", "stars"]
LAYOUTS = ["single", "pair", "landscape", "background"]
SKIES = ["day", "sunset", "night"]
GROUNDS = ["grass", "sea", "snow", "desert", "mountains"]
ABOVE = ["none", "sun", "moon", "cloud"]
SIDES = ["left", "right"]

_NEAR_PAIRS = {
    frozenset(pair)
    for pair in [
        ("red", "orange"),
        ("red", "brown"),
        ("red", "pink"),
        ("orange", "yellow"),
        ("orange", "brown"),
        ("cyan", "blue"),
        ("white", "gray"),
        ("black", "gray"),
        ("black", "brown"),
        ("pink", "purple"),
    ]
}
_GROUND_OBJECTS = {
    "grass": ["house", "tree", "flower", "mushroom"],
    "sea": ["boat", "boat", "fish"],
    "snow": ["house", "tree"],
    "desert": ["house", "flower", "tree"],
    "mountains": ["house", "tree"],
}
_GROUND_COLOURS = {
    "grass": ["green"],
    "sea": ["blue", "cyan"],
    "snow": ["white"],
    "desert": ["yellow"],
    "mountains": ["green"],
}


@dataclass(frozen=True)
class Background:
    """A flat or patterned backdrop; `second` is the pattern's other colour."""

    texture: str
    colour: str
    second: str

    @property
    def visible_colours(self) -> list[str]:
        """The colours an object in front must differ from."""
        patterned = self.texture in ("gradient", "stripes", "checker", "dots")
        return [self.colour, self.second] if patterned else [self.colour]


@dataclass(frozen=True)
class Thing:
    """One shape or object; only a thing that is alone has a `position`."""

    kind: str
    colour: str
    size: str = ""
    position: str | None = None


@dataclass(frozen=True)
class Landscape:
    """A sky over a ground, with something in the sky at one side."""

    sky: str
    ground: str
    above: str
    side: str


@dataclass(frozen=True)
class Scene:
    """Everything a picture shows. `seed` also drives the painter's small variations.

    Exactly one of `background` and `landscape` is set, by `layout`.
    """

    seed: int
    layout: str
    things: tuple[Thing, ...] = ()
    background: Background | None = None
    landscape: Landscape | None = None
    is_vertical: bool = False


def is_similar(first: str, second: str) -> bool:
    """Whether two colours are too close to be told apart at a glance."""
    return first == second or frozenset((first, second)) in _NEAR_PAIRS


def contrasting_colour(rng: random.Random, *others: str) -> str:
    """A colour unlike `others`; similar ones stay possible but rare, so they are learnt too."""
    candidates = [name for name in COLOUR_NAMES if name not in others]
    for _ in range(6):
        colour = rng.choice(candidates)
        if not any(is_similar(colour, other) for other in others):
            break
    return colour


def random_background(rng: random.Random) -> Background:
    """A backdrop; plain ones are the most frequent."""
    texture = rng.choices(TEXTURES, [0.58, 0.12, 0.1, 0.08, 0.06, 0.06])[0]
    colour = rng.choice(COLOUR_NAMES)
    second = contrasting_colour(rng, colour)
    if texture == "stars":
        colour = rng.choice(["black", "blue", "purple"])
    return Background(texture, colour, second)


def random_thing(
    rng: random.Random,
    behind: list[str],
    kinds: list[str] | None = None,
    position: str | None = None,
) -> Thing:
    """A shape (60 %) or object whose colour differs from those `behind` it."""
    kind = rng.choice(kinds or (SHAPES if rng.random() < 0.6 else OBJECTS))
    usual = USUAL_COLOUR.get(kind)
    if usual and rng.random() < 0.55 and usual not in behind:
        colour = usual
    else:
        colour = contrasting_colour(rng, *behind)
    size = rng.choices(["small", "", "large"], [0.25, 0.5, 0.25])[0]
    return Thing(kind, colour, size, position)


def _single(seed: int, rng: random.Random) -> Scene:
    background = random_background(rng)
    position = rng.choices(list(POSITIONS), [3.5] + [0.5] * 8)[0]
    thing = random_thing(rng, background.visible_colours, position=position)
    return Scene(seed, "single", (thing,), background)


def _pair(seed: int, rng: random.Random) -> Scene:
    background = random_background(rng)
    if rng.random() < 0.6:
        background = replace(background, texture="plain")
    behind = background.visible_colours
    is_vertical = rng.random() < 0.35
    first, second = random_thing(rng, behind), random_thing(rng, behind)
    if (first.kind, first.colour) == (second.kind, second.colour):
        second = replace(second, colour=contrasting_colour(rng, *behind, first.colour))
    things = (replace(first, size=""), replace(second, size=""))
    return Scene(seed, "pair", things, background, is_vertical=is_vertical)


def _landscape(seed: int, rng: random.Random) -> Scene:
    sky = rng.choices(SKIES, [0.5, 0.22, 0.28])[0]
    ground = rng.choice(GROUNDS)
    count = rng.choices([0, 1, 2], [0.2, 0.5, 0.3])[0]
    things = []
    for _ in range(count):
        thing = random_thing(rng, _GROUND_COLOURS[ground], _GROUND_OBJECTS[ground])
        if thing.kind == "tree" and rng.random() < 0.75:
            thing = replace(thing, colour="green")
        things.append(replace(thing, size=""))
    weights = [0.3, 0.0, 0.6, 0.1] if sky == "night" else [0.3, 0.4, 0.05, 0.25]
    above = rng.choices(ABOVE, weights)[0]
    landscape = Landscape(sky, ground, above, rng.choice(SIDES))
    return Scene(seed, "landscape", tuple(things), landscape=landscape)


def random_scene(seed: int) -> Scene:
    """The scene of `seed`: 54 % single objects, 20 % pairs, 22 % landscapes, 4 % backdrops."""
    rng = random.Random(seed)
    draw = rng.random()
    if draw < 0.54:
        return _single(seed, rng)
    if draw < 0.74:
        return _pair(seed, rng)
    if draw < 0.96:
        return _landscape(seed, rng)
    return Scene(seed, "background", background=random_background(rng))
