"""What a picture depends on besides its graph and its files; saved beside the prompt."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import platform
from typing import Any

import torch

from comfy.devices import accelerators
from comfy.devices.policies import PrecisionPolicy
from comfy.devices.runtime import get_runtime
from comfy.nn import attention

PROGRAM = "latentloom"


def environment() -> dict[str, Any]:
    """Versions, device, threads, attention back end and what was asked of number types, as in use
    now.

    The same graph, files and environment give the same picture, bit for bit.
    """
    runtime, attends = get_runtime(), attention.selected()
    return {
        **_versions(),
        **attends.versions,
        "device": accelerators.device_name(runtime.device),
        "threads": torch.get_num_threads(),  # where sums are cut on a CPU
        "attention": attends.name,
        "deterministic": runtime.precision.deterministic,
        "precision": _asked(runtime.precision),
    }


def _asked(policy: PrecisionPolicy) -> dict[str, Any]:
    """The fields of a policy that are not at their default, but for those told by themselves."""
    told, usual = {"attention", "deterministic"}, PrecisionPolicy()
    fields = (field.name for field in dataclasses.fields(policy) if field.name not in told)
    values = {name: getattr(policy, name) for name in fields}
    changed = {name: value for name, value in values.items() if value != getattr(usual, name)}
    return {name: _readable(value) for name, value in changed.items()}


def _readable(value: Any) -> str | bool | list[str]:
    """A setting as JSON has it."""
    if isinstance(value, bool):
        return value
    return sorted(value) if isinstance(value, frozenset) else str(value).removeprefix("torch.")


@functools.cache
def _versions() -> dict[str, str]:
    try:
        version = importlib.metadata.version(PROGRAM)
    except importlib.metadata.PackageNotFoundError:  # run from a folder that was never installed
        version = "unknown"
    return {PROGRAM: version, "torch": torch.__version__, "python": platform.python_version()}
