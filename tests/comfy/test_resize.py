"""Resizing against recorded results."""

from __future__ import annotations

import pytest
import torch

from comfy import resize

METHODS = ("area", "bicubic", "bilinear", "bislerp", "lanczos", "nearest-exact")


@pytest.mark.parametrize("crop", ["center", "disabled"])
@pytest.mark.parametrize("size", [(13, 18), (20, 16), (7, 5)])
@pytest.mark.parametrize("method", METHODS)
def test_common_upscale_agrees_with_the_reference(method, size, crop, golden_tensors) -> None:
    golden = golden_tensors("image_latent_ops.safetensors")
    name = "rgb_1_3_9_13_for_lanczos" if method == "lanczos" else "latent_1_4_9_13"
    width, height = size
    actual = resize.common_upscale(golden[f"in/{name}"], width, height, method, crop)
    expected = golden[f"common_upscale/{method}/w{width}_h{height}/{crop}"]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_video_is_resized_frame_by_frame() -> None:
    video = torch.randn(2, 4, 3, 8, 10)
    resized = resize.common_upscale(video, 20, 16, "bilinear", "disabled")
    assert resized.shape == (2, 4, 3, 16, 20)
    frame = resize.common_upscale(video[:, :, 1], 20, 16, "bilinear", "disabled")
    torch.testing.assert_close(resized[:, :, 1], frame)


@pytest.mark.parametrize("published", [False, True])
def test_bislerp_just_below_a_cell_takes_the_neighbour_that_pictures_took(
    published: bool, request: pytest.FixtureRequest
) -> None:
    """From 3 to 31 cells the middle one lies at 0.99999994, nearly all of what the second
    neighbour is. That was the third cell, as 1.99999994 rounds to 2."""
    if published:
        request.getfixturevalue("paper_formulas")
    directions = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]).T.reshape(1, 2, 1, 3)
    resized = resize.bislerp(directions, 31, 1)
    wanted = directions[..., 1 if published else 2]
    torch.testing.assert_close(resized[..., 15], wanted, rtol=0, atol=1e-5)


def test_bislerp_keeps_lengths_between_equally_long_vectors() -> None:
    angle = torch.linspace(0, 1.5, 4)
    circle = torch.stack([angle.cos(), angle.sin()])[None, :, None].repeat(1, 1, 2, 1)
    resized = resize.bislerp(circle, 9, 2)
    torch.testing.assert_close(resized.norm(dim=1), torch.ones(1, 2, 9))


@pytest.mark.parametrize(
    ("size", "expected"), [(2, [0, 1]), (3, [0, 1, 2]), (7, [0, 1, 2, 0, 1, 2, 0])]
)
def test_repeating_and_cutting_to_a_batch_size(size, expected) -> None:
    assert resize.repeat_to_batch_size(torch.arange(3), size).tolist() == expected


@pytest.mark.parametrize(
    ("size", "expected"), [(1, [0]), (2, [0, 3]), (8, [0, 0, 1, 1, 2, 2, 3, 3])]
)
def test_spreading_over_a_batch_size(size, expected) -> None:
    assert resize.resize_to_batch_size(torch.arange(4), size).tolist() == expected


@pytest.mark.parametrize("size", [(1, 64), (64, 1), (2, 40), (3, 96)])
@pytest.mark.parametrize("wanted", [(1, 31), (31, 1), (96, 2), (5, 5)])
def test_a_crop_to_any_shape_leaves_something(
    size: tuple[int, int], wanted: tuple[int, int]
) -> None:
    made = resize.common_upscale(torch.rand(1, 3, *size), *wanted, "bilinear", "center")
    assert made.shape == (1, 3, wanted[1], wanted[0])
