"""Nodes that make operations on latents, and apply them to a latent or at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from comfy_api.latest import io
from comfy_extras.gaussian import filter_channels, sharpening_kernel
from comfy_nodes.latent_basics import (
    replaced,
    samples_of,
)

Latent = dict[str, Any]
Operation = Callable[..., Tensor]


def schema(node_id: str, inputs: list[io.Input], output: io.Output) -> io.Schema:
    """Declaration of a node of this module."""
    return io.Schema(
        node_id=node_id,
        category="latent/advanced/operations",
        inputs=inputs,
        outputs=[output],
        is_experimental=True,
    )


class LatentApplyOperation(io.ComfyNode):
    """Applies an operation to a latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs: list[io.Input] = [io.Latent.Input("samples"), io.LatentOperation.Input("operation")]
        return schema("LatentApplyOperation", inputs, io.Latent.Output())

    @classmethod
    def execute(cls, samples: Latent, operation: Operation) -> io.NodeOutput:
        return io.NodeOutput(replaced(samples, operation(latent=samples["samples"])))


class LatentApplyOperationCFG(io.ComfyNode):
    """Applies an operation to the guidance at every step."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs: list[io.Input] = [io.Model.Input("model"), io.LatentOperation.Input("operation")]
        return schema("LatentApplyOperationCFG", inputs, io.Model.Output())

    @classmethod
    def execute(cls, model: Any, operation: Operation) -> io.NodeOutput:
        changed = model.clone()

        def before_guidance(facts: dict[str, Any]) -> list[Tensor]:
            conds = facts["conds_out"]
            if len(conds) == 2:
                conds[0] = operation(latent=(conds[0] - conds[1])) + conds[1]
            else:
                conds[0] = operation(latent=conds[0])
            return conds

        changed.set_model_sampler_pre_cfg_function(before_guidance)
        return io.NodeOutput(changed)


class LatentOperationTonemapReinhard(io.ComfyNode):
    """Compresses large values, as tone mapping does with light.

    Source: Reinhard et al. 2002, https://doi.org/10.1145/566654.566575, equation 3.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        factor = io.Float.Input("multiplier", default=1.0, min=0.0, max=100.0, step=0.01)
        return schema("LatentOperationTonemapReinhard", [factor], io.LatentOperation.Output())

    @classmethod
    def execute(cls, multiplier: float) -> io.NodeOutput:
        def tonemap(latent: Tensor, **kwargs: Any) -> Tensor:  # noqa: ARG001 - public signature
            length = torch.linalg.vector_norm(latent, dim=1, keepdim=True) + 1e-10
            axes = tuple(range(1, latent.ndim))
            mean = length.mean(axes, keepdim=True)
            spread = length.std(axes, keepdim=True) if length[0].numel() > 1 else 0.0
            top = (spread * 5 + mean) * multiplier  # what would be white
            return latent * (top / (length + top))

        return io.NodeOutput(tonemap)


class LatentOperationSharpen(io.ComfyNode):
    """Sharpens the directions of the channel vectors and keeps their lengths."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs: list[io.Input] = [
            io.Int.Input("sharpen_radius", default=9, min=1, max=31, step=1),
            io.Float.Input("sigma", default=1.0, min=0.1, max=10.0, step=0.1),
            io.Float.Input("alpha", default=0.1, min=0.0, max=5.0, step=0.01),
        ]
        return schema("LatentOperationSharpen", inputs, io.LatentOperation.Output())

    @classmethod
    def execute(cls, sharpen_radius: int, sigma: float, alpha: float) -> io.NodeOutput:
        def sharpen(latent: Tensor, **kwargs: Any) -> Tensor:  # noqa: ARG001 - public signature
            samples_of({"samples": latent}, "samples")
            length = torch.linalg.vector_norm(latent, dim=1, keepdim=True) + 1e-6
            kernel = sharpening_kernel(sharpen_radius, sigma, alpha).to(latent)
            return filter_channels(latent / length, kernel) * length

        return io.NodeOutput(sharpen)
