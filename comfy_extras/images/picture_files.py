"""Still and moving pictures as bytes of a file: PNG of 16 bits, OpenEXR, AVIF.

Pictures are tensors [H, W, C] with 1, 3 or 4 channels, 0..1 unless a form holds more. Sources: PNG
(ISO 15948), OpenEXR's file layout, ITU-R BT.2100 table 5 (HLG), IEC 61966-2-1 (sRGB).
"""

from __future__ import annotations

import io
import logging
import math
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comfy import progress
from comfy_execution.context import check_interrupt

logger = logging.getLogger(__name__)

PNG_HEADER_END = 33
"""Signature and header of a PNG; texts follow them."""
HLG_A = 0.17883277
HLG_B = 1 - 4 * HLG_A
HLG_C = 0.5 - HLG_A * math.log(4 * HLG_A)

REC_709 = (0.64, 0.33, 0.30, 0.60, 0.15, 0.06, 0.3127, 0.3290)
REC_2020 = (0.708, 0.292, 0.170, 0.797, 0.131, 0.046, 0.3127, 0.3290)
ACES_CG = (0.713, 0.293, 0.165, 0.830, 0.128, 0.044, 0.32168, 0.33767)
"""Chromaticities (x, y) of red, green, blue and white."""

EXR_OWN_KEYS = {
    "adoptedNeutral", "channels", "chromaticities", "chunkCount", "compression", "dataWindow",
    "displayWindow", "lineOrder", "originalDataWindow", "pixelAspectRatio", "screenWindowCenter",
    "screenWindowWidth", "tiles", "type", "version",
}  # fmt: skip
"""Names that have another meaning in OpenEXR files."""

HDR_TAGS = {"HDR": "ARIB_STD_B67", "HDR PQ": "SMPTE2084"}
"""Transfer curves that AVIF files name."""
AVIF_LEAST, AVIF_MOST = (4, 4), (8704, 16384)  # rows and columns that the encoder takes
AVIF_MOST_RATE = 240  # frames a second that the encoder plans for; a file may name more
AVIF_SPEED = "8"  # of 13; slower ones take seconds a picture


def channels_of(image: Tensor, allowed: Sequence[int], form: str) -> int:
    """Number of channels of a picture.

    Raises:
        ValueError: The form cannot hold them.
    """
    count = image.shape[-1]
    if count not in allowed:
        known = ", ".join(map(str, allowed))
        raise ValueError(
            f"images: {form} holds pictures of {known} channels, found {count}; "
            "save another form or change the channels first"
        )
    return count


def levels_16(image: Tensor) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Values 0..1 as 0..65535; what is no number is 0, as in usual pictures."""
    values = image.detach().float().cpu().nan_to_num(0.0).clamp(0, 1)
    return (values * 65535).round().numpy().astype(np.uint16)


def fitting(texts: Mapping[str, str], form: str, fits: Callable[[str], bool]) -> dict[str, str]:
    """The texts whose keys a form can hold; a picture is not lost for the others."""
    left_out = [key for key in texts if not fits(key)]
    if left_out:
        progress.warn(
            logger,
            "saved without the texts %s of extra_pnginfo, which are no names of texts in %s files",
            ", ".join(f"{key!r:.60}" for key in left_out),
            form,
        )
    return {key: text for key, text in texts.items() if key not in left_out}


def _is_png_key(key: str) -> bool:
    return 0 < len(key) < 80 and all(" " <= letter <= "~" or "¡" <= letter <= "ÿ" for letter in key)


def _is_exr_key(key: str) -> bool:
    return 0 < len(key.encode()) < 256 and "\0" not in key and key not in EXR_OWN_KEYS


def png_16(image: Tensor, texts: Mapping[str, str]) -> bytes:
    """A PNG of 16 bits a channel, with `texts` inside."""
    import av

    count = channels_of(image, (1, 3, 4), "PNG")
    layout = {1: "gray16be", 3: "rgb48be", 4: "rgba64be"}[count]
    levels = levels_16(image)
    frame = av.VideoFrame.from_ndarray(levels[..., 0] if count == 1 else levels, format=layout)
    encoder: Any = av.CodecContext.create("png", "w")
    encoder.width, encoder.height, encoder.pix_fmt = frame.width, frame.height, layout
    encoder.time_base, encoder.sample_aspect_ratio = Fraction(1), Fraction(1)
    encoded = b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])
    kept = fitting(texts, "PNG", _is_png_key)
    chunks = b"".join(_png_text(key, text) for key, text in kept.items())
    return encoded[:PNG_HEADER_END] + chunks + encoded[PNG_HEADER_END:]


def _png_text(key: str, text: str) -> bytes:
    """A text chunk; `iTXt` where the older `tEXt` has no such letters."""
    name = key.encode("latin-1")
    try:
        body = b"tEXt" + name + b"\0" + text.encode("latin-1")
    except UnicodeEncodeError:
        body = b"iTXt" + name + b"\0\0\0\0\0" + text.encode("utf-8")
    return struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))


def srgb_to_linear(value: Tensor) -> Tensor:
    """Light of sRGB values; values below 0 mirror those above."""
    size = value.abs()
    light = torch.where(size <= 0.04045, size / 12.92, ((size + 0.055) / 1.055) ** 2.4)
    return light * value.sign()


def hlg_to_linear(value: Tensor) -> Tensor:
    """Scene light, 0..1, of values of the hybrid log-gamma curve."""
    size = value.abs()
    light = torch.where(size <= 0.5, size**2 / 3, (((size - HLG_C) / HLG_A).exp() + HLG_B) / 12)
    return light * value.sign()


def unchanged(value: Tensor) -> Tensor:
    """What is light already."""
    return value


LIGHT: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, ...]]] = {
    "sRGB": (srgb_to_linear, REC_709),
    "HDR": (hlg_to_linear, REC_2020),
    "linear": (unchanged, REC_709),
    "linear ACEScg": (unchanged, ACES_CG),
}
"""By colour space of the picture: how light is found, and the primaries of it."""


def write_exr(
    path: str | os.PathLike[str],
    image: Tensor,
    colour_space: str,
    half: bool,
    texts: Mapping[str, str],
) -> None:
    """Write scene light as OpenEXR, compressed without loss.

    Args:
        image: Any values; opacity, the fourth channel, stays as it is.
        colour_space: A key of `LIGHT`.
        half: 16 bits a channel in place of 32.
    """
    import OpenEXR

    count = channels_of(image, (1, 3, 4), "OpenEXR")
    to_light, primaries = LIGHT[colour_space]
    pixels = image.detach().float().cpu().clone()
    colours = pixels[..., :3]
    colours.copy_(to_light(colours))
    if half:
        most = torch.finfo(torch.float16).max
        pixels = pixels.clamp(-most, most).half()
    header = {
        "compression": OpenEXR.ZIP_COMPRESSION,
        "type": OpenEXR.scanlineimage,
        "chromaticities": primaries,
        **fitting(texts, "OpenEXR", _is_exr_key),
    }
    values = np.ascontiguousarray(pixels.numpy())
    channels = {"Y": values[..., 0].copy()} if count == 1 else {"RGBA"[:count]: values}
    with OpenEXR.File(header, channels) as file:
        file.write(os.fspath(path))


def _check_avif(images: Tensor) -> None:
    """Refuse pictures that the encoder does not take.

    Raises:
        ValueError: They have other channels, or are too small or too large.
    """
    channels_of(images, (1, 3), "AVIF")
    sides = images.shape[1:3]
    if any(not least <= side <= most for least, side, most in zip(AVIF_LEAST, sides, AVIF_MOST)):
        rows, columns = AVIF_MOST
        raise ValueError(
            f"images: AVIF holds pictures of 4 x 4 to {columns} x {rows} pixels, found "
            f"{sides[1]} x {sides[0]}; save another form or change their size first"
        )


def avif(
    images: Tensor,
    colour_space: str,
    bits: int,
    crf: int,
    frames_a_second: float = 1.0,
    loops: int = 0,
) -> bytes:
    """An AVIF of one picture, or of several that move.

    Args:
        images: [B, H, W, 1 or 3], encoded as the colour space says.
        colour_space: sRGB, HDR (BT.2020 with HLG) or HDR PQ (BT.2020 with PQ); the file names it.
        bits: 8 or 10 of each value; colours have half the resolution (4:2:0).
        crf: 1 (best) to 63.
        loops: Times that moving pictures are shown; 0 for ever.
    Raises:
        ValueError: The form cannot hold such pictures.
    """
    import av
    from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc

    _check_avif(images)
    os.environ.setdefault("SVT_LOG", "1")  # errors only; the encoder greets on the console else
    is_hdr = colour_space in HDR_TAGS
    matrix = Colorspace.BT2020 if is_hdr else Colorspace.ITU709
    target = io.BytesIO()
    options = {"loop": str(loops)} if len(images) > 1 else {}
    with av.open(target, "w", format="avif", options=options) as container:
        rate = Fraction(frames_a_second).limit_denominator(1000)
        stream: Any = container.add_stream("libsvtav1", rate=min(rate, AVIF_MOST_RATE))
        stream.height, stream.width = images.shape[1:3]
        stream.pix_fmt = "yuv420p10le" if bits == 10 else "yuv420p"
        stream.options = {"crf": str(crf), "preset": AVIF_SPEED}
        context = stream.codec_context
        context.time_base = 1 / rate
        context.color_range = ColorRange.JPEG
        context.colorspace = matrix
        context.color_primaries = ColorPrimaries.BT2020 if is_hdr else ColorPrimaries.BT709
        context.color_trc = ColorTrc[HDR_TAGS.get(colour_space, "IEC61966_2_1")]
        for number, picture in enumerate(levels_16(images.expand(*images.shape[:3], 3))):
            check_interrupt()
            frame = av.VideoFrame.from_ndarray(picture, format="rgb48le").reformat(
                format=stream.pix_fmt, dst_colorspace=matrix, dst_color_range=ColorRange.JPEG
            )
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return target.getvalue()
