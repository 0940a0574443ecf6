"""Networks that enlarge or restore pictures, in any of the architectures that spandrel knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy import tiling
from comfy.devices import memory, placement, residency
from comfy.progress import ProgressBar
from comfy.weights.contents import contents_in_words
from comfy.weights.errors import WeightFileError
from comfy.weights.state_dict import load_torch_file
from comfy_nodes.picture_basics import colours_of

TILE, OVERLAP, LEAST_TILE = 512, 32, 128  # pixels
# Activations of one tile, in bytes of a picture of the tile's size and the model's scale; measured
# on the largest common architectures.
ACTIVATIONS = 384.0
PARALLEL_PREFIX = "module."  # before keys of networks saved while trained on several devices


def network_of(state_dict: Mapping[str, Tensor]) -> Any:
    """The network of some weights, as spandrel's description of it.

    Raises:
        ValueError: No known architecture has these weights, or it does not turn one picture into
            one picture.
    """
    import spandrel

    weights = dict(state_dict)
    if weights and all(key.startswith(PARALLEL_PREFIX) for key in weights):
        weights = {key.removeprefix(PARALLEL_PREFIX): value for key, value in weights.items()}
    try:
        found = spandrel.ModelLoader().load_from_state_dict(weights)
    except spandrel.UnsupportedModelError as error:
        known = contents_in_words(sorted(weights))
        raise ValueError(f"no known architecture: {known}") from error
    if not isinstance(found, spandrel.ImageModelDescriptor):
        raise ValueError(
            f"this {found.architecture.name} network needs more than one picture; expected one "
            "that enlarges or restores a single picture"
        )
    return found.eval()


def load_network(path: str) -> Any:
    """The network of a file.

    Raises:
        WeightFileError: The file cannot be read or holds no such network.
    """
    tensors = load_torch_file(path, safe_load=True)
    try:
        return network_of(tensors)
    except ValueError as error:
        raise WeightFileError(
            path, str(error), "choose a model that enlarges pictures, such as ESRGAN or SwinIR"
        ) from error


def enlarge(network: Any, image: Tensor) -> Tensor:
    """Pictures [B, H, W, C] enlarged, tile by tile; smaller tiles when memory runs short.

    Raises:
        torch.OutOfMemoryError: Not even the smallest tile has room.
    """
    device = placement.get_torch_device()
    pixels = colours_of(image).movedim(-1, 1)
    tile_bytes = TILE * TILE * 3 * image.element_size() * max(network.scale, 1.0) * ACTIVATIONS
    needed = memory.module_size(network.model) + tile_bytes + image.nelement() * 4
    residency.free_memory(needed, device)
    network.to(device)
    try:
        return _in_tiles(network, pixels.to(device)).movedim(1, -1).clamp(0.0, 1.0)
    finally:
        network.to("cpu")


@torch.no_grad()
def _in_tiles(network: Any, pixels: Tensor) -> Tensor:
    side = TILE
    while True:
        rows, columns = pixels.shape[2:]
        steps = pixels.shape[0] * tiling.get_tiled_scale_steps(columns, rows, side, side, OVERLAP)
        try:
            return tiling.tiled_scale(
                pixels,
                lambda tile: network(tile.float()),
                tile_x=side,
                tile_y=side,
                overlap=OVERLAP,
                upscale_amount=network.scale,
                output_device=placement.intermediate_device(),
                pbar=ProgressBar(steps),
            )
        except memory.OOM_EXCEPTION:
            side //= 2
            if side < LEAST_TILE:
                raise
