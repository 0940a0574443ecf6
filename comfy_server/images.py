"""Re-encoding stored pictures for the page, with a bound on what decoding may take."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from aiohttp import web
from PIL import Image, ImageOps, UnidentifiedImageError

MAX_PIXELS = 178_956_970  # half a GiB at three bytes a pixel
LARGE_PIXELS = MAX_PIXELS // 8  # of pictures beyond, one at a time is decoded
MOST_DECODED_AT_ONCE = 2
DEFAULT_QUALITY = 90
# What pages show and cameras write. The library reads many more; some of those start programs.
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "ICO", "PPM")

Answer = TypeVar("Answer")

DECODERS: web.AppKey[ThreadPoolExecutor] = web.AppKey("decoders", ThreadPoolExecutor)

_large = threading.Lock()


async def decode(request: web.Request, work: Callable[..., Answer], *arguments: Any) -> Answer:
    """Does work on pictures in one of the few threads there are for it."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(request.app[DECODERS], work, *arguments)


class ImageRefused(ValueError):
    """A file that is no readable picture, or one too large to decode."""

    def __init__(self, message: str, too_large: bool = False) -> None:
        super().__init__(message)
        self.too_large = too_large


@dataclass(frozen=True)
class PreviewForm:
    """How a preview is encoded."""

    format: str  # "webp" or "jpeg"
    quality: int
    drop_alpha: bool


def parse_preview(text: str, channel: str | None) -> PreviewForm:
    """Reads `<format>[;<quality>]`; an unknown format means webp, a bad quality 90."""
    parts = text.split(";")
    image_format = parts[0] if parts[0] in ("webp", "jpeg") else "webp"
    if channel is not None and "a" in channel:
        image_format = "webp"
    quality = DEFAULT_QUALITY
    if parts[-1].isascii() and parts[-1].isdecimal() and len(parts[-1]) <= 3:
        quality = min(100, int(parts[-1]))
    return PreviewForm(image_format, quality, image_format == "jpeg" or channel == "rgb")


def _formats() -> tuple[str, ...]:
    """The formats among FORMATS that the library was built with."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@contextlib.contextmanager
def open_image(source: Path | BinaryIO, name: str) -> Iterator[Image.Image]:
    """A picture of which only the size has been looked at, for as long as the block runs.

    Raises:
        ImageRefused: no picture of a known format, damaged, or more than MAX_PIXELS pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(source, formats=_formats())
    except Image.DecompressionBombError as error:
        raise ImageRefused(f"{name} has too many pixels to be shown", True) from error
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise ImageRefused(f"{name} is not a readable picture") from error
    with image:
        pixels = image.width * image.height
        if pixels > MAX_PIXELS:
            raise ImageRefused(f"{name} has {image.width} x {image.height} pixels", True)
        with _large if pixels > LARGE_PIXELS else contextlib.nullcontext():
            yield image


def _load(image: Image.Image, name: str) -> None:
    try:
        image.load()
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ImageRefused(f"{name} is damaged: {error}") from error


def preview_image(path: Path, form: PreviewForm) -> tuple[bytes, str]:
    """The picture re-encoded; returns bytes and mime type. Raises ImageRefused."""
    with open_image(path, path.name) as image:
        _load(image, path.name)
        mode = "RGB" if form.drop_alpha else "RGBA" if _has_alpha(image) else "RGB"
        shown = image if image.mode == mode else image.convert(mode)
        buffer = io.BytesIO()
        try:
            shown.save(buffer, format=form.format, quality=form.quality)
        except (OSError, ValueError) as error:  # webp and jpeg have a largest side
            raise ImageRefused(f"{path.name} cannot be encoded: {error}") from error
    return buffer.getvalue(), f"image/{form.format}"


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def channel_png(path: Path, alpha: bool) -> bytes:
    """The picture without alpha, or black with nothing but its alpha channel, as PNG."""
    with open_image(path, path.name) as image:
        _load(image, path.name)
        if alpha:
            opacity = image.convert("RGBA").getchannel("A")
            shown = Image.new("RGBA", image.size)
            shown.putalpha(opacity)
        else:
            shown = image.convert("RGB")
    buffer = io.BytesIO()
    shown.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def thumbnail_webp(path: Path, side: int = 1024) -> bytes:
    """A picture beside a model, as webp of at most `side` pixels. Raises ImageRefused."""
    with open_image(path, path.name) as image:
        image.draft("RGB", (side, side))
        _load(image, path.name)
        shown = ImageOps.exif_transpose(image)
        shown.thumbnail((side, side))
        buffer = io.BytesIO()
        shown.convert("RGBA" if _has_alpha(shown) else "RGB").save(buffer, format="webp")
    return buffer.getvalue()
