"""Nodes that work on finished pictures, masks and text."""

from __future__ import annotations

import io as bytes_io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import folder_paths
from comfy import progress
from comfy_extras import (
    nodes_compositing,
    nodes_images,
    nodes_mask,
    nodes_post_processing,
    nodes_preview_any,
    nodes_string,
)
from comfy_extras.gaussian import filter_channels, gaussian_kernel


def picture(rows: int = 6, columns: int = 8, channels: int = 3, count: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    return torch.rand(count, rows, columns, channels, generator=generator)


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    before = folder_paths.get_output_directory()
    folder_paths.set_output_directory(str(tmp_path))
    yield tmp_path
    folder_paths.set_output_directory(before)


# -- pictures ------------------------------------------------------------------------------------


def test_cropping_stays_inside() -> None:
    image = picture()
    cut = nodes_images.ImageCrop.execute(image, 100, 100, 3, 2)[0]
    assert torch.equal(cut, image[:, 2:, 3:])


@pytest.mark.parametrize(
    ("direction", "shape"),
    [("right", (6, 20)), ("left", (6, 20)), ("down", (15, 8)), ("up", (15, 8))],
)
def test_stitching_fits_the_second_picture(direction: str, shape: tuple[int, int]) -> None:
    first, second = picture(), torch.ones(1, 3, 5, 3)
    stitch = nodes_images.ImageStitch.execute
    made = stitch(first, direction, True, 2, "red", second)[0]
    side = {"right": 8, "left": 10}.get(direction)
    if side is not None:
        assert made.shape[1:3] == (6, side + 2 + 18 - side)
        assert made[0, 0, 8 if direction == "right" else 10].tolist() == [1.0, 0.0, 0.0]
    else:
        assert made.shape[2] == 8
    assert stitch(first, direction, True, 2, "red", None)[0] is first


def test_stitching_without_resizing_centres_on_black() -> None:
    made = nodes_images.ImageStitch.execute(
        torch.ones(1, 6, 2, 3), "right", False, 0, "white", torch.ones(2, 2, 3, 4)
    )[0]
    assert made.shape == (2, 6, 5, 4)
    assert made[0, :, 2, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert made[0, :, 0, 3].tolist() == [1.0] * 6


def test_fitting_into_a_size_adds_bars() -> None:
    made = nodes_images.ResizeAndPadImage.execute(torch.ones(1, 4, 8, 3), 8, 8, "black", "area")[0]
    assert made[0, :, 0, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_turning_four_times_and_mirroring_twice_changes_nothing() -> None:
    image = picture()
    turned = image
    for _ in range(4):
        turned = nodes_images.ImageRotate.execute(turned, "90 degrees")[0]
    assert torch.equal(turned, image)
    flip = nodes_images.ImageFlip.execute
    assert torch.equal(flip(flip(image, "x-axis: vertically")[0], "x-axis: vertically")[0], image)


def test_a_quarter_turn_is_clockwise() -> None:
    image = torch.zeros(1, 2, 3, 3)
    image[0, 0, 0] = 1  # upper left
    turned = nodes_images.ImageRotate.execute(image, "90 degrees")[0]
    assert turned.shape == (1, 3, 2, 3)
    assert turned[0, 0, 1, 0] == 1  # upper right


def test_the_longer_side_gets_the_size() -> None:
    scale = nodes_images.ImageScaleToMaxDimension.execute
    assert scale(torch.ones(1, 10, 20, 3), "area", 40)[0].shape[1:3] == (20, 40)
    assert scale(torch.ones(1, 20, 10, 3), "area", 40)[0].shape[1:3] == (40, 20)


def test_noise_is_that_of_the_seed() -> None:
    add = nodes_images.ImageAddNoise.execute
    image = torch.full((1, 4, 4, 3), 0.5)
    assert torch.equal(add(image, 3, 0.1)[0], add(image, 3, 0.1)[0])
    assert not torch.equal(add(image, 3, 0.1)[0], add(image, 4, 0.1)[0])


def test_a_saved_svg_carries_its_workflow(output: Path) -> None:
    data = bytes_io.BytesIO(b'<?xml version="1.0"?><svg width="1"><rect/></svg>')
    node = nodes_images.SaveSVGNode.PREPARE_CLASS_CLONE(
        {"prompt": {"1": "]]>"}, "extra_pnginfo": {"workflow": {}}}
    )
    result = node.execute(SimpleNamespace(data=[data]), "svg/x")
    (saved,) = result.ui["images"]
    text = (output / saved["subfolder"] / saved["filename"]).read_text()
    assert text.index("<svg") < text.index("<metadata>") < text.index("<rect/>")
    assert '"workflow"' in text
    assert "]]>\n</metadata>" in text


def test_a_moving_picture_is_saved(output: Path) -> None:
    frames = torch.stack([torch.full((8, 8, 3), shade) for shade in (0.0, 0.5, 1.0)])
    nodes_images.SaveAnimatedWEBP.execute(frames, 6.0, "move", True, 80, "fastest")
    nodes_images.SaveAnimatedPNG.execute(frames, 6.0, 1, "move")
    kinds = sorted(path.suffix for path in output.iterdir())
    assert kinds == [".png", ".webp"]
    assert all(Image.open(path).n_frames == 3 for path in output.iterdir())


# -- transparency --------------------------------------------------------------------------------


def test_splitting_and_joining_transparency_are_inverse() -> None:
    image = picture(channels=4)
    colours, mask = nodes_compositing.SplitImageWithAlpha.execute(image).args
    joined = nodes_compositing.JoinImageWithAlpha.execute(colours, mask)[0]
    torch.testing.assert_close(joined, image)


def test_a_picture_without_transparency_is_opaque() -> None:
    _, mask = nodes_compositing.SplitImageWithAlpha.execute(picture()).args
    assert mask.sum() == 0


@pytest.mark.parametrize("mode", list(nodes_compositing.RULES))
def test_every_rule_gives_a_picture(mode: str) -> None:
    a, b = picture(), picture(5, 9)
    masks = torch.full((1, 6, 8), 0.25), torch.full((1, 5, 9), 0.5)
    image, mask = nodes_compositing.PorterDuffImageComposite.execute(
        a, masks[0], b, masks[1], mode
    ).args
    assert image.shape == (1, 5, 9, 3)
    assert mask.shape == (1, 5, 9)
    assert 0 <= image.min() <= image.max() <= 1


def test_over_with_an_opaque_source_is_the_source() -> None:
    a, b = picture(), picture()
    opaque = torch.zeros(1, 6, 8)
    image, mask = nodes_compositing.PorterDuffImageComposite.execute(
        a, opaque, b, opaque, "SRC_OVER"
    ).args
    torch.testing.assert_close(image, a)
    assert mask.sum() == 0


@pytest.mark.parametrize("published", [False, True])
def test_overlay_of_transparent_layers(published: bool, request: pytest.FixtureRequest) -> None:
    if published:
        request.getfixturevalue("paper_formulas")
    a, b = picture(), picture(channels=4)[..., 1:]
    alphas = torch.full((1, 6, 8), 0.75), torch.full((1, 6, 8), 0.5)
    image, mask = nodes_compositing.PorterDuffImageComposite.execute(
        a, 1 - alphas[0], b, 1 - alphas[1], "OVERLAY"
    ).args
    for place in range(48):
        row, column, channel = place // 8, place % 8, place % 3
        above, below = (
            float(a[0, row, column, channel]) * 0.75,
            float(b[0, row, column, channel]) / 2,
        )
        if 2 * below < 0.5:
            mixed = 2 * above * below
        elif published:
            mixed = 0.75 * 0.5 - 2 * (0.5 - below) * (0.75 - above)
        else:
            mixed = 0.75 * 0.5 - 2 * (0.5 - above) * (0.75 - below)
        expected = min(max(mixed / 0.875, 0.0), 1.0)
        assert float(image[0, row, column, channel]) == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(mask, torch.full((1, 6, 8), 0.125))


# -- post-processing -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(nodes_post_processing.BLEND_MODES))
def test_blending_by_nothing_is_the_first_picture(mode: str) -> None:
    blend = nodes_post_processing.Blend.execute
    torch.testing.assert_close(blend(picture(), picture(), 0.0, mode)[0], picture())


def test_blending_fits_the_second_picture() -> None:
    made = nodes_post_processing.Blend.execute(picture(), picture(3, 3, 4), 0.5, "screen")[0]
    assert made.shape == (1, 6, 8, 3)


def test_blurring_keeps_flat_pictures_and_the_mean_of_a_kernel_is_one() -> None:
    flat = torch.full((1, 6, 8, 3), 0.3)
    torch.testing.assert_close(nodes_post_processing.Blur.execute(flat, 2, 1.0)[0], flat)
    torch.testing.assert_close(nodes_post_processing.Sharpen.execute(flat, 2, 1.0, 1.0)[0], flat)
    assert gaussian_kernel(5, 1.0).sum() == pytest.approx(1.0)


def test_a_radius_larger_than_the_picture_is_no_error() -> None:
    tiny = torch.rand(1, 3, 4, 4)
    assert filter_channels(tiny, gaussian_kernel(31, 1.0)).shape == tiny.shape


@pytest.mark.parametrize("dither", ["none", "floyd-steinberg", "bayer-2", "bayer-4", "bayer-16"])
def test_quantising_leaves_few_colours(dither: str) -> None:
    made = nodes_post_processing.Quantize.execute(picture(32, 32), 4, dither)[0]
    assert len(made.reshape(-1, 3).unique(dim=0)) <= 4


BAYER = [
    [0.0, 8.0, 2.0, 10.0],
    [12.0, 4.0, 14.0, 6.0],
    [3.0, 11.0, 1.0, 9.0],
    [15.0, 7.0, 13.0, 5.0],
]


def test_ordered_dithering_rounds_to_the_nearest_value() -> None:
    shown = (picture(64, 64)[0] * 255).to(torch.uint8)
    full = Image.fromarray(shown.numpy())
    palette = full.quantize(colors=15)
    offsets = (torch.tensor(BAYER) - 7.5) / 16 * (2 * 256 / 15)
    moved = shown.double() + offsets.double().repeat(16, 16).unsqueeze(-1)
    moved = torch.floor(moved + 0.5).clamp(0, 255).to(torch.uint8)
    few = Image.fromarray(moved.numpy()).quantize(palette=palette, dither=Image.Dither.NONE)
    expected = torch.from_numpy(np.array(few.convert("RGB")))
    made = nodes_post_processing.Quantize.execute(picture(64, 64), 15, "bayer-4")[0][0]
    assert torch.equal((made * 255).round().to(torch.uint8), expected)


@pytest.mark.parametrize(
    ("choice", "size"),
    [
        ({"resize_type": "scale by multiplier", "multiplier": 0.5}, (3, 4)),
        ({"resize_type": "scale dimensions", "width": 10, "height": 0, "crop": "center"}, (8, 10)),
        ({"resize_type": "scale longer dimension", "longer_size": 16}, (12, 16)),
        ({"resize_type": "scale shorter dimension", "shorter_size": 12}, (12, 16)),
        ({"resize_type": "scale width", "width": 4}, (3, 4)),
        ({"resize_type": "scale height", "height": 12}, (12, 16)),
        ({"resize_type": "match size", "match": torch.ones(1, 5, 7, 3)}, (5, 7)),
        ({"resize_type": "match size", "match": torch.ones(1, 5, 7)}, (5, 7)),
    ],
)
def test_resizing_pictures_and_masks(choice: dict[str, Any], size: tuple[int, int]) -> None:
    resize = nodes_post_processing.ResizeImageMaskNode.execute
    assert resize(picture(), "area", choice)[0].shape == (1, *size, 3)
    assert resize(torch.ones(1, 6, 8), "area", choice)[0].shape == (1, *size)


def test_a_number_of_pixels_in_steps() -> None:
    scale = nodes_post_processing.ImageScaleToTotalPixels.execute
    made = scale(torch.ones(1, 30, 60, 3), "area", 0.01, 16)[0]
    assert made.shape[1:3] == (80, 144)  # 72.4 x 144.8, to the nearest 16


def test_batches_take_the_size_of_the_first() -> None:
    images = {"image0": picture(), "image1": picture(3, 3, 4)}
    assert nodes_post_processing.BatchImagesNode.execute(images)[0].shape == (2, 6, 8, 4)
    masks = {"mask0": torch.ones(4, 4), "mask1": torch.ones(1, 2, 2)}
    assert nodes_post_processing.BatchMasksNode.execute(masks)[0].shape == (2, 4, 4)
    latents = {"a": {"samples": torch.ones(1, 4, 4, 4)}, "b": {"samples": torch.ones(2, 4, 2, 2)}}
    made = nodes_post_processing.BatchLatentsNode.execute(latents)[0]
    assert made["samples"].shape == (3, 4, 4, 4)
    assert made["batch_index"] == [0, 0, 1]


# -- masks ---------------------------------------------------------------------------------------


def test_one_colour_is_selected() -> None:
    image = torch.zeros(1, 1, 2, 3)
    image[0, 0, 1] = torch.tensor([1.0, 0.5, 0.0])
    mask = nodes_mask.ImageColorToMask.execute(image, 0xFF8000)[0]
    assert mask.tolist() == [[[0.0, 1.0]]]


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("multiply", 0.0),
        ("add", 1.0),
        ("subtract", 1.0),
        ("and", 0.0),
        ("or", 1.0),
        ("xor", 1.0),
    ],
)
def test_masks_combine(operation: str, expected: float) -> None:
    below, above = torch.ones(1, 4, 4), torch.zeros(2, 2)
    made = nodes_mask.MaskComposite.execute(below, above, 1, 1, operation)[0]
    assert made[0, 1, 1] == expected
    assert made[0, 0, 0] == 1
    outside = nodes_mask.MaskComposite.execute(below, above, 9, 0, operation)[0]
    assert torch.equal(outside, below)


def test_a_missing_channel_is_named() -> None:
    with pytest.raises(ValueError, match="channel alpha, found one of 3 channels"):
        nodes_mask.ImageToMask.execute(picture(), "alpha")


# -- text ----------------------------------------------------------------------------------------


def test_text_nodes() -> None:
    assert nodes_string.StringConcatenate.execute("a", "b", "-")[0] == "a-b"
    assert nodes_string.StringSubstring.execute("abcd", 1, -1)[0] == "bc"
    assert nodes_string.CaseConverter.execute("a cat", "Title Case")[0] == "A Cat"
    assert nodes_string.StringTrim.execute(" a ", "Left")[0] == "a "
    assert nodes_string.StringContains.execute("A cat", "CAT", False)[0] is True
    assert nodes_string.StringCompare.execute("Abc", "ab", "Starts With", False)[0] is True
    assert nodes_string.RegexMatch.execute("x1", r"\d", True, False, False)[0] is True
    assert nodes_string.RegexReplace.execute("a1b2", r"\d", "#", count=1)[0] == "a#b2"


def test_regular_expressions_find_matches_and_groups() -> None:
    extract = nodes_string.RegexExtract.execute
    flags = (True, False, False)
    text = "w=3 h=4"
    assert extract(text, r"(\w)=(\d)", "First Match", *flags, 1)[0] == "w=3"
    assert extract(text, r"(\w)=(\d)", "All Matches", *flags, 1)[0] == "w\nh"
    assert extract(text, r"\w=\d", "All Matches", *flags, 1)[0] == "w=3\nh=4"
    assert extract(text, r"(\w)=(\d)", "First Group", *flags, 2)[0] == "3"
    assert extract(text, r"(\w)=(\d)", "All Groups", *flags, 2)[0] == "3\n4"
    assert extract(text, r"(\w)=(\d)", "All Groups", *flags, 9)[0] == ""


@pytest.mark.parametrize("replace", [r"\2", r"\g<name>", "\\"])
def test_a_broken_replacement_is_named(replace: str) -> None:
    with pytest.raises(ValueError, match=r"replace: .* is no replacement for '\(x\)'"):
        nodes_string.RegexReplace.execute("x", "(x)", replace)


def test_a_broken_regular_expression_is_named() -> None:
    with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
        nodes_string.RegexMatch.execute("x", "(", True, False, False)


def test_any_value_is_shown_as_text() -> None:
    show = nodes_preview_any.PreviewAny().main
    assert show("plain")["ui"]["text"] == ("plain",)
    assert show({"a": [1]})["ui"]["text"] == ('{\n    "a": [\n        1\n    ]\n}',)
    assert show(None)["ui"]["text"] == ("None",)
    assert "tensor" in show(torch.ones(1))["ui"]["text"][0]


def test_the_size_of_a_picture_is_shown_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(progress, "NOTE_HOOK", shown.append)
    made = nodes_images.GetImageSize.execute(torch.zeros(3, 16, 24, 3))
    assert [made[n] for n in range(3)] == [24, 16, 3]
    assert shown == ["width: 24, height: 16\n batch size: 3"]
