"""Putting a state dict into a module without ever holding a weight twice.

A tensor of the right type and layout becomes the parameter itself (file-backed, pages shared); any
other is converted once, the pages it came from are given back at once, and where they are is noted.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import nn

from comfy.interrupt import throw_exception_if_processing_interrupted
from comfy.weights.encodings import encode_layers
from comfy.weights.mapped_file import release_pages
from comfy.weights.pages import WeightMemory, is_channels_last
from comfy.weights.sources import Source, file_state, fresh_source, note_source

logger = logging.getLogger(__name__)

BLOCK_ELEMENTS = 2**22  # of a weight, copied between two looks for a cancellation


@dataclass(frozen=True)
class AssignReport:
    """Keys that did not meet.

    Attributes:
        missing: Parameters and buffers of the module the state dict lacks.
        unexpected: State-dict keys the module lacks.
        matched: How many keys met.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    matched: int

    def log(self, name: str) -> None:
        """Report what did not meet, by count and example."""
        for what, keys in (("missing", self.missing), ("unexpected", self.unexpected)):
            if keys:
                logger.warning("%s: %d %s keys, such as %s", name, len(keys), what, keys[0])


def assign_weights(
    module: nn.Module, state_dict: MutableMapping[str, torch.Tensor], consume: bool = False
) -> AssignReport:
    """Load weights by assignment; the module's own types win.

    Args:
        module: Network to fill; its parameters may be on the meta device.
        state_dict: Tensors by the module's keys.
        consume: Remove entries from `state_dict` as they are taken, so that converted tensors are
            freed one by one.
    Returns:
        Which keys did not meet; the caller decides what is an error.
    Raises:
        UnknownEncodingError: A weight is stored in a code that is not known.
        RuntimeError: A tensor has another shape than its parameter (torch names both).
        InterruptProcessingException: The prompt was cancelled; the module is as it was.
    """
    module.requires_grad_(False)
    state_dict = encode_layers(module, state_dict)
    own = dict(module.state_dict(keep_vars=True))
    prepared: dict[str, torch.Tensor] = {}
    sources: dict[str, Source] = {}
    memory = WeightMemory()
    for key in list(state_dict):
        throw_exception_if_processing_interrupted()
        tensor = state_dict.pop(key) if consume else state_dict[key]
        state = file_state(tensor)
        prepared[key] = _in_form_of(tensor, own.get(key), memory)
        if prepared[key] is not tensor and state is not None:
            sources[key] = fresh_source(prepared[key], tensor, state)
        del tensor
    answer = module.load_state_dict(prepared, strict=False, assign=True)
    module.requires_grad_(False)
    _note_sources(module, prepared, sources)
    unexpected = tuple(answer.unexpected_keys)
    return AssignReport(tuple(answer.missing_keys), unexpected, len(prepared) - len(unexpected))


def _in_form_of(
    tensor: torch.Tensor, target: torch.Tensor | None, memory: WeightMemory
) -> torch.Tensor:
    """The tensor itself, or a copy in the target's floating type and layout, made in one pass."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter)  # layers convert quantised classes
    if target is None or not plain:
        return tensor
    if (
        tensor.ndim < target.ndim
        and (1,) * (target.ndim - tensor.ndim) + tensor.shape == target.shape
    ):
        tensor = tensor.reshape(target.shape)  # GGUF files do not keep first axes of one
    if tensor.shape != target.shape:
        return tensor
    floats = tensor.is_floating_point() and target.is_floating_point()
    dtype = target.dtype if floats else tensor.dtype
    channels_last = is_channels_last(target) and not is_channels_last(tensor)
    if tensor.dtype == dtype and not channels_last:
        return tensor
    if channels_last:
        converted = memory.empty(tensor.shape, dtype, channels_last=True)
    else:
        converted = memory.empty_like(tensor, dtype)
    _copy(converted, tensor)
    release_pages(tensor)
    return converted


def _note_sources(
    module: nn.Module, prepared: dict[str, torch.Tensor], sources: dict[str, Source]
) -> None:
    """Note what the parameters were converted from, for weights that their layers took as given."""
    own = module.state_dict(keep_vars=True) if sources else {}
    for key, source in sources.items():
        weight = own.get(key)
        if isinstance(weight, nn.Parameter) and weight.data_ptr() == prepared[key].data_ptr():
            note_source(weight, source)


def _copy(converted: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copies a block of rows at a time: a large weight, cold on a disk, takes half a second."""
    if tensor.numel() <= BLOCK_ELEMENTS or tensor.ndim == 0:
        converted.copy_(tensor)
        return
    rows = max(1, BLOCK_ELEMENTS * tensor.shape[0] // tensor.numel())
    for into, part in zip(converted.split(rows), tensor.split(rows)):
        throw_exception_if_processing_interrupted()
        into.copy_(part)
