"""Nodes that newer workflows use for sums, sizes, texts and comparing."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import folder_paths
from comfy_extras import nodes_image_compare, nodes_math, nodes_resolution, nodes_text_files
from comfy_extras.audio.files import SaveAudioAdvanced


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    """Output and temporary folder of this test."""
    before = folder_paths.get_output_directory(), folder_paths.get_temp_directory()
    folder_paths.set_output_directory(str(tmp_path))
    folder_paths.set_temp_directory(str(tmp_path))
    yield tmp_path
    folder_paths.set_output_directory(before[0])
    folder_paths.set_temp_directory(before[1])


@pytest.mark.parametrize(
    ("expression", "values", "expected"),
    [
        ("max(5, round(a * 24)) + (5 - (max(5, round(a * 24)) % 17)) % 17", [3.3], 90),
        ("a & -8", [1023], 1016),
        ("a/2", [5], 2.5),
        ("ceil(1.5 * log2(max(a, b))) + 2", [1024, 768], 17),
        ("a if a > b else b", [1, 2], 2),
        ("a and not b", [True, False], True),
        ("sum(values) + values[1] ** 2", [1, 3], 13),
        (" 2 ** -1 ", [0], 0.5),
        ("a << 3", [1], 8),
        ("a  # so many\n+ b", [1, 2], 3),
        ("round(a, -1) + round(b, 1) + round(b)", [15, 2.25], 24.2),
        ("round(a, -10 ** 9)", [5], 0),
    ],
)
def test_a_formula_is_computed(expression: str, values: list[float], expected: float) -> None:
    named = dict(zip("abc", values))
    number, whole, truth = nodes_math.MathExpression.execute(expression, named).args
    assert (number, whole, truth) == (float(expected), int(expected), bool(expected))
    assert [type(part) for part in (number, whole, truth)] == [float, int, bool]


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "found nothing"),
        ("a +", "invalid syntax"),
        ("a + q", "'q' is not defined.*values are a, b"),
        ("a / (b - 2)", "division by zero"),
        ("9 ** 9 ** 9", "grows too large"),
        ("pow(9, 9 ** 9)", "grows too large"),
        ("1 << 10 ** 9", "grows too large"),
        ("values * 10 ** 9", "a number was expected"),
        ("'text'", "a number was expected, found 'text'"),
        ("'%1000000000d' % a", "a number was expected"),
        ("1j", "a number was expected"),
        ("f'{a:1000000000}'", "not available"),
        ("a.to_bytes(10 ** 10, 'big')", "not available"),
        ("values.append(a)", "not available"),
        ("a; b", "invalid syntax"),
        ("a = b", "invalid syntax"),
        ("max", "expected a number"),
        ("-" * 100_000 + "a", "cannot be computed"),
        ("a" + "+a" * 100_000, "cannot be computed"),
        ("sqrt(-1)", "cannot be computed"),
        ("1e308 * 10", "finite number"),
        ("10 ** 400", "finite number"),
        ("(-8) ** 0.5", "expected a number"),
        ("a.__class__", "cannot be computed"),
        ("open('x')", "'open' not defined"),
        ("(" * 400 + "a" + ")" * 400, "cannot be computed"),
    ],
)
def test_a_formula_that_makes_no_sense_is_named(expression: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        nodes_math.MathExpression.execute(expression, {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, (1.0, 1)), (-2.7, (-2.7, -2)), (" 12 ", (12.0, 12)), ("3.9", (3.9, 3)), (7, (7.0, 7))],
)
def test_a_value_becomes_a_number(value: object, expected: tuple[float, int]) -> None:
    assert nodes_math.NumberConvert.execute(value).args == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", ["", "twelve", "inf", "nan", float("inf"), None, "1e999", "9" * 400, 10**400]
)
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="value: expected a"):
        nodes_math.NumberConvert.execute(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratio", "megapixels", "multiple", "sides"),
    [
        ("1:1 (Square)", 1.0, 8, (1024, 1024)),
        ("16:9 (Widescreen)", 0.9, 32, (1280, 736)),
        ("2:3 (Portrait Photo)", 1.0, 64, (832, 1280)),
        ("21:9 (Ultrawide)", 0.1, 128, (512, 256)),
    ],
)
def test_a_size_has_its_ratio(
    ratio: str, megapixels: float, multiple: int, sides: tuple[int, int]
) -> None:
    made = nodes_resolution.ResolutionSelector.execute(ratio, megapixels, multiple).args
    assert made == sides


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('Here it is:\n```json\n{"mu": 0.5, "name": "b"}\n``` done', "0.5"),
        ('{broken {"mu": [1, 2]}', "[1, 2]"),
        ('{"mu": null}', ""),
        ('["mu"]', ""),
        ("no braces", ""),
        ("{" * 5000, ""),
        ("{ function() { return {} } } {'mu': 1}" + '{"mu": "a"} {"mu": "b"}', ""),
        ("{x}" * 5000 + '{"mu": "far"}', "far"),
        ('{"mu": 1' + " " * 5000 + '{\n\t"mu": "inside"}', "inside"),
    ],
)
def test_json_is_found_in_prose(text: str, found: str) -> None:
    assert nodes_text_files.JsonExtractString.execute(text, "mu").args == (found,)


@pytest.mark.parametrize("text", ["{" * 10**6, '{"a":' * 200_000, '{"' * 500_000])
def test_no_text_holds_the_search_for_json_up(text: str) -> None:
    began = time.thread_time()
    with contextlib.suppress(ValueError):
        assert nodes_text_files.JsonExtractString.execute(text, "a").args == ("",)
    assert time.thread_time() - began < 3


def test_a_search_for_json_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise InterruptedError

    monkeypatch.setattr(nodes_text_files, "check_interrupt", stop)
    with pytest.raises(InterruptedError):
        nodes_text_files.JsonExtractString.execute('{"a": {"b": 1}', "a")


@pytest.mark.parametrize("text", ["[NaN, 1e400]", "[1e400]", '{"a": Infinity}'])
def test_json_that_would_change_is_saved_as_it_is(text: str, output: Path) -> None:
    nodes_text_files.SaveText.execute(text, "odd", "json")
    assert (output / "odd_00001.json").read_text() == text


@pytest.mark.parametrize(("text", "format"), [("a\ud800", "txt"), ('["\\udc00"]', "json")])
def test_half_a_letter_is_named_and_leaves_no_file(text: str, format: str, output: Path) -> None:
    with pytest.raises(ValueError, match=r"text: .* half a surrogate pair .* at place"):
        nodes_text_files.SaveText.execute(text, "half", format)
    assert list(output.iterdir()) == []


def test_texts_are_saved_under_counted_names(output: Path) -> None:
    save = nodes_text_files.SaveText.execute
    first = save("grüße", "notes/day", "md")
    save('{"a":[1]}', "notes/day", "json")
    save("{no json", "notes/day", "json")
    assert first.args == ("grüße",)
    assert first.ui == {
        "text": ["grüße"],
        "files": [{"filename": "day_00001.md", "subfolder": "notes", "type": "output"}],
    }
    written = {path.name: path.read_text("utf-8") for path in (output / "notes").iterdir()}
    assert written["day_00001.md"] == "grüße"
    assert json.loads(written["day_00002.json"]) == {"a": [1]}
    assert "\n" in written["day_00002.json"]
    assert written["day_00003.json"] == "{no json"


def test_two_pictures_are_shown_together(output: Path) -> None:
    shown = nodes_image_compare.ImageCompare.execute(torch.zeros(2, 8, 8, 3), None).ui
    assert isinstance(shown, dict)
    assert shown["b_images"] == []
    names = [image["filename"] for image in shown["a_images"]]
    assert len(names) == 2
    assert all((output / name).is_file() for name in names)


@pytest.mark.parametrize("chosen", [{"format": "flac"}, {"format": "mp3", "quality": "V0"}])
def test_a_sound_is_saved_and_handed_on(output: Path, chosen: dict[str, str]) -> None:
    sound = {"waveform": torch.zeros(1, 1, 800), "sample_rate": 8000}
    made = SaveAudioAdvanced.execute(sound, "sound", chosen)  # type: ignore[arg-type]
    assert made.args == (sound,)
    assert [path.suffix for path in output.iterdir()] == [f".{chosen['format']}"]
