"""Nodes that work on all pictures of a training set at once: order, duplicates, contact sheet."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from comfy.devices import memory
from comfy_api.latest import io
from comfy_extras.dataset.pictures import resized
from comfy_extras.dataset.schema import image_schema, numpy_seed, only, seed_input

HASH_SIDE = 8  # rows and columns of the small picture that is compared
GREY = (0.299, 0.587, 0.114)


def single_pictures(images: list[Tensor]) -> list[Tensor]:
    """Each picture [1, H, W, C] of a list of batches."""
    return [batch[number : number + 1] for batch in images for number in range(batch.shape[0])]


def shuffled(count: int, seed: int) -> list[int]:
    """Numbers 0..count - 1 in an order chosen by a seed."""
    return [int(n) for n in np.random.RandomState(numpy_seed(seed)).permutation(count)]


class ShuffleDataset(io.ComfyNode):
    """Pictures in another order."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return image_schema(
            "ShuffleDataset",
            "Shuffle Image Dataset",
            "Puts the pictures of a list in an order chosen by the seed.",
            [seed_input()],
            is_input_list=True,
            is_output_list=True,
        )

    @classmethod
    def execute(cls, images: list[Tensor], seed: list[int]) -> io.NodeOutput:
        return io.NodeOutput([images[n] for n in shuffled(len(images), only(seed))])


class ShuffleImageTextDataset(io.ComfyNode):
    """Pictures and their texts in another order."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ShuffleImageTextDataset",
            display_name="Shuffle Image-Text Dataset",
            category="dataset/image",
            description="Puts pictures and texts in one order chosen by the seed.",
            is_experimental=True,
            is_input_list=True,
            inputs=[io.Image.Input("images"), io.String.Input("texts"), seed_input()],
            outputs=[
                io.Image.Output(display_name="images", is_output_list=True),
                io.String.Output(display_name="texts", is_output_list=True),
            ],
        )

    @classmethod
    def execute(cls, images: list[Tensor], texts: list[str], seed: list[int]) -> io.NodeOutput:
        if len(images) != len(texts):
            raise ValueError(
                f"texts: expected as many as there are pictures ({len(images)}), found {len(texts)}"
            )
        order = shuffled(len(images), only(seed))
        return io.NodeOutput([images[n] for n in order], [texts[n] for n in order])


def picture_hash(picture: Tensor) -> Tensor:
    """Which of 8 x 8 places of a picture [1, H, W, C] are brighter than their mean."""
    weights = torch.tensor(GREY, device=picture.device, dtype=picture.dtype)
    grey = (picture[..., :3] * weights).sum(dim=-1, keepdim=True).repeat(1, 1, 1, 3)
    small = resized(grey, HASH_SIDE, HASH_SIDE)[..., 0].flatten()
    return small > small.mean()


class ImageDeduplication(io.ComfyNode):
    """Pictures without those that look like an earlier one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return image_schema(
            "ImageDeduplication",
            "Image Deduplication",
            "Leaves out pictures that look like an earlier one.",
            [
                io.Float.Input(
                    "similarity_threshold",
                    default=0.95,
                    min=0.0,
                    max=1.0,
                    tooltip="Share of equal places from which on two pictures are the same.",
                )
            ],
            is_input_list=True,
            is_output_list=True,
        )

    @classmethod
    def execute(cls, images: list[Tensor], similarity_threshold: list[float]) -> io.NodeOutput:
        kept: list[Tensor] = []
        hashes: list[Tensor] = []
        for picture in single_pictures(images):
            own = picture_hash(picture)
            limit = only(similarity_threshold)
            if not any((own == other).float().mean() >= limit for other in hashes):
                kept.append(picture)
                hashes.append(own)
        return io.NodeOutput(kept)


class ImageGrid(io.ComfyNode):
    """All pictures on one sheet."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return image_schema(
            "ImageGrid",
            "Image Grid",
            "Lays the pictures out in rows on one black sheet.",
            [
                io.Int.Input("columns", default=4, min=1, max=20),
                io.Int.Input("cell_width", default=256, min=32, max=2048),
                io.Int.Input("cell_height", default=256, min=32, max=2048),
                io.Int.Input("padding", default=4, min=0, max=50),
            ],
            is_input_list=True,
        )

    @classmethod
    def execute(
        cls,
        images: list[Tensor],
        columns: list[int],
        cell_width: list[int],
        cell_height: list[int],
        padding: list[int],
    ) -> io.NodeOutput:
        pictures = single_pictures(images)
        if not pictures:
            raise ValueError("there are no pictures to lay out; connect at least one")
        across, width, height, gap = map(only, (columns, cell_width, cell_height, padding))
        rows = -(-len(pictures) // across)
        shape = (1, rows * (height + gap) - gap, across * (width + gap) - gap, 3)
        memory.require_room(shape, "the sheet")
        sheet = torch.zeros(shape)
        for number, picture in enumerate(pictures):
            top = number // across * (height + gap)
            left = number % across * (width + gap)
            cell = resized(picture[..., :3], width, height)
            sheet[:, top : top + height, left : left + width] = cell
        return io.NodeOutput(sheet)


class MergeImageLists(io.ComfyNode):
    """One list of the pictures of all inputs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return image_schema(
            "MergeImageLists",
            "Merge Image Lists",
            "Gathers all pictures in one list.",
            [],
            is_input_list=True,
            is_output_list=True,
        )

    @classmethod
    def execute(cls, images: list[Tensor]) -> io.NodeOutput:
        return io.NodeOutput(images)


NODES: tuple[type[io.ComfyNode], ...] = (
    ShuffleDataset,
    ShuffleImageTextDataset,
    ImageDeduplication,
    ImageGrid,
    MergeImageLists,
)
