"""What `folder_paths` is made of: the categories, walking folders, picking and naming files."""

from __future__ import annotations

import logging
import mimetypes
import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

logger = logging.getLogger(__name__)

IGNORED_FOLDERS = frozenset({".git", "__pycache__"})

# files with weights; a table that packs extend
supported_pt_extensions: set[str] = {
    ".ckpt",
    ".pt",
    ".pt2",
    ".bin",
    ".pth",
    ".safetensors",
    ".pkl",
    ".sft",
    ".gguf",
}

# in the order of the listings
CATEGORIES = (
    "checkpoints",
    "configs",
    "loras",
    "vae",
    "text_encoders",
    "diffusion_models",
    "clip_vision",
    "style_models",
    "embeddings",
    "diffusers",
    "vae_approx",
    "controlnet",
    "gligen",
    "upscale_models",
    "latent_upscale_models",
    "custom_nodes",
    "hypernetworks",
    "photomaker",
    "classifiers",
    "model_patches",
    "audio_encoders",
)
# categories whose folders below `models` are not just the one of the same name
SUBFOLDERS = {
    "text_encoders": ("text_encoders", "clip"),
    "diffusion_models": ("unet", "diffusion_models"),
    "controlnet": ("controlnet", "t2i_adapter"),
}
SUFFIXES: dict[str, set[str]] = {
    "configs": {".yaml"},
    "diffusers": {"folder"},
    "custom_nodes": set(),
    "classifiers": {""},
    "unet_gguf": {".gguf"},
    "clip_gguf": {".gguf"},
}
# categories that are some files of another one's folders, whatever those are
VIEWS = {"unet_gguf": "diffusion_models", "clip_gguf": "text_encoders"}

# suffix without dot -> kind; packs extend it. These two are absent from some system tables.
extension_mimetypes_cache: dict[str, str] = {"webp": "image", "fbx": "model"}


def recursive_search(
    directory: str, excluded_dir_names: Collection[str] | None = None
) -> tuple[list[str], dict[str, float]]:
    """Walks `directory`, following links without running in circles.

    Returns:
        Relative paths of all files, and every visited folder with its modification time.
    """
    if not os.path.isdir(directory):
        return [], {}
    excluded = IGNORED_FOLDERS if excluded_dir_names is None else excluded_dir_names
    files: list[str] = []
    folders: dict[str, float] = {}
    visited: set[tuple[int, int]] = set()
    for folder, subfolders, names in os.walk(directory, followlinks=True):
        try:
            status = os.stat(folder)
        except OSError as error:
            logger.warning("cannot read the folder %s: %s", folder, error)
            continue
        if (status.st_dev, status.st_ino) in visited:
            subfolders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        subfolders[:] = sorted(name for name in subfolders if name not in excluded)
        folders[folder] = status.st_mtime
        relative = os.path.relpath(folder, directory)
        files += names if relative == "." else [os.path.join(relative, name) for name in names]
    return files, folders


def filter_files_extensions(files: Iterable[str], extensions: Collection[str]) -> list[str]:
    """Sorted files whose lower-cased suffix is in `extensions`; all of them when that is empty."""
    return sorted(
        name for name in files if not extensions or os.path.splitext(name)[1].lower() in extensions
    )


def filter_files_content_types(
    files: Sequence[str],
    content_types: Sequence[Literal["image", "video", "audio", "model"]],
) -> list[str]:
    """Files whose type, told from the suffix, is one of `content_types`, in the given order."""
    kept = []
    for name in files:
        suffix = name.rpartition(".")[2].lower()
        if suffix not in extension_mimetypes_cache:
            guessed, _ = mimetypes.guess_type(name, strict=False)
            if guessed is None:
                continue
            extension_mimetypes_cache[suffix] = guessed.partition("/")[0]
        if extension_mimetypes_cache[suffix] in content_types:
            kept.append(name)
    return kept


BATCH_NUMBER = "%batch_num%"
"""Token that savers fill in for each file, after its folder and counter are known."""


def highest_counter(folder: str, filename: str) -> int:
    """Largest N among files `<filename>_<N>...` of a folder; 0 if there is none.

    Folders of results grow to tens of thousands of files, and each save asks; so the names are
    looked at by one search instead of one by one. `%batch_num%` in the name stands for any number,
    as files of a batch are saved with theirs.
    """
    prefix = re.escape(os.path.normcase(f"{filename}_")).replace(BATCH_NUMBER, "[0-9]+")
    names = os.path.normcase("\0".join(os.listdir(folder)))
    found = re.findall(rf"(?:^|\0){prefix}([0-9]+)(?=[_.\0]|$)", names)
    return max(map(int, found), default=0)


def fill_tokens(text: str, image_width: int, image_height: int) -> str:
    """Replaces `%width%`, `%year%` and the like in the prefix of a saved file.

    Backslashes become slashes whatever the platform, as in the names that requests ask for: a
    workflow made on Windows saves into the same sub-folder everywhere.

    Raises:
        ValueError: the prefix holds a NUL byte.
    """
    if "\0" in text:
        raise ValueError(f"the file name prefix {text[:100]!r} must not hold a NUL byte")
    text = text.replace("\\", "/")
    now = time.localtime()
    values = {
        "width": str(image_width),
        "height": str(image_height),
        "year": str(now.tm_year),
        "month": f"{now.tm_mon:02}",
        "day": f"{now.tm_mday:02}",
        "hour": f"{now.tm_hour:02}",
        "minute": f"{now.tm_min:02}",
        "second": f"{now.tm_sec:02}",
    }
    for token, value in values.items():
        text = text.replace(f"%{token}%", value)
    return text
