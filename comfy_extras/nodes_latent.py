"""Nodes that calculate with latents, join them and cut them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comfy import progress, resize
from comfy_api.latest import ComfyExtension, io
from comfy_extras.latent_operations import (
    LatentApplyOperation,
    LatentApplyOperationCFG,
    LatentOperationSharpen,
    LatentOperationTonemapReinhard,
)
from comfy_nodes.latent_basics import (
    KINDS,
    VIDEO,
    batch_indices,
    check_alike,
    check_beside,
    replaced,
    samples_of,
)
from comfy_nodes.limits import MAX_RESOLUTION

logger = logging.getLogger(__name__)

Latent = dict[str, Any]

AXES = {"x": -1, "y": -2, "t": -3}  # t only for video latents [B, C, T, H, W]


def axis_of(latent: Latent, dim: str, id: str) -> int:
    """Axis of a latent that one of its directions is.

    Args:
        dim: x, y or t; a sound has only x.
        id: Name of the input that the latent came through.

    Raises:
        ValueError: It has no such direction.
    """
    axis = AXES[dim]
    samples_of(latent, id, axes=tuple(count for count in KINDS if axis + count > 1))
    return axis


def reshape_latent_to(
    target_shape: tuple[int, ...] | torch.Size,
    latent: Tensor,
    repeat_batch: bool = True,
    id: str = "samples2",
) -> Tensor:
    """A latent at the size, and with `repeat_batch` the batch, of another.

    Raises:
        ValueError: They have different channels or axes; `id` names the input.
    """
    check_alike(target_shape, latent, id)
    if latent.shape[1:] != target_shape[1:]:
        columns, rows = target_shape[-1], target_shape[-2]
        latent = resize.common_upscale(latent, columns, rows, "bilinear", "center")
    return resize.repeat_to_batch_size(latent, target_shape[0]) if repeat_batch else latent


def schema(
    node_id: str,
    inputs: Sequence[io.Input],
    category: str = "latent/advanced",
    outputs: list[io.Output] | None = None,
    **options: Any,
) -> io.Schema:
    """Declaration of a node of this module; the output is a latent unless said otherwise."""
    outputs = outputs or [io.Latent.Output()]
    return io.Schema(
        node_id=node_id, category=category, inputs=[*inputs], outputs=outputs, **options
    )


def two_latents() -> list[io.Input]:
    """Declarations of two latents."""
    return [io.Latent.Input("samples1"), io.Latent.Input("samples2")]


class LatentAdd(io.ComfyNode):
    """Adds two latents."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema("LatentAdd", two_latents())

    @classmethod
    def execute(cls, samples1: Latent, samples2: Latent) -> io.NodeOutput:
        first = samples1["samples"]
        second = reshape_latent_to(first.shape, samples2["samples"])
        return io.NodeOutput(replaced(samples1, first + second))


class LatentSubtract(io.ComfyNode):
    """Subtracts one latent from another."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema("LatentSubtract", two_latents())

    @classmethod
    def execute(cls, samples1: Latent, samples2: Latent) -> io.NodeOutput:
        first = samples1["samples"]
        second = reshape_latent_to(first.shape, samples2["samples"])
        return io.NodeOutput(replaced(samples1, first - second))


class LatentMultiply(io.ComfyNode):
    """Multiplies a latent by a number."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        factor = io.Float.Input("multiplier", default=1.0, min=-10.0, max=10.0, step=0.01)
        return schema("LatentMultiply", [io.Latent.Input("samples"), factor])

    @classmethod
    def execute(cls, samples: Latent, multiplier: float) -> io.NodeOutput:
        return io.NodeOutput(replaced(samples, samples["samples"] * multiplier))


class LatentInterpolate(io.ComfyNode):
    """Mixes two latents, lengths of the channel vectors and directions apart."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        ratio = io.Float.Input("ratio", default=1.0, min=0.0, max=1.0, step=0.01)
        return schema("LatentInterpolate", [*two_latents(), ratio])

    @classmethod
    def execute(cls, samples1: Latent, samples2: Latent, ratio: float) -> io.NodeOutput:
        first = samples1["samples"]
        second = reshape_latent_to(first.shape, samples2["samples"])
        direction1, length1 = _directed(first)
        direction2, length2 = _directed(second)
        direction, _ = _directed(direction1 * ratio + direction2 * (1.0 - ratio))
        mixed = direction * (length1 * ratio + length2 * (1.0 - ratio))
        return io.NodeOutput(replaced(samples1, mixed))


def _directed(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors over the channels and their lengths; zero vectors stay zero."""
    length = torch.linalg.vector_norm(latent, dim=1, keepdim=True)
    return torch.nan_to_num(latent / length), length


class LatentConcat(io.ComfyNode):
    """Puts two latents side by side."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        sides = io.Combo.Input("dim", options=["x", "-x", "y", "-y", "t", "-t"])
        return schema("LatentConcat", [*two_latents(), sides])

    @classmethod
    def execute(cls, samples1: Latent, samples2: Latent, dim: str) -> io.NodeOutput:
        first, axis = samples1["samples"], axis_of(samples1, dim[-1], "samples1")
        second = resize.repeat_to_batch_size(samples2["samples"], first.shape[0])
        check_beside(first, second, axis, "samples2")
        parts = (second, first) if dim.startswith("-") else (first, second)
        return io.NodeOutput(replaced(samples1, torch.cat(parts, dim=axis)))


class LatentCut(io.ComfyNode):
    """Cuts a slice out of a latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            io.Latent.Input("samples"),
            io.Combo.Input("dim", options=["x", "y", "t"]),
            io.Int.Input("index", default=0, min=-MAX_RESOLUTION, max=MAX_RESOLUTION, step=1),
            io.Int.Input("amount", default=1, min=1, max=MAX_RESOLUTION, step=1),
        ]
        return schema("LatentCut", inputs)

    @classmethod
    def execute(cls, samples: Latent, dim: str, index: int, amount: int) -> io.NodeOutput:
        latent, axis = samples["samples"], axis_of(samples, dim, "samples")
        size = latent.shape[axis]
        start = min(index, size - 1) if index >= 0 else max(index, -size) + size
        cut = latent.narrow(axis, start, min(size - start, amount))
        return io.NodeOutput(replaced(samples, cut))


class LatentCutToBatch(io.ComfyNode):
    """Cuts a latent into slices that become items of the batch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            io.Latent.Input("samples"),
            io.Combo.Input("dim", options=["t", "x", "y"]),
            io.Int.Input("slice_size", default=1, min=1, max=MAX_RESOLUTION, step=1),
        ]
        return schema("LatentCutToBatch", inputs)

    @classmethod
    def execute(cls, samples: Latent, dim: str, slice_size: int) -> io.NodeOutput:
        axis = AXES[dim] + samples["samples"].ndim
        if axis < 2:  # a picture has one moment only, a sound one row
            return io.NodeOutput(samples)
        latent = samples["samples"].movedim(axis, 1)
        size = min(slice_size, latent.shape[1])
        whole = latent[:, : latent.shape[1] // size * size]
        slices = whole.reshape(-1, size, *whole.shape[2:]).movedim(1, axis)
        return io.NodeOutput(replaced(samples, slices))


class LatentBatch(io.ComfyNode):
    """Joins two batches of latents."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema("LatentBatch", two_latents(), "latent/batch", is_deprecated=True)

    @classmethod
    def execute(cls, samples1: Latent, samples2: Latent) -> io.NodeOutput:
        return io.NodeOutput(join_latents([samples1, samples2]))

    batch = execute


def join_latents(latents: list[Latent], id: str = "samples2") -> Latent:
    """One batch of all; sizes follow the first, and every item keeps the index of its noise.

    Args:
        id: Name of the input that errors name.
    """
    first = latents[0]["samples"]
    fitted = [reshape_latent_to(first.shape, item["samples"], False, id) for item in latents]
    joined = replaced(latents[0], torch.cat(fitted))
    joined["batch_index"] = [index for item in latents for index in batch_indices(item)]
    return joined


class LatentBatchSeedBehavior(io.ComfyNode):
    """Chooses whether the items of a batch get noise of their own or all the same."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        behaviour = io.Combo.Input("seed_behavior", options=["random", "fixed"], default="fixed")
        return schema("LatentBatchSeedBehavior", [io.Latent.Input("samples"), behaviour])

    @classmethod
    def execute(cls, samples: Latent, seed_behavior: str) -> io.NodeOutput:
        changed = dict(samples)
        changed.pop("batch_index", None)
        if seed_behavior == "fixed":
            changed["batch_index"] = batch_indices(samples)[:1] * samples["samples"].shape[0]
        return io.NodeOutput(changed)


class ReplaceVideoLatentFrames(io.ComfyNode):
    """Replaces frames of a video latent by those of another."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            io.Latent.Input("destination"),
            io.Latent.Input("source", optional=True),
            io.Int.Input("index", default=0, min=-MAX_RESOLUTION, max=MAX_RESOLUTION, step=1),
        ]
        return schema("ReplaceVideoLatentFrames", inputs, "latent/batch")

    @classmethod
    def execute(
        cls, destination: Latent, index: int, source: Latent | None = None
    ) -> io.NodeOutput:
        if source is None:
            return io.NodeOutput(destination)
        target = samples_of(destination, "destination", VIDEO)
        frames_of_source = samples_of(source, "source", VIDEO)
        check_beside(target, frames_of_source, AXES["t"], "source")
        frames, given = target.shape[2], frames_of_source.shape[2]
        start = index + frames if index < 0 else index
        if not 0 <= start <= frames - given:
            what = "no frames %d to %d in a latent of %d: nothing was replaced"
            progress.warn(logger, what, start, start + given, frames)
            return io.NodeOutput(destination)
        changed = target.clone()
        changed[:, :, start : start + given] = frames_of_source
        return io.NodeOutput(replaced(destination, changed))


class LatentExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            LatentAdd,
            LatentSubtract,
            LatentMultiply,
            LatentInterpolate,
            LatentConcat,
            LatentCut,
            LatentCutToBatch,
            LatentBatch,
            LatentBatchSeedBehavior,
            LatentApplyOperation,
            LatentApplyOperationCFG,
            LatentOperationTonemapReinhard,
            LatentOperationSharpen,
            ReplaceVideoLatentFrames,
        ]


async def comfy_entrypoint() -> LatentExtension:
    """Called by the loader of built-in modules."""
    return LatentExtension()
