"""Guidance scaled apart for coarse and fine structure.

Source: Huang et al. 2025, https://arxiv.org/abs/2504.02154.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy.devices import formulas
from comfy_api.latest import ComfyExtension, io
from comfy_extras.guidance import Facts, with_pre_cfg


def scale_frequencies(x: Tensor, low: float, high: float, cutoff: int) -> Tensor:
    """Frequencies below `cutoff` times `low`, the others times `high`.

    Of a video only the frames around the middle have low frequencies, as it has always been: the
    box is narrowed along time too, though that axis holds moments. By the paper every frame has
    them.

    Args:
        x: [B, C, ..., H, W], scaled per row and column axis, or [B, C, L], along L.
    """
    axes = tuple(range(max(2, x.ndim - 2), x.ndim))
    spectrum = torch.fft.fftshift(torch.fft.fftn(x.float(), dim=axes), dim=axes)
    boxed = x.shape[axes[0] :] if formulas.as_published() else x.shape[2:]
    scale = torch.full(boxed, high, device=x.device)
    middles = [(size // 2, min(cutoff, size // 2)) for size in boxed]
    scale[tuple(slice(middle - reach, middle + reach) for middle, reach in middles)] = low
    scaled = torch.fft.ifftshift(spectrum * scale, dim=axes)
    return torch.fft.ifftn(scaled, dim=axes).real.to(x.dtype)


class FreSca(io.ComfyNode):
    """Scales coarse and fine guidance apart."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def scale(id: str, default: float) -> io.Float.Input:
            return io.Float.Input(id, default=default, min=0, max=10, step=0.01)

        return io.Schema(
            node_id="FreSca",
            display_name="FreSca",
            category="_for_testing",
            description="Scales the coarse and the fine part of the guidance.",
            is_experimental=True,
            inputs=[
                io.Model.Input("model"),
                scale("scale_low", 1.0),
                scale("scale_high", 1.25),
                io.Int.Input("freq_cutoff", default=20, min=1, max=10000, step=1),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls, model: Any, scale_low: float, scale_high: float, freq_cutoff: int
    ) -> io.NodeOutput:
        def change(facts: Facts) -> list[Tensor]:
            cond, uncond, *others = facts["conds_out"]
            guidance = scale_frequencies(cond - uncond, scale_low, scale_high, freq_cutoff)
            return [guidance + uncond, uncond, *others]

        return with_pre_cfg(model, change)


class FreScaExtension(ComfyExtension):
    """The node of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [FreSca]


async def comfy_entrypoint() -> FreScaExtension:
    """Called by the loader of built-in modules."""
    return FreScaExtension()
