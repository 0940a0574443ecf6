"""What nodes show and save: `from comfy_api.latest import ui`."""

from comfy_api.latest.io.options import FolderType
from comfy_api.latest.ui.audio import AudioSaveHelper
from comfy_api.latest.ui.images import ImageSaveHelper
from comfy_api.latest.ui.previews import PreviewAudio, PreviewImage, PreviewMask, PreviewUI3D
from comfy_api.latest.ui.results import (
    PreviewText,
    PreviewVideo,
    SavedAudios,
    SavedImages,
    SavedResult,
)

__all__ = [
    "AudioSaveHelper",
    "FolderType",
    "ImageSaveHelper",
    "PreviewAudio",
    "PreviewImage",
    "PreviewMask",
    "PreviewText",
    "PreviewUI3D",
    "PreviewVideo",
    "SavedAudios",
    "SavedImages",
    "SavedResult",
]
