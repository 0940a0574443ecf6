"""Edges of pictures.

Source: Canny 1986, A computational approach to edge detection, IEEE PAMI 8(6).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from comfy.devices import placement
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of
from comfy_extras.gaussian import filter_channels, gaussian_kernel
from comfy_extras.nodes_morphology import to_yuv

BLUR_SIZE, BLUR_SIGMA = 5, 0.5  # five pixels; sigma in halves of that, so one pixel
SMALLEST = 1e-6  # keeps the root's slope finite
SOBEL = ((-1.0, 0.0, 1.0), (-2.0, 0.0, 2.0), (-1.0, 0.0, 1.0))
# Offset (row, column) of the neighbour that lies in each eighth of a turn.
NEIGHBOURS = ((0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1))


def canny(image: Tensor, low: float, high: float) -> Tensor:
    """Edges of pictures [B, H, W, C] as [B, 1, H, W] of zeros and ones.

    Args:
        low: Least slope of an edge that hangs together with a strong one.
        high: Least slope of a strong edge.
    """
    grey = to_yuv(image)[0][:, None]
    blurred = filter_channels(grey, gaussian_kernel(BLUR_SIZE, BLUR_SIGMA, device=grey.device))
    slope, direction = _slopes(blurred)
    ridge = slope * _is_ridge(slope, direction)
    return _connected(ridge > low, ridge > high).to(image.dtype)


def _slopes(grey: Tensor) -> tuple[Tensor, Tensor]:
    """Steepness, and its direction in eighths of a turn 0..7."""
    across = torch.tensor(SOBEL, device=grey.device, dtype=grey.dtype)
    kernels = torch.stack([across, across.T])[:, None]
    gradient = functional.conv2d(functional.pad(grey, [1] * 4, mode="replicate"), kernels)
    dx, dy = gradient[:, :1], gradient[:, 1:]
    eighths = torch.round(torch.atan2(dy, dx) * (4 / math.pi)).long() % 8
    return (dx * dx + dy * dy + SMALLEST).sqrt(), eighths


def _is_ridge(slope: Tensor, direction: Tensor) -> Tensor:
    """Where the slope is greater than behind, and no less than ahead, in its direction.

    An edge that lies just between two pixels is as steep at both; one of them has it.
    """
    rows, columns = slope.shape[-2:]
    padded = functional.pad(slope, [1] * 4)
    around = torch.cat(
        [padded[..., 1 + y : 1 + y + rows, 1 + x : 1 + x + columns] for y, x in NEIGHBOURS], dim=1
    )
    ahead = around.gather(1, direction)
    behind = around.gather(1, (direction + 4) % 8)
    return (slope >= ahead) & (slope > behind)


def _connected(weak: Tensor, strong: Tensor) -> Tensor:
    """Strong edges and the weak ones that hang together with them."""
    edges = strong
    while True:
        grown = functional.max_pool2d(edges.float(), 3, stride=1, padding=1).bool() & weak
        grown = grown | edges
        if torch.equal(grown, edges):
            return edges
        edges = grown


class Canny(io.ComfyNode):
    """White edges on black."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def threshold(id: str, default: float) -> io.Float.Input:
            return io.Float.Input(id, default=default, min=0.01, max=0.99, step=0.01)

        return io.Schema(
            node_id="Canny",
            category="image/preprocessors",
            inputs=[
                io.Image.Input("image"),
                threshold("low_threshold", 0.4),
                threshold("high_threshold", 0.8),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor, low_threshold: float, high_threshold: float) -> io.NodeOutput:
        edges = canny(image.to(placement.get_torch_device()).float(), low_threshold, high_threshold)
        whole = edges.repeat(1, 3, 1, 1).movedim(1, -1)
        return io.NodeOutput(whole.to(placement.intermediate_device()))

    detect_edge = execute


comfy_entrypoint = entrypoint_of(Canny)
