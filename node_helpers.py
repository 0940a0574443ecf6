"""Small functions that built-in and custom nodes share."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from PIL import Image, ImageFile, UnidentifiedImageError
from torch import Tensor

from comfy import progress
from comfy.cli_args import args

logger = logging.getLogger(__name__)

Source = TypeVar("Source")
Result = TypeVar("Result")

COLOURS = 3  # channels of a picture before its transparency
DTYPES_BY_NAME = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


def conditioning_set_values(
    conditioning: list[list[Any]], values: dict[str, Any] | None = None, append: bool = False
) -> list[list[Any]]:
    """Copies a conditioning with options set on every entry.

    Args:
        conditioning: Entries [tensor, options]; neither list nor options are modified.
        values: Options to set.
        append: Add each value, which must be a list, to the one an entry already has.
    """
    changed = []
    for entry in conditioning:
        options = dict(entry[1])
        for name, value in (values or {}).items():
            earlier = options.get(name) if append else None
            options[name] = value if earlier is None else earlier + value
        changed.append([entry[0], options])
    return changed


def pillow(fn: Callable[[Source], Result], arg: Source) -> Result:
    """Calls a Pillow function on a file, accepting one that ends early, and saying so.

    Some programs write pictures whose last bytes are missing; Pillow refuses them unless told
    otherwise.

    Args:
        fn: For example `Image.open`.
        arg: What it is called with.

    Raises:
        OSError: The file cannot be read even so.
    """
    try:
        return fn(arg)
    except (OSError, UnidentifiedImageError, ValueError):
        before = ImageFile.LOAD_TRUNCATED_IMAGES
        ImageFile.LOAD_TRUNCATED_IMAGES = True
        try:
            result = fn(arg)
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = before
        name = getattr(arg, "filename", "") or "a picture"
        progress.warn(logger, "%s ends early: what its file lacks is left grey", name)
        return result


def load_pixels(picture: Image.Image, mode: str) -> Image.Image:
    """Decodes a picture in a colour mode, accepting one whose data end early."""
    return pillow(lambda opened: opened.convert(mode), picture)


def hasher() -> Any:
    """Constructor of the digest that names files by content (chosen on the command line)."""
    return getattr(hashlib, args.default_hashing_function)


def file_digest(path: str) -> str:
    """Hexadecimal digest of a file's content."""
    digest = hasher()()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return str(digest.hexdigest())


def string_to_torch_dtype(name: str) -> torch.dtype | None:
    """Dtype of a short name such as `fp16`; None for others."""
    return DTYPES_BY_NAME.get(name)


def image_alpha_fix(destination: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Gives two pictures [B, H, W, C] the same number of channels.

    A destination without alpha takes the source without alpha; a source without alpha becomes
    opaque.
    """
    return destination, with_channels(source, destination.shape[-1])


def with_channels(image: Tensor, count: int) -> Tensor:
    """Pictures [B, H, W, C] with `count` channels: what is missing becomes opaque, what is too
    much is cut off, and grey becomes a colour.
    """
    given = image.shape[-1]
    if given < COLOURS <= count:
        grey = image[..., :1].expand(*image.shape[:-1], COLOURS)
        image = torch.cat([grey, image[..., 1:]], dim=-1)
    if image.shape[-1] < count:
        opaque = torch.ones_like(image[..., :1]).expand(*image.shape[:-1], count - image.shape[-1])
        image = torch.cat([image, opaque], dim=-1)
    return image[..., :count]
