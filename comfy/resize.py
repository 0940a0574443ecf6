"""Resizing pictures and latents ``[B, C, H, W]`` (video: ``[B, C, T, H, W]``), and batches."""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from comfy.devices import formulas, memory

COPIES = {"lanczos": 2, "bislerp": 8}
"""Times the result's size that making it takes, where that is more than the result."""

PARALLEL = 1e-5  # vectors whose cosine is within this of 1 or -1 have no plane to rotate in


def common_upscale(
    samples: Tensor, width: int, height: int, upscale_method: str, crop: str
) -> Tensor:
    """Resize to width x height.

    Args:
        samples: ``[B, C, H, W]``, or with further axes between C and H, which are kept.
        upscale_method: nearest-exact, bilinear, area, bicubic (torch's), lanczos (8 bit, through
            PIL) or bislerp.
        crop: "center" cuts to the new aspect ratio first; anything else stretches.

    Raises:
        ValueError: A side is below 1.
        NotEnoughMemory: There is no room for the result.
    """
    if width < 1 or height < 1:
        raise ValueError(
            f"cannot resize to {width} x {height}: both sides need at least 1; ask for a larger "
            "size or give a larger picture"
        )
    shape = (*samples.shape[:-2], height, width)
    name = "the resized picture or latent"
    memory.require_room(shape, name, samples.device, samples.dtype, COPIES.get(upscale_method, 1))
    between = samples.shape[2:-2]
    if between:
        batch, channels = samples.shape[:2]
        samples = samples.flatten(2, -3).transpose(1, 2).flatten(0, 1)
    if crop == "center":
        samples = _center_crop(samples, width, height)
    if upscale_method == "bislerp":
        resized = bislerp(samples, width, height)
    elif upscale_method == "lanczos":
        resized = lanczos(samples, width, height)
    else:
        resized = F.interpolate(samples, size=(height, width), mode=upscale_method)
    if between:
        resized = resized.unflatten(0, (batch, -1)).transpose(1, 2)
        resized = resized.reshape(batch, channels, *between, height, width)
    return resized


def _center_crop(samples: Tensor, width: int, height: int) -> Tensor:
    """Cut equal margins until the aspect ratio is that of width x height."""
    old_height, old_width = samples.shape[-2:]
    old_aspect, new_aspect = old_width / old_height, width / height
    x = y = 0
    if old_aspect > new_aspect:
        x = round((old_width - old_width * (new_aspect / old_aspect)) / 2)
    elif old_aspect < new_aspect:
        y = round((old_height - old_height * (old_aspect / new_aspect)) / 2)
    x, y = min(x, (old_width - 1) // 2), min(y, (old_height - 1) // 2)  # something must be left
    return samples[..., y : old_height - y, x : old_width - x]


def lanczos(samples: Tensor, width: int, height: int) -> Tensor:
    """Resize pictures in 0..1 with PIL's Lanczos filter, at 8 bits per channel."""
    resized = torch.empty(*samples.shape[:2], height, width)
    for place, picture in zip(resized, samples):
        pixels = np.clip(255.0 * picture.movedim(0, -1).float().cpu().numpy(), 0, 255)
        pixels = pixels.astype(np.uint8)
        if pixels.shape[-1] == 1:
            pixels = pixels[..., 0]
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS)
        values = torch.from_numpy(np.array(image))
        place.copy_(values[None] if values.ndim == 2 else values.movedim(-1, 0))
    return resized.div_(255.0).to(samples.device, samples.dtype)


def bislerp(samples: Tensor, width: int, height: int) -> Tensor:
    """Resize like bilinear, but rotate between channel vectors and interpolate their lengths.

    Latents resized so keep their contrast, which averaging would lower.
    """
    x = samples.float()
    x = _slerp_axis(x, width)
    x = _slerp_axis(x.transpose(-1, -2), height).transpose(-1, -2)
    return x.to(samples.dtype).contiguous()


def _slerp_axis(x: Tensor, length: int) -> Tensor:
    """Spherical interpolation of ``[B, C, H, W]`` along its last axis to a new length."""
    places = torch.arange(x.shape[-1], dtype=torch.float32, device=x.device)
    places = _stretched(places, length)
    first = places.floor()
    second = first + 1
    if not formulas.as_published():
        second = _interpolated_neighbours(x.shape[-1], length, x.device)
    second = second.clamp(max=x.shape[-1] - 1)
    return slerp(x[..., first.long()], x[..., second.long()], places - first)


def _interpolated_neighbours(old: int, new: int, device: torch.device) -> Tensor:
    """The second place each new one lies between, as pictures had it: interpolated like the first
    and rounded down. A place a rounding error below a power of two gets one too far.
    """
    neighbours = torch.arange(1, old + 1, dtype=torch.float32, device=device).clamp(max=old - 1)
    return _stretched(neighbours, new).floor()


def _stretched(line: Tensor, length: int) -> Tensor:
    """Numbers in a row, interpolated to another count of them."""
    return F.interpolate(line[None, None, None], size=(1, length), mode="bilinear")[0, 0, 0]


def slerp(a: Tensor, b: Tensor, ratio: Tensor) -> Tensor:
    """Rotate channel vectors (axis 1) from a to b by a ratio 0..1 and interpolate their lengths.

    Parallel vectors give a, opposite ones a straight line between them.
    """
    length_a, length_b = a.norm(dim=1, keepdim=True), b.norm(dim=1, keepdim=True)
    unit_a = torch.where(length_a == 0, 0.0, a / length_a)
    unit_b = torch.where(length_b == 0, 0.0, b / length_b)
    cosine = (unit_a * unit_b).sum(dim=1, keepdim=True)
    angle = torch.acos(cosine)
    sine = torch.sin(angle)
    turned = torch.sin((1 - ratio) * angle) / sine * unit_a
    turned = turned + torch.sin(ratio * angle) / sine * unit_b
    turned = turned * (length_a * (1 - ratio) + length_b * ratio)
    turned = torch.where(cosine > 1 - PARALLEL, a, turned)
    return torch.where(cosine < PARALLEL - 1, a * (1 - ratio) + b * ratio, turned)


def repeat_to_batch_size(tensor: Tensor, batch_size: int, dim: int = 0) -> Tensor:
    """Repeat along ``dim`` or cut until it has ``batch_size`` entries."""
    size = tensor.shape[dim]
    if size > batch_size:
        return tensor.narrow(dim, 0, batch_size)
    if size == batch_size:
        return tensor
    repeats = [1] * tensor.ndim
    repeats[dim] = math.ceil(batch_size / size)
    return tensor.repeat(repeats).narrow(dim, 0, batch_size)


def resize_to_batch_size(tensor: Tensor, batch_size: int) -> Tensor:
    """Spread entries evenly over a batch: each new entry is the old one nearest in relative
    position."""
    size = tensor.shape[0]
    if size == batch_size:
        return tensor
    if batch_size <= 1:
        return tensor[:batch_size]
    if batch_size < size:
        scale = (size - 1) / (batch_size - 1)
        picks = [min(round(number * scale), size - 1) for number in range(batch_size)]
    else:
        scale = size / batch_size
        picks = [min(math.floor((number + 0.5) * scale), size - 1) for number in range(batch_size)]
    return tensor[picks]


def upscale_dit_mask(
    mask: Tensor, img_size_in: tuple[int, ...], img_size_out: tuple[int, ...]
) -> Tensor:
    """An attention mask over text and picture tokens, for another number of picture tokens.

    Args:
        mask: [B, L, L] or [L, L] with L = text tokens + rows * columns; text comes first.
        img_size_in: Rows and columns the mask describes.
        img_size_out: Rows and columns it shall describe; each takes the nearest old place.

    Raises:
        ValueError: The mask has fewer tokens than the picture, or not two or three axes.
    """
    if mask.ndim == 2:
        mask = mask.unsqueeze(0)
    old_rows, old_columns = img_size_in
    text = mask.shape[-1] - old_rows * old_columns
    if mask.ndim != 3 or text < 0:
        raise ValueError(
            f"an attention mask of shape {list(mask.shape)} does not describe "
            f"{old_rows} x {old_columns} picture tokens; expected [batch, tokens, tokens]"
        )
    if tuple(img_size_in) == tuple(img_size_out):
        return mask
    rows, columns = img_size_out
    row = ((torch.arange(rows) + 0.5) * old_rows / rows).long()
    column = ((torch.arange(columns) + 0.5) * old_columns / columns).long()
    picture = text + (row[:, None] * old_columns + column[None, :]).flatten()
    places = torch.cat([torch.arange(text), picture]).to(mask.device)
    return mask[:, places][:, :, places]
