"""Saving pictures: PNG, and moving pictures as PNG or WebP.

Pictures are tensors `[B, H, W, C]`, float32 in 0..1.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import folder_paths
from comfy_api.internal.watched_file import watched_file
from comfy_api.latest.io.node import ComfyNode
from comfy_api.latest.io.options import FolderType
from comfy_api.latest.ui.metadata import with_latin_names, workflow_texts
from comfy_api.latest.ui.results import SavedImages, SavedResult

if TYPE_CHECKING:
    from PIL.Image import Exif, Image
    from PIL.PngImagePlugin import PngInfo
    from torch import Tensor

    Pictures = Tensor | Sequence[Tensor]

NodeClass = type[ComfyNode] | None
EXIF_PROMPT, EXIF_FIRST_EXTRA = 0x0110, 0x010F  # "Model" and "Make", where readers look
WEBP_METHODS = {"default": 4, "fastest": 0, "slowest": 6}


def folder_of(folder_type: FolderType | str) -> str:
    """Path of one of the three folders."""
    path = folder_paths.get_directory_by_type(FolderType(folder_type).value)
    assert path is not None, f"no folder of type {folder_type}"
    return path


def tensor_to_pil(image: Tensor) -> Image:
    """One picture `[H, W, C]` in 0..1, rounded down to bytes; values outside are clipped."""
    from PIL import Image

    pixels = (image.detach().float() * 255.0).clamp(0, 255).byte().cpu().numpy()
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def png_texts(cls: NodeClass) -> PngInfo | None:
    """Text chunks for a still PNG, right after its header; None if there are none."""
    from PIL.PngImagePlugin import PngInfo

    texts = with_latin_names(workflow_texts(cls))
    info = PngInfo()
    for key, text in texts.items():
        info.add_text(key, text)
    return info if texts else None


def animated_png_texts(cls: NodeClass) -> PngInfo | None:
    """Chunks for a moving PNG: type `comf`, key, NUL, JSON, after the pictures."""
    from PIL.PngImagePlugin import PngInfo

    texts = with_latin_names(workflow_texts(cls))
    info = PngInfo()
    for key, text in texts.items():
        data = key.encode("latin-1", "strict") + b"\0" + text.encode("latin-1", "strict")
        info.add(b"comf", data, after_idat=True)
    return info if texts else None


def webp_exif(image: Image, cls: NodeClass) -> Exif:
    """EXIF data for WebP: `prompt:<json>` in one tag, the extra texts in tags counted downwards."""
    exif = image.getexif()
    tag = EXIF_FIRST_EXTRA
    for key, text in with_latin_names(workflow_texts(cls)).items():
        if key == "prompt":
            exif[EXIF_PROMPT] = f"prompt:{text}"
        else:
            exif[tag] = f"{key}:{text}"
            tag -= 1
    return exif


class ImageSaveHelper:
    """Saves pictures to one of the three folders, under counted names."""

    @staticmethod
    def save_images(
        images: Pictures,
        filename_prefix: str,
        folder_type: FolderType,
        cls: NodeClass,
        compress_level: int = 4,
    ) -> list[SavedResult]:
        """Saves each picture as PNG.

        Args:
            cls: The node class as `execute` receives it; its prompt is stored in the files.
            compress_level: 0 (fast) to 9 (small).
        """
        if len(images) == 0:
            return []
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_of(folder_type), images[0].shape[1], images[0].shape[0]
        )
        texts = png_texts(cls)
        results = []
        for index, image in enumerate(images):
            file = f"{name.replace('%batch_num%', str(index))}_{counter + index:05}_.png"
            with watched_file(os.path.join(folder, file)) as target:
                tensor_to_pil(image).save(
                    target, format="PNG", pnginfo=texts, compress_level=compress_level
                )
            results.append(SavedResult(file, subfolder, folder_type))
        return results

    @staticmethod
    def get_save_images_ui(
        images: Pictures, filename_prefix: str, cls: NodeClass, compress_level: int = 4
    ) -> SavedImages:
        """Saves each picture as PNG in the output folder, to be shown by the node."""
        return SavedImages(
            ImageSaveHelper.save_images(
                images, filename_prefix, FolderType.output, cls, compress_level
            )
        )

    @staticmethod
    def _animated_target(
        pictures: list[Image], filename_prefix: str, folder_type: FolderType, suffix: str
    ) -> tuple[str, SavedResult]:
        """Path and record of the file for a moving picture."""
        if not pictures:
            raise ValueError("cannot save a moving picture of 0 frames; expected one or more")
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_of(folder_type), pictures[0].width, pictures[0].height
        )
        file = f"{name}_{counter:05}_.{suffix}"
        return os.path.join(folder, file), SavedResult(file, subfolder, folder_type)

    @staticmethod
    def save_animated_png(
        images: Pictures,
        filename_prefix: str,
        folder_type: FolderType,
        cls: NodeClass,
        fps: float,
        compress_level: int,
    ) -> SavedResult:
        """Saves the pictures as one moving PNG, `fps` pictures per second."""
        pictures = [tensor_to_pil(image) for image in images]
        path, result = ImageSaveHelper._animated_target(
            pictures, filename_prefix, folder_type, "png"
        )
        with watched_file(path) as target:
            pictures[0].save(
                target,
                "PNG",
                save_all=True,
                append_images=pictures[1:],
                duration=int(1000.0 / fps),
                pnginfo=animated_png_texts(cls),
                compress_level=compress_level,
            )
        return result

    @staticmethod
    def get_save_animated_png_ui(
        images: Pictures, filename_prefix: str, cls: NodeClass, fps: float,
        compress_level: int,
    ) -> SavedImages:  # fmt: skip
        """Saves a moving PNG in the output folder, to be shown by the node."""
        result = ImageSaveHelper.save_animated_png(
            images, filename_prefix, FolderType.output, cls, fps, compress_level
        )
        return SavedImages([result], is_animated=len(images) > 1)

    @staticmethod
    def save_animated_webp(
        images: Pictures,
        filename_prefix: str,
        folder_type: FolderType,
        cls: NodeClass,
        fps: float,
        lossless: bool,
        quality: int,
        method: int | str,
    ) -> SavedResult:
        """Saves the pictures as one moving WebP, `fps` pictures per second.

        Args:
            quality: 0 to 100; of the picture, or of the effort if lossless.
            method: 0 (fast) to 6 (small), or a name out of `WEBP_METHODS`.
        """
        pictures = [tensor_to_pil(image) for image in images]
        path, result = ImageSaveHelper._animated_target(
            pictures, filename_prefix, folder_type, "webp"
        )
        with watched_file(path) as target:
            pictures[0].save(
                target,
                "WEBP",
                save_all=True,
                append_images=pictures[1:],
                duration=int(1000.0 / fps),
                exif=webp_exif(pictures[0], cls),
                lossless=lossless,
                quality=quality,
                method=WEBP_METHODS[method] if isinstance(method, str) else method,
            )
        return result

    @staticmethod
    def get_save_animated_webp_ui(
        images: Pictures, filename_prefix: str, cls: NodeClass, fps: float,
        lossless: bool, quality: int, method: int | str,
    ) -> SavedImages:  # fmt: skip
        """Saves a moving WebP in the output folder, to be shown by the node."""
        result = ImageSaveHelper.save_animated_webp(
            images, filename_prefix, FolderType.output, cls, fps, lossless, quality, method
        )
        return SavedImages([result], is_animated=len(images) > 1)
