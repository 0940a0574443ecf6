"""Edges, windows and colour differences of pictures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from comfy_extras import nodes_canny, nodes_logic, nodes_morphology, nodes_nop


def white_square(side: int = 16) -> Tensor:
    image = torch.zeros(1, side, side, 3)
    image[:, 4:12, 4:12] = 1.0
    return image


def by_hand(x: Tensor, size: int, pick: str) -> Tensor:
    """Least or greatest value of each window, one pixel after the other."""
    rows, columns = x.shape[1:3]
    before, after = size // 2, size - 1 - size // 2
    out = torch.empty_like(x)
    for row in range(rows):
        for column in range(columns):
            window = x[
                :,
                max(0, row - before) : row + after + 1,
                max(0, column - before) : column + after + 1,
            ]
            flat = window.flatten(1, 2)
            out[:, row, column] = flat.amax(dim=1) if pick == "max" else flat.amin(dim=1)
    return out


@pytest.mark.parametrize("size", [3, 4, 5, 9])
@pytest.mark.parametrize("operation", ["dilate", "erode"])
def test_windows_take_the_extreme_value(operation: str, size: int) -> None:
    image = torch.rand(2, 7, 9, 3, generator=torch.Generator().manual_seed(1))
    made = nodes_morphology.Morphology.execute(image, operation, size)[0]
    expected = by_hand(image, size, "max" if operation == "dilate" else "min")
    assert torch.equal(made, expected)


def test_opening_takes_bright_spots_off_and_closing_fills_dark_ones() -> None:
    run = nodes_morphology.Morphology.execute
    image = white_square()
    image[:, 1, 1] = 1.0  # a spot outside
    image[:, 7, 7] = 0.0  # a hole inside
    opened, closed = run(image, "open", 3)[0], run(image, "close", 3)[0]
    assert opened[0, 1, 1].sum() == 0
    assert closed[0, 7, 7].sum() == 3
    assert torch.allclose(run(image, "top_hat", 3)[0], image - opened)
    assert torch.allclose(run(image, "bottom_hat", 3)[0], closed - image)
    gradient = run(white_square(), "gradient", 3)[0]
    assert gradient[0, 4, 4].sum() == 3
    assert gradient[0, 8, 8].sum() == 0


def test_luma_and_colour_differences_come_back() -> None:
    image = torch.rand(1, 5, 6, 3)
    parts = nodes_morphology.ImageRGBToYUV.execute(image)
    grey = torch.full((1, 2, 2, 3), 0.25)
    luma, blue, red = (parts[n] for n in range(3))
    assert luma.shape == image.shape
    back = nodes_morphology.ImageYUVToRGB.execute(luma, blue, red)[0]
    assert (back - image).abs().max() < 2e-3  # the published factors are rounded
    _, blue, red = (nodes_morphology.ImageRGBToYUV.execute(grey)[n] for n in range(3))
    assert torch.allclose(blue, torch.full_like(blue, 0.5))
    assert torch.allclose(red, torch.full_like(red, 0.5))


def test_edges_run_around_a_square_one_pixel_wide() -> None:
    edges = nodes_canny.Canny.execute(white_square(32), 0.4, 0.8)[0]
    assert edges.shape == (1, 32, 32, 3)
    assert set(edges.unique().tolist()) == {0.0, 1.0}
    assert edges[0, 8, 8].sum() == 0
    assert edges[0, 20:].sum() == 0
    row = edges[0, 8, :, 0]
    assert row.nonzero().flatten().tolist() in ([3, 11], [4, 11], [4, 12], [3, 12])


def test_weak_edges_count_only_beside_strong_ones() -> None:
    image = torch.zeros(1, 16, 32, 3)
    image[:, :, 16:] = 0.2  # alone: too weak
    alone = nodes_canny.Canny.execute(image, 0.1, 0.9)[0]
    assert alone.sum() == 0
    image[:, :, 16:] = torch.linspace(0.2, 1.0, 16).reshape(1, 16, 1, 1)  # strong further down
    joined = nodes_canny.Canny.execute(image, 0.1, 0.9)[0]
    assert joined[0, 12].sum() > 0
    assert joined[0, 2].sum() > 0


def test_a_flat_picture_has_no_edges() -> None:
    assert nodes_canny.Canny.execute(torch.full((2, 9, 9, 3), 0.3), 0.01, 0.02)[0].sum() == 0


def test_a_switch_asks_for_the_chosen_input_only() -> None:
    switch = nodes_logic.SwitchNode
    assert switch.check_lazy_status(switch=True) == ["on_true"]
    assert switch.check_lazy_status(switch=False, on_true="there") == ["on_false"]
    assert switch.check_lazy_status(switch=False, on_false="there") == []
    assert switch.execute(True, on_true="yes")[0] == "yes"
    assert switch.execute(False, on_false="no")[0] == "no"


def test_a_written_list_accepts_any_entry() -> None:
    combo = nodes_logic.CustomComboNode
    assert combo.validate_inputs("anything")
    assert combo.execute("anything")[0] == "anything"


def test_a_node_without_effect_gives_the_model_back() -> None:
    model = object()
    assert nodes_nop.wanBlockSwap.execute(model)[0] is model
