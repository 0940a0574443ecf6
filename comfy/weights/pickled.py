"""Weights from pickled files (.ckpt, .pt, .pth, .bin), through torch's reader of weights only.

Nothing a file names is ever imported or called. Training scripts saved a few harmless objects
beside the weights; those are read as inert stand-ins, so that old checkpoints load.
"""

from __future__ import annotations

import _codecs
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from comfy.weights.errors import (
    TruncatedWeightFileError,
    UnknownWeightFormatError,
    UnsafePickleError,
)


class Inert:
    """Stands in for an object of a training script; keeps nothing of it."""

    def __setstate__(self, state: Any) -> None:
        """Forget what the file says about the object."""


def _harmless() -> list[Any]:
    """What old checkpoints name beside tensors: (object, name in the file)."""
    callback = "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint"
    names: list[Any] = [
        (Inert, callback),
        (Inert, callback.replace("pytorch_lightning", "lightning.pytorch")),
    ]
    core: Any = getattr(np, "_core", None) or np.core  # the name since, and before, numpy 2
    scalar = core.multiarray.scalar
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        names.append((scalar, f"{module}.scalar"))
    numbers = [type(np.dtype(name)) for name in ("float64", "float32", "int64", "int32", "bool")]
    return [*names, np.dtype, *numbers, (_codecs.encode, "_codecs.encode")]


def load_pickled(path: str | os.PathLike[str], memory_map: bool) -> dict[str, Any]:
    """Tensors of a pickled file by key.

    Args:
        path: The file.
        memory_map: Back tensors by the file where its container allows it.
    Raises:
        UnsafePickleError: It holds objects other than weights.
        TruncatedWeightFileError: It ends early.
        UnknownWeightFormatError: It is something else.
    """
    archive = zipfile.is_zipfile(path)
    if archive and not _holds_weights(path):
        raise UnknownWeightFormatError(
            path, "this is a zip archive without torch weights", "unpack it and use what is inside"
        )
    try:
        with torch.serialization.safe_globals(_harmless()):
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=memory_map and archive
            )
    except pickle.UnpicklingError as error:
        raise _refusal(path, str(error)) from error
    except MemoryError:
        raise
    except Exception as error:  # what a damaged pickle makes its reader trip over is open-ended
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TruncatedWeightFileError(path, f"torch cannot read it ({reason})") from error
    return _unwrap(path, content)


def _holds_weights(path: str | os.PathLike[str]) -> bool:
    with zipfile.ZipFile(path) as archive:
        return any(name.rpartition("/")[2] == "data.pkl" for name in archive.namelist())


def _refusal(path: str | os.PathLike[str], reason: str) -> Exception:
    """The error for what the reader of weights refuses."""
    named = re.search(r"GLOBAL (\S+)", reason)
    if named:
        return UnsafePickleError(path, f"holds objects other than weights ({named[1]})")
    if "Unsupported" in reason:
        return UnsafePickleError(path, "its pickle uses instructions that weights never need")
    last = reason.strip().splitlines()[-1] if reason.strip() else "no reason given"
    return TruncatedWeightFileError(path, f"its pickle is damaged ({last[:200]})")


def _unwrap(path: str | os.PathLike[str], content: Any) -> dict[str, Any]:
    """The state dict inside what a training script saved around it; numbers as keys become text."""
    if not isinstance(content, Mapping):
        raise UnknownWeightFormatError(path, f"holds a {type(content).__name__}, not a state dict")
    inner = content.get("state_dict")
    if not isinstance(inner, Mapping) and len(content) == 1:
        (inner,) = content.values()
    found = inner if isinstance(inner, Mapping) else content
    return {str(key): value for key, value in found.items()}
