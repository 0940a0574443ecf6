"""Nodes that join any number of pictures, masks or latents to one batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import node_helpers
from comfy_api.latest import io
from comfy_extras.nodes_latent import join_latents
from comfy_nodes.image import resized
from comfy_nodes.picture_basics import masks_of

LARGEST_BATCH_INPUTS = 50


def _autogrow(id: str, item: io.Input, prefix: str) -> io.Autogrow.Input:
    """Declaration of a growing list of inputs, at least two."""
    template = io.Autogrow.TemplatePrefix(item, prefix=prefix, min=2, max=LARGEST_BATCH_INPUTS)
    return io.Autogrow.Input(id, template=template)


def _batch(parts: list[Tensor]) -> Tensor:
    """Pictures [B, H, W, C] in one batch, at the size of the first."""
    rows, columns = parts[0].shape[1:3]
    channels = max(part.shape[-1] for part in parts)
    fitted = []
    for part in parts:
        whole = node_helpers.with_channels(part, channels)
        if part.shape[1:3] != (rows, columns):
            whole = resized(whole, columns, rows, "bilinear", "center")
        fitted.append(whole)
    return torch.cat(fitted)


class BatchImagesNode(io.ComfyNode):
    """Joins pictures to a batch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BatchImagesNode",
            display_name="Batch Images",
            category="image",
            inputs=[_autogrow("images", io.Image.Input("image"), "image")],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, images: dict[str, Tensor]) -> io.NodeOutput:
        return io.NodeOutput(_batch(list(images.values())))


class BatchMasksNode(io.ComfyNode):
    """Joins masks to a batch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BatchMasksNode",
            display_name="Batch Masks",
            category="mask",
            inputs=[_autogrow("masks", io.Mask.Input("mask"), "mask")],
            outputs=[io.Mask.Output()],
        )

    @classmethod
    def execute(cls, masks: dict[str, Tensor]) -> io.NodeOutput:
        flat = [masks_of(mask)[..., None].float() for mask in masks.values()]
        return io.NodeOutput(_batch(flat).squeeze(-1))


class BatchLatentsNode(io.ComfyNode):
    """Joins latents to a batch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BatchLatentsNode",
            display_name="Batch Latents",
            category="latent",
            inputs=[_autogrow("latents", io.Latent.Input("latent"), "latent")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, latents: dict[str, dict[str, Any]]) -> io.NodeOutput:
        return io.NodeOutput(join_latents(list(latents.values()), "latents"))
