"""What a picture depends on besides its graph and its files; saved beside the prompt."""

from __future__ import annotations

import functools
import importlib.metadata
import platform

import torch

from comfy.devices import accelerators
from comfy.devices.runtime import get_runtime
from comfy.nn import attention

PROGRAM = "latentloom"


def environment() -> dict[str, str | bool]:
    """Versions, device and attention back end in use now.

    The same graph, files and environment give the same picture, bit for bit.
    """
    runtime = get_runtime()
    return {
        **_versions(),
        "device": accelerators.device_name(runtime.device),
        "attention": attention.selected().name,
        "deterministic": runtime.precision.deterministic,
    }


@functools.cache
def _versions() -> dict[str, str]:
    try:
        version = importlib.metadata.version(PROGRAM)
    except importlib.metadata.PackageNotFoundError:  # run from a folder that was never installed
        version = "unknown"
    return {PROGRAM: version, "torch": torch.__version__, "python": platform.python_version()}
