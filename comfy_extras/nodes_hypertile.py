"""HyperTile: self-attention within tiles, whose number is drawn anew at each layer.

Source: https://github.com/tfernd/HyperTile (the idea; the code is our own).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from comfy.devices import formulas
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

CELL = 8  # pixels to a latent cell
SMALLEST_TILE = 32  # pixels


def random_divisor(value: int, min_value: int, max_options: int = 1) -> int:
    """Number of parts of a length: one of the largest `max_options`, parts of at least min_value.

    Drawn from the global generator; the last of them is drawn by the published rule only.
    """
    smallest = min(min_value, value)
    parts = [value // size for size in range(smallest, value + 1) if value % size == 0]
    parts = parts[:max_options]
    if len(parts) < 2:
        return parts[0]
    drawn = len(parts) if formulas.as_published() else len(parts) - 1
    return parts[int(torch.randint(0, drawn, size=(1,)))]


class Tiling:
    """Divides the tokens of self-attention into tiles and joins the results.

    Args:
        tile_size: Least side of a tile in pixels.
        swap_size: From how many numbers of tiles one is drawn.
        max_depth: Deepest level of the network, in halvings, that is tiled.
        scale_depth: Tiles keep their size in pixels at deeper levels.
    """

    def __init__(self, tile_size: int, swap_size: int, max_depth: int, scale_depth: bool) -> None:
        self.tile = max(SMALLEST_TILE, tile_size) // CELL
        self.swap_size, self.max_depth, self.scale_depth = swap_size, max_depth, scale_depth
        self._grid: dict[str, int] | None = None

    def divide(
        self, q: Tensor, k: Tensor, v: Tensor, extra_options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of an attention [B, L, D] -> [B * tiles, L / tiles, D]."""
        height, width = extra_options["original_shape"][-2:]
        tokens = q.shape[-2]
        self._grid = None  # also after a call that failed between dividing and joining
        sizes = [(height / 2**depth) * (width / 2**depth) for depth in range(self.max_depth + 1)]
        if tokens not in sizes:
            return q, k, v
        aspect = width / height
        w, h = round(math.sqrt(tokens * aspect)), round(math.sqrt(tokens / aspect))
        if not formulas.as_published():  # rows have always been taken for columns
            h, w = w, h
        factor = 2 ** sizes.index(tokens) if self.scale_depth else 1
        nh = random_divisor(h, self.tile * factor, self.swap_size)
        nw = random_divisor(w, self.tile * factor, self.swap_size)
        if nh * nw > 1:
            self._grid = {"nh": nh, "nw": nw, "h": h // nh, "w": w // nw}
            q, k, v = (
                rearrange(x, "b (nh h nw w) c -> (b nh nw) (h w) c", **self._grid)
                for x in (q, k, v)
            )
        return q, k, v

    def join(self, out: Tensor, extra_options: Any) -> Tensor:
        """The result of a divided attention back as [B, L, D]."""
        del extra_options
        if self._grid is None:
            return out
        grid, self._grid = self._grid, None
        return rearrange(out, "(b nh nw) (h w) c -> b (nh h nw w) c", **grid)


class HyperTile(io.ComfyNode):
    """Makes large pictures faster by attending within tiles."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HyperTile",
            category="model_patches/unet",
            inputs=[
                io.Model.Input("model"),
                io.Int.Input("tile_size", default=256, min=1, max=2048),
                io.Int.Input("swap_size", default=2, min=1, max=128),
                io.Int.Input("max_depth", default=0, min=0, max=10),
                io.Boolean.Input("scale_depth", default=False),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls, model: Any, tile_size: int, swap_size: int, max_depth: int, scale_depth: bool
    ) -> io.NodeOutput:
        tiling = Tiling(tile_size, swap_size, max_depth, scale_depth)
        view = model.clone()
        view.set_model_attn1_patch(tiling.divide)
        view.set_model_attn1_output_patch(tiling.join)
        return io.NodeOutput(view)

    patch = execute


comfy_entrypoint = entrypoint_of(HyperTile)
