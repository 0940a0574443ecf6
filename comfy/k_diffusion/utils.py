"""A folder of pictures as a training set, under the name custom nodes import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import Dataset


class FolderOfImages(Dataset[tuple[Any]]):
    """The pictures of a folder and the folders below it, sorted by path.

    Args:
        root: The folder.
        transform: Applied to each picture; by default it is given as it is.
    """

    IMG_EXTENSIONS = frozenset(
        {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}
    )

    def __init__(
        self, root: str | Path, transform: Callable[[Image.Image], Any] | None = None
    ) -> None:
        self.root = Path(root)
        self.transform = transform
        self.paths = sorted(
            path for path in self.root.rglob("*") if path.suffix.lower() in self.IMG_EXTENSIONS
        )

    def __repr__(self) -> str:
        return f'FolderOfImages(root="{self.root}", len: {len(self)})'

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, key: int) -> tuple[Any]:
        """One picture in RGB, alone in a tuple."""
        with Image.open(self.paths[key]) as opened:
            picture = opened.convert("RGB")
        return (picture if self.transform is None else self.transform(picture),)
