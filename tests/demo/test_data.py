"""Scenes, words and tokens belong together and are the same every time."""

import random

import numpy as np
import pytest

from tools.demo_model.captions import caption
from tools.demo_model.paint import paint
from tools.demo_model.scenes import (
    OBJECTS,
    SHAPES,
    Background,
    Scene,
    Thing,
    is_similar,
    random_scene,
)
from tools.demo_model.tokens import END, LENGTH, START, Tokenizer, compact_numbers, used_tokens
from tools.demo_model.train_text import QUESTIONS, answers
from tools.demo_model.training import SIZE_SHARES


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer()


def test_a_seed_gives_the_same_picture_and_words_every_time() -> None:
    for seed in range(20):
        scene = random_scene(seed)
        assert scene == random_scene(seed)
        assert np.array_equal(paint(scene), paint(scene))
        assert caption(scene, random.Random(seed)) == caption(scene, random.Random(seed))


@pytest.mark.parametrize("size", SIZE_SHARES)
def test_every_training_size_is_painted_and_fits_the_unet(size: tuple[int, int]) -> None:
    assert paint(random_scene(1), *size).shape == (size[1], size[0], 3)
    assert all(edge % 32 == 0 for edge in size)


def test_things_differ_from_what_is_behind_them() -> None:
    scenes = [scene for scene in map(random_scene, range(300)) if scene.background]
    things = [(scene.background, thing) for scene in scenes for thing in scene.things]
    assert all(thing.colour not in behind.visible_colours for behind, thing in things)
    alike = [is_similar(thing.colour, behind.colour) for behind, thing in things]
    assert 0 <= np.mean(alike) < 0.05


@pytest.mark.parametrize("kind", SHAPES + OBJECTS)
def test_each_kind_leaves_a_mark(kind: str) -> None:
    background = Background("plain", "cyan", "cyan")
    empty = paint(Scene(5, "background", background=background))
    picture = paint(Scene(5, "single", (Thing(kind, "red", "", "center"),), background))
    changed = np.abs(picture.astype(int) - empty).sum(-1) > 60
    assert 0.03 < changed.mean() < 0.5
    assert changed[:, :8].sum() == 0


def test_a_caption_names_kind_and_background() -> None:
    scene = Scene(0, "single", (Thing("star", "red"),), Background("plain", "green", "red"))
    words = [caption(scene, random.Random(seed)) for seed in range(50)]
    assert all("star" in text and "red" in text for text in words)
    assert np.mean(["green" in text for text in words]) > 0.8


def test_tokens_are_clip_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer("a red circle on a blue background")
    expected = [START, 320, 736, 7117, 525, 320, 1746, 5994, END]
    assert tokens == expected + [END] * (LENGTH - len(expected))


def test_unknown_tokens_share_row_zero(tokenizer: Tokenizer) -> None:
    numbers = compact_numbers(used_tokens(tokenizer, captions=50))
    assert numbers[START] > 0
    assert numbers[tokenizer.words("helicopter")[0]] == 0


def test_answers_point_at_what_the_scene_holds() -> None:
    for seed in range(50):
        scene = random_scene(seed)
        given = dict(zip(QUESTIONS, answers(scene)))
        for i, thing in enumerate(scene.things):
            assert QUESTIONS[f"kind {i}"][given[f"kind {i}"]] == thing.kind
        assert (given["sky"] >= 0) == (scene.landscape is not None)
