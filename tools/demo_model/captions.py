"""Phrases a `Scene` in one of many ways.

The words used here are the whole vocabulary of the demo model: every other token has a zero
embedding, so unknown words are ignored.
"""

from __future__ import annotations

import random

from tools.demo_model.scenes import USUAL_COLOUR, Background, Landscape, Scene, Thing

_SYNONYMS = {
    "gray": ["gray", "gray", "grey"],
    "circle": ["circle", "circle", "circle", "disc", "dot", "ball"],
    "ring": ["ring", "ring", "donut"],
    "smiley face": ["smiley face", "smiley face", "smiley", "smiling face"],
    "cross": ["cross", "cross", "plus sign"],
    "large": ["large", "big", "huge"],
    "small": ["small", "little", "tiny"],
    "boat": ["boat", "boat", "sailboat", "ship"],
    "house": ["house", "house", "cottage"],
    "moon": ["moon", "moon", "crescent moon"],
    "diamond": ["diamond", "diamond", "rhombus"],
    "purple": ["purple", "purple", "violet"],
    "cat": ["cat", "cat", "kitten"],
}
_PLACES = {
    "center": ["in the center", "in the middle"],
    "left": ["on the left", "on the left side"],
    "right": ["on the right", "on the right side"],
    "top": ["at the top"],
    "bottom": ["at the bottom"],
}
_SKIES = {
    "day": ["under a blue sky", "under a clear blue sky", "on a sunny day", "under a daytime sky"],
    "sunset": ["at sunset", "at sunset", "under a sunset sky"],
    "night": ["under a night sky", "on a starry night", "under a night sky with stars"],
}
_ABOVE = {
    "none": [""],
    "sun": ["with a sun", "with the sun", "with a yellow sun"],
    "moon": ["with a moon", "with the moon", "with a crescent moon"],
    "cloud": ["with a cloud", "with a white cloud"],
}
_GROUND_PLACES = {
    "grass": ["on a green meadow", "on grass", "on the grass", "in a green field"],
    "sea": ["on the sea", "on the ocean", "on blue water"],
    "snow": ["in the snow", "in a snowy landscape", "on snow"],
    "desert": ["in the desert", "on sand"],
    "mountains": ["in front of mountains", "with mountains", "in the mountains"],
}
_GROUND_NAMES = {
    "grass": "a green meadow",
    "sea": "the sea",
    "snow": "a snowy landscape",
    "desert": "a desert",
    "mountains": "mountains",
}
_OPENINGS = ["a picture of", "a drawing of", "an image of", "an illustration of"]
_OPENINGS += ["a simple drawing of", "a photo of", "a painting of"]
_ENDINGS = ["flat design", "simple illustration", "minimal", "vector art", "high quality"]
_ENDINGS += ["masterpiece", "detailed", "best quality"]
_PRAISE = ["beautiful", "nice", "cute", "lovely", "perfect", "amazing", "pretty"]


def with_article(words: str) -> str:
    """`words` after "a" or "an"."""
    return ("an " if words[0] in "aeiou" else "a ") + words


def _synonym(word: str, rng: random.Random) -> str:
    return rng.choice(_SYNONYMS[word]) if word in _SYNONYMS else word


def _thing(thing: Thing, rng: random.Random) -> str:
    words = [_synonym(thing.size, rng)] if thing.size else []
    is_usual = USUAL_COLOUR.get(thing.kind) == thing.colour
    if not (is_usual and rng.random() < 0.4):
        words.append(_synonym(thing.colour, rng))
    return with_article(" ".join([*words, _synonym(thing.kind, rng)]))


def _background(background: Background, rng: random.Random) -> str:
    a, b = _synonym(background.colour, rng), _synonym(background.second, rng)
    an_a, a_b = with_article(a), with_article(b)
    forms = {
        "plain": [f"{an_a} background"] * 2
        + [f"{a} background", f"a plain {a} background", f"a solid {a} background"],
        "gradient": [
            f"a {a} to {b} gradient background",
            f"a gradient background from {a} to {b}",
            f"{an_a} and {b} gradient",
        ],
        "stripes": [
            f"{an_a} and {b} striped background",
            f"{b} and {a} stripes",
            f"a striped {a} and {b} background",
        ],
        "checker": [
            f"{an_a} and {b} checkered background",
            f"{a_b} and {a} checkerboard",
            f"a checkerboard of {a} and {b}",
        ],
        "dots": [
            f"{an_a} background with {b} dots",
            f"{an_a} background with {b} polka dots",
            f"{an_a} polka dot background",
        ],
        "stars": [
            f"{an_a} starry sky",
            f"{an_a} night sky with stars",
            f"{an_a} starry background",
            f"{an_a} background with stars",
        ],
    }
    return rng.choice(forms[background.texture])


def _single(scene: Scene, background: Background, rng: random.Random) -> str:
    thing = scene.things[0]
    subject, place = _thing(thing, rng), thing.position
    if place and (place != "center" or rng.random() < 0.2):
        corner = [f"in the {place} corner", f"in the {place}", f"at the {place}"]
        subject += " " + rng.choice(_PLACES.get(place, corner))
    if background.texture == "plain" and rng.random() < 0.06:
        return subject
    behind = _background(background, rng)
    joints = [" on ", " on ", " on ", ", ", " with ", " in front of "]
    return subject + rng.choice(joints) + behind


def _pair(scene: Scene, background: Background, rng: random.Random) -> str:
    a, b = (_thing(thing, rng) for thing in scene.things)
    if scene.is_vertical:
        forms = [f"{a} above {b}", f"{b} below {a}", f"{b} under {a}", f"{a} over {b}"]
    else:
        forms = [
            f"{a} to the left of {b}",
            f"{b} to the right of {a}",
            f"{a} and {b}",
            f"{a} next to {b}",
            f"{a} on the left and {b} on the right",
        ]
    joint = rng.choice([" on ", " on ", ", "])
    return rng.choice(forms) + joint + _background(background, rng)


def _landscape(scene: Scene, view: Landscape, rng: random.Random) -> str:
    names = [_thing(thing, rng) for thing in scene.things]
    subject = " and ".join(names)
    if len(names) == 2 and rng.random() < 0.3:
        subject = f"{names[0]} to the left of {names[1]}"
    sky = rng.choice(_SKIES[view.sky])
    if subject:
        text = f"{subject} {rng.choice(_GROUND_PLACES[view.ground])} {sky}"
    else:
        text = rng.choice(["", "a landscape, "]) + f"{_GROUND_NAMES[view.ground]} {sky}"
    above = rng.choice(_ABOVE[view.above])
    if above and rng.random() < 0.35:
        above += f" on the {view.side}"
    return f"{text} {above}".strip()


def _describe(scene: Scene, rng: random.Random) -> str:
    if scene.landscape is not None:
        return _landscape(scene, scene.landscape, rng)
    if scene.background is None:
        raise ValueError(f"scene {scene.seed} has neither a background nor a landscape")
    if scene.layout == "background":
        return _background(scene.background, rng)
    phrase = _single if scene.layout == "single" else _pair
    return phrase(scene, scene.background, rng)


def caption(scene: Scene, rng: random.Random) -> str:
    """One phrasing of `scene`, at times with filler words as people write them."""
    text = _describe(scene, rng)
    article, _, rest = text.partition(" ")
    if rng.random() < 0.05 and article in ("a", "an"):
        text = with_article(f"{rng.choice(_PRAISE)} {rest}")
    if rng.random() < 0.37:
        text = f"{rng.choice(_OPENINGS)} {text}"
    if rng.random() < 0.4:
        text = f"{text}, {rng.choice(_ENDINGS)}"
    if rng.random() < 0.08 and text.startswith(("a ", "an ")):
        text = text.split(" ", 1)[1]
    return text
