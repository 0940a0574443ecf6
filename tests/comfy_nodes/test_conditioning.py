"""Conditioning nodes make new entries and never change those they were given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nodes


@pytest.fixture
def conditioning() -> list[list[Any]]:
    return [[torch.ones(1, 3, 2), {"pooled_output": torch.ones(1, 2), "of_a_pack": 1}]]


def options_of(result: Any) -> dict[str, Any]:
    return result[0][0][1]


def test_an_area_in_pixels_becomes_cells_height_first(conditioning: Any) -> None:
    made = nodes.ConditioningSetArea().append(conditioning, 256, 128, 64, 32, 0.5)
    assert options_of(made)["area"] == (16, 32, 4, 8)
    assert options_of(made)["strength"] == 0.5
    assert options_of(made)["set_area_to_bounds"] is False
    assert "area" not in conditioning[0][1]


def test_an_area_in_fractions_is_handed_on(conditioning: Any) -> None:
    made = nodes.ConditioningSetAreaPercentage().append(conditioning, 0.5, 0.25, 0.1, 0.2, 1.0)
    assert options_of(made)["area"] == ("percentage", 0.25, 0.5, 0.2, 0.1)


def test_a_mask_of_two_axes_becomes_a_batch(conditioning: Any) -> None:
    mask = torch.ones(4, 5)
    made = nodes.ConditioningSetMask().append(conditioning, mask, "mask bounds", 0.7)
    assert options_of(made)["mask"].shape == (1, 4, 5)
    assert options_of(made)["set_area_to_bounds"] is True
    assert options_of(made)["mask_strength"] == 0.7


def test_a_range_is_set_in_fractions(conditioning: Any) -> None:
    made = nodes.ConditioningSetTimestepRange().set_range(conditioning, 0.2, 0.8)
    assert options_of(made)["start_percent"] == 0.2
    assert options_of(made)["end_percent"] == 0.8
    assert options_of(made)["of_a_pack"] == 1


def test_zeroing_leaves_the_original(conditioning: Any) -> None:
    made = nodes.ConditioningZeroOut().zero_out(conditioning)
    assert made[0][0][0].abs().sum() == 0
    assert options_of(made)["pooled_output"].abs().sum() == 0
    assert conditioning[0][0].sum() == 6


def test_combining_keeps_both(conditioning: Any) -> None:
    assert len(nodes.ConditioningCombine().combine(conditioning, conditioning)[0]) == 2


def test_averaging_takes_zeros_where_the_other_text_is_shorter(conditioning: Any) -> None:
    short = [[torch.ones(1, 1, 2), {}]]
    ((tensor, options),) = nodes.ConditioningAverage().addWeighted(conditioning, short, 0.5)[0]
    assert tensor[0, :, 0].tolist() == [1.0, 0.5, 0.5]
    assert torch.equal(options["pooled_output"], torch.ones(1, 2))


@pytest.mark.parametrize("mine", ["none", "missing", "there"])
@pytest.mark.parametrize("others", ["none", "missing", "there"])
def test_an_average_has_the_pooled_output_there_is(mine: str, others: str) -> None:
    def entry(kind: str, value: float) -> list[list[Any]]:
        pooled = {"none": {"pooled_output": None}, "missing": {}}
        return [
            [torch.zeros(1, 3, 2), pooled.get(kind, {"pooled_output": torch.full((1, 2), value)})]
        ]

    made = nodes.ConditioningAverage().addWeighted(entry(mine, 1.0), entry(others, 3.0), 0.75)
    values = {(True, True): 1.5, (True, False): 1.0, (False, True): 3.0}
    expected = values.get((mine == "there", others == "there"))
    found = options_of(made).get("pooled_output")
    assert found is None if expected is None else torch.equal(found, torch.full((1, 2), expected))


@pytest.mark.parametrize("name", ["ConditioningAverage", "ConditioningConcat"])
def test_an_empty_conditioning_is_named(conditioning: Any, name: str) -> None:
    node = nodes.NODE_CLASS_MAPPINGS[name]()
    more = (0.5,) if name == "ConditioningAverage" else ()
    with pytest.raises(ValueError, match="conditioning_from is empty"):
        getattr(node, node.FUNCTION)(conditioning, [], *more)


@pytest.mark.parametrize("name", ["ConditioningAverage", "ConditioningConcat"])
def test_of_several_texts_the_first_counts_and_that_is_said(
    conditioning: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("comfy.progress.NOTE_HOOK", said.append)
    node = nodes.NODE_CLASS_MAPPINGS[name]()
    more = (0.5,) if name == "ConditioningAverage" else ()

    def made(other: Any) -> Any:
        return getattr(node, node.FUNCTION)(conditioning, other, *more)[0][0][0]

    first, second = ([torch.full((1, 3, 2), value), {}] for value in (2.0, 5.0))
    alone = made([first])
    assert not said
    assert torch.equal(made([first, second]), alone)
    assert "conditioning_from holds 2 texts, and only the first is used" in said.pop()
    assert not said


def test_text_without_a_text_encoder_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="Load CLIP"):
        nodes.CLIPTextEncode().encode(None, "a cat")


@pytest.mark.parametrize("other", [(1, 5, 48), (3, 5, 32)])
def test_texts_of_other_encoders_or_batches_are_not_joined(other: tuple[int, ...]) -> None:
    to = [[torch.zeros(2, 7, 32), {}]]
    words = rf"expected embeddings .*\(2, 7, 32\), found \({other[0]}, 5, {other[2]}\)"
    with pytest.raises(ValueError, match=words):
        nodes.ConditioningConcat().concat(to, [[torch.zeros(other), {}]])
    with pytest.raises(ValueError, match=words):
        nodes.ConditioningAverage().addWeighted(to, [[torch.zeros(other), {}]], 0.5)


def test_pooled_outputs_of_other_widths_are_not_mixed() -> None:
    to, other = ([[torch.zeros(1, 7, 32), {"pooled_output": torch.zeros(1, w)}]] for w in (8, 7))
    with pytest.raises(ValueError, match=r"expected pooled outputs .*\(1, 8\), found \(1, 7\)"):
        nodes.ConditioningAverage().addWeighted(to, other, 0.5)


def test_one_text_is_joined_with_each_of_a_batch() -> None:
    to, other = torch.rand(3, 7, 32), torch.rand(1, 5, 32)
    ((joined, _),) = nodes.ConditioningConcat().concat([[to, {}]], [[other, {}]])[0]
    assert torch.equal(joined, torch.cat([to, other.expand(3, -1, -1)], dim=1))
