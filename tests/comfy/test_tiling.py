"""Tiles must not show in the result."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from comfy.tiling import get_tiled_scale_steps, tiled_scale, tiled_scale_multidim


class Counter:
    count = 0

    def update(self, value: int) -> None:
        self.count += value


@pytest.mark.parametrize("size", [(8, 8), (30, 21), (16, 40), (65, 64)])
def test_a_pointwise_function_gives_what_it_gives_untiled(size) -> None:
    x, counter = torch.randn(2, 3, *size), Counter()

    def enlarge(tile):
        assert max(tile.shape[2:]) <= 16
        return F.interpolate(tile, scale_factor=2, mode="nearest") * 3

    out = tiled_scale(x, enlarge, 16, 16, overlap=4, upscale_amount=2, pbar=counter)
    torch.testing.assert_close(out, F.interpolate(x, scale_factor=2, mode="nearest") * 3)
    assert counter.count == 2 * get_tiled_scale_steps(size[1], size[0], 16, 16, 4)


def test_sizes_of_causal_video_come_from_functions() -> None:
    x = torch.randn(1, 2, 9, 12, 12)
    out = tiled_scale_multidim(
        x,
        lambda tile: tile.repeat_interleave(4, 2)[:, :, 3:],
        tile=(5, 8, 8),
        overlap=(1, 2, 2),
        upscale_amount=(lambda frames: max(0, frames * 4 - 3), 1, 1),
        index_formulas=(4, 1, 1),
        out_channels=2,
    )
    assert out.shape == (1, 2, 33, 12, 12)
    assert not out.isnan().any()


def test_overlap_that_leaves_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"8.*8"):
        tiled_scale(torch.zeros(1, 1, 20, 20), lambda tile: tile, 8, 8, overlap=8)
