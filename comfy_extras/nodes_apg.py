"""Adaptive projected guidance: less of the guidance that only saturates.

Source: Sadat et al. 2024, https://arxiv.org/abs/2410.02416.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy.devices import formulas
from comfy.patching.wrappers import CallbacksMP
from comfy_api.latest import ComfyExtension, io
from comfy_extras.guidance import Facts, with_pre_cfg


def axes_of(estimate: Tensor) -> tuple[int, ...]:
    """Axes that a length is taken over: by the paper all of an item, and by default the last three.

    The last three are an item of a picture, a channel of a video, and all items of sound.
    """
    first = 1 if formulas.as_published() else max(0, estimate.ndim - 3)
    return tuple(range(first, estimate.ndim))


def project(vector: Tensor, onto: Tensor) -> tuple[Tensor, Tensor]:
    """Parts of a vector along and across another; see `axes_of` for what a vector is."""
    normalize = torch.nn.functional.normalize
    axes = axes_of(onto)
    direction = normalize(onto, dim=axes)  # type: ignore[arg-type]  # documented to take axes
    along = (vector * direction).sum(dim=axes, keepdim=True) * direction
    return along, vector - along


class Momentum:
    """Running sum of the guidance; starts anew with each run and when the noise level rises."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._sum: Tensor | None = None
        self._last_sigma: float | None = None

    def forget(self, *_: Any) -> None:
        """Let go of what a run left: the next may begin at the level where it ended."""
        self._sum, self._last_sigma = None, None

    def add(self, guidance: Tensor, sigma: float) -> Tensor:
        """The guidance with what is left of earlier steps."""
        if self._last_sigma is not None and sigma > self._last_sigma:
            self._sum = None
        self._last_sigma = sigma
        if self.factor == 0:
            return guidance
        self._sum = guidance if self._sum is None else self.factor * self._sum + guidance
        return self._sum


class APG(io.ComfyNode):
    """Adaptive projected guidance."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="APG",
            display_name="Adaptive Projected Guidance",
            category="sampling/custom_sampling",
            inputs=[
                io.Model.Input("model"),
                io.Float.Input(
                    "eta",
                    default=1.0,
                    min=-10.0,
                    max=10.0,
                    step=0.01,
                    tooltip="How much is kept of the part along the estimate; 1 keeps it all.",
                ),
                io.Float.Input(
                    "norm_threshold",
                    default=5.0,
                    min=0.0,
                    max=50.0,
                    step=0.1,
                    tooltip="Largest length of the guidance; 0 sets no limit.",
                ),
                io.Float.Input(
                    "momentum",
                    default=0.0,
                    min=-5.0,
                    max=1.0,
                    step=0.01,
                    tooltip="How much of the last guidance is added; negative takes it away.",
                ),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls, model: Any, eta: float, norm_threshold: float, momentum: float
    ) -> io.NodeOutput:
        memory = Momentum(momentum)

        def change(facts: Facts) -> list[Tensor]:
            cond, uncond, *others = facts["conds_out"]
            if facts["cond_scale"] == 0:  # the negative estimate alone: nothing to project
                return facts["conds_out"]
            guidance = memory.add(cond - uncond, float(facts["sigma"].flatten()[0]))
            if norm_threshold > 0.0:
                length = guidance.norm(p=2, dim=axes_of(guidance), keepdim=True)
                guidance = guidance * (norm_threshold / length).clamp(max=1.0)
            along, across = project(guidance, cond)
            kept = across + eta * along
            # Guidance multiplies by the scale afterwards; the plain difference counts once.
            return [uncond + kept + (cond - uncond) / facts["cond_scale"], uncond, *others]

        changed = with_pre_cfg(model, change)
        changed[0].add_callback(CallbacksMP.ON_CLEANUP, memory.forget)
        return changed


class ApgExtension(ComfyExtension):
    """The node of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [APG]


async def comfy_entrypoint() -> ApgExtension:
    """Called by the loader of built-in modules."""
    return ApgExtension()
