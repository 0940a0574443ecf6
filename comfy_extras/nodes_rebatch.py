"""Nodes that regroup batches: a list of batches becomes a list of batches of one size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from comfy import resize
from comfy.sampling.masks import SPATIAL_MODES
from comfy_api.latest import ComfyExtension, io
from comfy_nodes.latent_basics import CELL, Latent, batch_indices, noise_mask_of


class LatentRebatch(io.ComfyNode):
    """Regroups latents; a new batch starts where the size changes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="RebatchLatents",
            display_name="Rebatch Latents",
            category="latent/batch",
            is_input_list=True,
            inputs=[
                io.Latent.Input("latents"),
                io.Int.Input("batch_size", default=1, min=1, max=4096),
            ],
            outputs=[io.Latent.Output(is_output_list=True)],
        )

    @classmethod
    def execute(cls, latents: list[Latent], batch_size: list[int]) -> io.NodeOutput:
        groups: list[list[Latent]] = []
        for item in _single_latents(latents):
            last = groups[-1] if groups else []
            fits = last and last[0]["samples"].shape[1:] == item["samples"].shape[1:]
            if fits and len(last) < batch_size[0]:
                last.append(item)
            else:
                groups.append([item])
        return io.NodeOutput([_joined(group) for group in groups])


def _single_latents(latents: list[Latent]) -> Iterator[Latent]:
    """One latent after the other, each with its mask and the index of its noise."""
    first = 0
    for latent in latents:
        samples = latent["samples"]
        count = samples.shape[0]
        mask = noise_mask_of(latent, "latents")
        if mask is None:
            mask = _everything(samples)
        mask = resize.repeat_to_batch_size(mask, count)
        indices = batch_indices(latent, first)
        first += count
        for number, index in enumerate(indices):
            one = slice(number, number + 1)
            yield {"samples": samples[one], "noise_mask": mask[one], "batch_index": [index]}


def _everything(samples: Tensor) -> Tensor:
    """A noise mask that lets everything change, in pixels; that of a video serves all moments."""
    if samples.ndim == 3:
        return torch.ones(1, 1, samples.shape[-1])
    time = (1,) * (samples.ndim - 4)
    return torch.ones(1, 1, *time, samples.shape[-2] * CELL, samples.shape[-1] * CELL)


def _joined(group: list[Latent]) -> Latent:
    channels = max(item["noise_mask"].shape[1] for item in group)
    size = tuple(group[0]["noise_mask"].shape[2:])
    mode = SPATIAL_MODES[len(size)]
    masks = [
        resize.repeat_to_batch_size(
            torch.nn.functional.interpolate(item["noise_mask"], size=size, mode=mode), channels, 1
        )
        for item in group
    ]
    joined: Latent = {
        "samples": torch.cat([item["samples"] for item in group]),
        "batch_index": [index for item in group for index in item["batch_index"]],
    }
    mask = torch.cat(masks)
    if bool((mask != 1).any()):  # else it would only cost time
        joined["noise_mask"] = mask
    return joined


class ImageRebatch(io.ComfyNode):
    """Regroups pictures; a new batch starts where the size changes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="RebatchImages",
            display_name="Rebatch Images",
            category="image/batch",
            is_input_list=True,
            inputs=[
                io.Image.Input("images"),
                io.Int.Input("batch_size", default=1, min=1, max=4096),
            ],
            outputs=[io.Image.Output(is_output_list=True)],
        )

    @classmethod
    def execute(cls, images: list[Tensor], batch_size: list[int]) -> io.NodeOutput:
        groups: list[list[Tensor]] = []
        for picture in (picture for batch in images for picture in batch.split(1)):
            last = groups[-1] if groups else []
            if last and last[0].shape == picture.shape and len(last) < batch_size[0]:
                last.append(picture)
            else:
                groups.append([picture])
        return io.NodeOutput([torch.cat(group) for group in groups])


class RebatchExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [LatentRebatch, ImageRebatch]


async def comfy_entrypoint() -> RebatchExtension:
    """Called by the loader of built-in modules."""
    return RebatchExtension()
