"""Lists, seeds, filled texts and pieces of videos, at the nodes' doors."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from comfy_api.latest import InputImpl, Types, io
from comfy_execution import text_limit
from comfy_execution.executor import PromptExecutor
from comfy_execution.registry import NodeRegistry
from comfy_extras import nodes_lists, nodes_primitive, nodes_string, nodes_video


class Sink:
    """Hears nothing."""

    client_id = last_node_id = None

    def publish(self, event: Any) -> None:
        pass


class ShowAll(io.ComfyNode):
    """Shows each value it is given."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema("ShowAll", inputs=[io.AnyType.Input("value")], is_output_node=True)

    @classmethod
    def execute(cls, value: Any) -> io.NodeOutput:
        return io.NodeOutput(ui={"text": [str(value)]})


NODES = {
    "CreateList": nodes_lists.CreateList,
    "GetItemFromList": nodes_lists.GetItemFromList,
    "StringFormat": nodes_string.StringFormat,
    "SeedNode": nodes_primitive.Seed,
    "ShowAll": ShowAll,
}


def shown(**graph: tuple[str, dict[str, Any]]) -> list[str]:
    """What the node `show` of a graph was given, in order."""
    prompt = {name: {"class_type": kind, "inputs": given} for name, (kind, given) in graph.items()}
    executor = PromptExecutor(NodeRegistry(NODES), Sink())
    executor.execute(prompt, "p", {}, ["show"])
    assert executor.success, executor.status_messages[-1]
    return list(executor.history_result["outputs"]["show"]["text"])


def test_a_list_of_lists_and_values_is_one_list() -> None:
    first = ("CreateList", {"inputs.input0": ["seed", 0], "inputs.input1": 2})
    both = ("CreateList", {"inputs.input0": ["first", 0], "inputs.input1": ["seed", 0]})
    seed = ("SeedNode", {"seed": 7})
    graph = {"seed": seed, "first": first, "both": both}
    assert shown(**graph, show=("ShowAll", {"value": ["both", 0]})) == ["7", "2", "7"]
    item = ("GetItemFromList", {"list": ["both", 0], "index": 1})
    assert shown(**graph, item=item, show=("ShowAll", {"value": ["item", 0]})) == ["2"]


@pytest.mark.parametrize(("index", "item"), [(0, "a"), (2, "c"), (-1, "c"), (-3, "a")])
def test_an_item_is_taken_by_its_place(index: int, item: str) -> None:
    assert nodes_lists.GetItemFromList.execute(["a", "b", "c"], [index]).args == (item,)


@pytest.mark.parametrize(
    ("items", "index", "reason"),
    [
        (["a", "b"], 2, "has 2 items; expected 0 to 1, or -2 to -1 from its end, found 2"),
        (["a", "b"], -3, "found -3"),
        ([], 0, "expected at least one item"),
    ],
)
def test_an_item_that_is_not_there_is_named(items: list[str], index: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        nodes_lists.GetItemFromList.execute(items, [index])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{a}:{b}, {a} x {b} px", "3:a text, 3 x a text px"),
        ("cx: {c:.3f}", "cx: 0.500"),
        ('{{"text": "{b}"}}', '{"text": "a text"}'),
        ("{a:>{a}}|{b!r}|{d[0]}|{d}", "  3|'a text'|7|[7, 8]"),
        ("{c.real:.1%}", "50.0%"),
        ("", ""),
    ],
)
def test_values_are_put_into_a_text(template: str, expected: str) -> None:
    values = {"a": 3, "b": "a text", "c": 0.5, "d": [7, 8]}
    assert nodes_string.StringFormat.execute(template, values).args == (expected,)


def test_a_text_is_filled_in_a_graph() -> None:
    text = ("StringFormat", {"f_string": "{a}-{b:03}", "values.a": "x", "values.b": ["seed", 0]})
    graph = {"seed": ("SeedNode", {"seed": 5}), "text": text}
    assert shown(**graph, show=("ShowAll", {"value": ["text", 0]})) == ["x-005"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{b}", r"there is no value \{b\}; its values are \{a\}, \{m\}"),
        ("{}", "cannot be filled: there is no value"),
        ("{a", "expected '}'"),
        ('{"text": "{a}"}', "braces that stand for themselves are written twice"),
        ("{a:.3f}", "Unknown format code 'f'"),
        ("{a.__class__.__mro__}", "a hidden part of a value"),
        ("{a[_x]}", "a hidden part of a value"),
        ("{a:>9999999999}", "at most"),
        ("{a.nothing}", "no attribute 'nothing'"),
        ("{a[0].__class__}", "a hidden part of a value"),
        ("{m.os.environ}", r"\{m.os.environ\} asks for a hidden part of a value"),
        ("{m.path}", "a hidden part of a value"),
        ("{g.gi_frame.f_globals}", "a hidden part of a value"),
    ],
)
def test_a_text_that_cannot_be_filled_says_why(template: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        nodes_string.StringFormat.execute(
            template, {"a": "text", "m": pytest, "g": (i for i in "")}
        )


def test_a_text_too_long_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(str):
        made = 0

        def __format__(self, form: str) -> str:
            Counted.made += 1
            return str(self)

    monkeypatch.setattr(text_limit._Installed, "characters", 1000)
    with pytest.raises(ValueError, match="at most 1,000 are accepted"):
        nodes_string.StringFormat.execute("{a}" * 500, {"a": Counted("x" * 100)})
    assert Counted.made == 11


def video(frames: int = 8, rate: int = 4) -> Any:
    """Frames that are told apart by their grey, with a sound of ten samples to a frame."""
    images = torch.linspace(0, 1, frames)[:, None, None, None].expand(frames, 2, 2, 3)
    sound = {"waveform": torch.arange(frames * 10.0).reshape(1, 1, -1), "sample_rate": rate * 10}
    parts = Types.VideoComponents(images=images, audio=sound, frame_rate=Fraction(rate))
    return InputImpl.VideoFromComponents(parts)


@pytest.mark.parametrize(
    ("start", "duration", "frames"),
    [(0, 0, (0, 8)), (0.5, 0, (2, 8)), (0.5, 1.0, (2, 6)), (-0.5, 0, (6, 8)), (1.0, 9.0, (4, 8))],
)
def test_a_piece_is_cut_out_of_a_video_with_its_sound(
    start: float, duration: float, frames: tuple[int, int]
) -> None:
    whole = video().get_components()
    piece = nodes_video.VideoSlice.execute(video(), start, duration, False)[0].get_components()
    begin, end = frames
    assert torch.equal(piece.images, whole.images[begin:end])
    expected = whole.audio["waveform"][..., begin * 10 : end * 10]
    assert torch.equal(piece.audio["waveform"], expected)


@pytest.mark.parametrize(
    ("start", "duration", "strict", "reason"),
    [
        (1.0, 9.0, True, "lasts 2 seconds, and 9 seconds of it from 1 seconds on cannot be cut"),
        (2.0, 0.0, False, "the rest of it from 2 seconds on cannot be cut"),
        (0.0, -1.0, False, "duration: expected 0 .* or more, found -1"),
        (0.0, 0.01, False, "duration: .* less than one of 4 pictures a second"),
    ],
)
def test_a_piece_that_is_not_there_is_named(
    start: float, duration: float, strict: bool, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        nodes_video.VideoSlice.execute(video(), start, duration, strict)
