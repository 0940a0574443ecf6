"""Conditioning of instruct-pix2pix: the picture to edit lies beside the noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import node_helpers
from comfy_api.latest import io
from comfy_extras.declarations import pair_and_latent_outputs, pair_inputs
from comfy_extras.extension import entrypoint_of
from comfy_nodes.vae import check_sides

CELL = 8  # pixels per latent cell and axis


def whole_cells(pixels: Tensor) -> Tensor:
    """The middle of pictures [B, H, W, C], cut to whole latent cells."""
    check_sides(pixels, CELL)
    rows, columns = pixels.shape[1] % CELL, pixels.shape[2] % CELL
    top, left = rows // 2, columns // 2
    height, width = pixels.shape[1] - rows, pixels.shape[2] - columns
    return pixels[:, top : top + height, left : left + width]


class InstructPixToPixConditioning(io.ComfyNode):
    """Adds the picture to edit to both conditionings."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="InstructPixToPixConditioning",
            category="conditioning/instructpix2pix",
            inputs=[*pair_inputs(), io.Vae.Input("vae"), io.Image.Input("pixels")],
            outputs=pair_and_latent_outputs(),
        )

    @classmethod
    def execute(cls, positive: Any, negative: Any, pixels: Tensor, vae: Any) -> io.NodeOutput:
        latent = vae.encode(whole_cells(pixels))
        values = {"concat_latent_image": latent}
        return io.NodeOutput(
            node_helpers.conditioning_set_values(positive, values),
            node_helpers.conditioning_set_values(negative, values),
            {"samples": torch.zeros_like(latent)},
        )

    encode = execute


comfy_entrypoint = entrypoint_of(InstructPixToPixConditioning)
