"""Re-encoding stored pictures for the page, with a bound on what decoding may take."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

MAX_PIXELS = 178_956_970  # a quarter of a GiB at three bytes a pixel and half again for the copy
DEFAULT_QUALITY = 90


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


def open_image(path: Path) -> Image.Image:
    """Opens a picture after looking at its size only.

    Raises:
        ImageRefused: no picture, damaged, or more than MAX_PIXELS pixels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(path)
    except Image.DecompressionBombError as error:
        raise ImageRefused(f"{path.name} has too many pixels to be shown", True) from error
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise ImageRefused(f"{path.name} is not a readable picture") from error
    if image.width * image.height > MAX_PIXELS:
        image.close()
        raise ImageRefused(f"{path.name} has {image.width} x {image.height} pixels", True)
    return image


def _load(image: Image.Image, name: str) -> None:
    try:
        image.load()
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ImageRefused(f"{name} is damaged: {error}") from error


def preview_image(path: Path, form: PreviewForm) -> tuple[bytes, str]:
    """The picture re-encoded; returns bytes and mime type. Raises ImageRefused."""
    with open_image(path) as image:
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
    with open_image(path) as image:
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
    with open_image(path) as image:
        image.draft("RGB", (side, side))
        _load(image, path.name)
        shown = ImageOps.exif_transpose(image)
        shown.thumbnail((side, side))
        buffer = io.BytesIO()
        shown.convert("RGBA" if _has_alpha(shown) else "RGB").save(buffer, format="webp")
    return buffer.getvalue()
