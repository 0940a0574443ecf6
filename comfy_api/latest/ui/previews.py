"""Things shown but not kept: stored in the temporary folder, which is emptied at start-up."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from comfy_api.latest.io.options import FolderType
from comfy_api.latest.ui.audio import AudioSaveHelper
from comfy_api.latest.ui.images import ImageSaveHelper, NodeClass
from comfy_api.latest.ui.results import SavedResult, UiOutput

if TYPE_CHECKING:
    from torch import Tensor

    from comfy_api.latest._input.basic_types import AudioInput

FAST_COMPRESSION = 1  # of 9: previews are looked at once


def preview_prefix() -> str:
    """A file name prefix that no other preview of this run is likely to have."""
    letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(5))
    return f"ComfyUI_temp_{letters}"


class PreviewImage(UiOutput):
    """Pictures `[B, H, W, C]` in 0..1 on the node.

    Args:
        animated: Whether the pictures are one moving picture, for the editor.
        cls: The node class as `execute` receives it; its prompt is stored in the files.
    """

    def __init__(
        self,
        image: Tensor,
        animated: bool = False,
        cls: NodeClass = None,
        **kwargs: Any,
    ) -> None:
        self.values: list[SavedResult] = ImageSaveHelper.save_images(
            image, preview_prefix(), FolderType.temp, cls, FAST_COMPRESSION
        )
        self.animated = animated
        self.more = kwargs

    def as_dict(self) -> dict[str, Any]:
        return {"images": self.values, "animated": [self.animated]}


class PreviewMask(PreviewImage):
    """Masks `[B, H, W]` in 0..1 on the node, as grey pictures."""

    def __init__(
        self,
        mask: Tensor,
        animated: bool = False,
        cls: NodeClass = None,
        **kwargs: Any,
    ) -> None:
        flat = mask.reshape(-1, *mask.shape[-2:])
        super().__init__(flat[..., None].expand(-1, -1, -1, 3), animated, cls, **kwargs)


class PreviewAudio(UiOutput):
    """A sound on the node."""

    def __init__(self, audio: AudioInput, cls: NodeClass = None, **kwargs: Any) -> None:
        self.values: list[SavedResult] = AudioSaveHelper.save_audio(
            audio, preview_prefix(), FolderType.temp, cls, format="flac"
        )
        self.more = kwargs

    def as_dict(self) -> dict[str, Any]:
        return {"audio": self.values}


class PreviewUI3D(UiOutput):
    """A 3D file on the node.

    Args:
        model_file: Path of the file below the output folder.
        camera_info: Where the camera stands, or None.
        bg_image: Pictures `[B, H, W, C]` of which the first is the background.
    """

    def __init__(
        self,
        model_file: str,
        camera_info: Any = None,
        bg_image: Tensor | Sequence[Tensor] | None = None,
        cls: NodeClass = None,
        **kwargs: Any,
    ) -> None:
        self.model_file = model_file
        self.camera_info = camera_info
        self.bg_image_path: str | None = None
        self.more = kwargs
        if bg_image is not None:
            saved = ImageSaveHelper.save_images(
                bg_image[:1], preview_prefix(), FolderType.temp, cls, FAST_COMPRESSION
            )[0]
            self.bg_image_path = f"temp/{saved.filename}"

    def as_dict(self) -> dict[str, Any]:
        return {"result": [self.model_file, self.camera_info, self.bg_image_path]}
