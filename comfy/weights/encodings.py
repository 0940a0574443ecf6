"""Weights that a file stores in a code, and how the file says so.

A layer `x` is encoded when the file has `x.comfy_quant` (its settings as JSON), when the file's
metadata describes it, when bitsandbytes wrote it (`x.weight.quant_state.bitsandbytes__nf4`), or, in
older files, when there is `x.scale_weight` (such files also hold a marker `scaled_fp8` whose type
is that of the weights). GGUF files say it tensor by tensor (`comfy.weights.gguf_file`).

`gathered` makes one `StoredWeight` of all tensors of such a layer; `encode_layers` makes a
network's layers hold their weights as the file does, so that it can be filled without conversion.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from comfy.devices import casting
from comfy.ops.cast import is_castable
from comfy.ops.encoded import Encoding, Parts, encode_layer
from comfy.weights.errors import NotSafetensorsError
from comfy.weights.low_bit import four_bit
from comfy.weights.low_bit.stored import StoredWeight
from comfy.weights.rounding import stochastic_rounding

SETTINGS = "comfy_quant"
"""Last part of the key of a layer's settings."""

METADATA = "_quantization_metadata"
"""Entry of a file's metadata with the settings of all layers."""

MARKER = "scaled_fp8"
"""Key, below a network's prefix, of older files with scaled float8 weights."""

OLD_NAMES = {"scale_weight": "weight_scale", "scale_input": "input_scale"}
"""Names of scales in older files -> names in settings of today."""


class UnknownEncodingError(ValueError):
    """A layer is stored in a code that is not known here, or its description is broken."""


class Settings(NamedTuple):
    """How one layer is stored.

    Attributes:
        format: Name of the code.
        full_precision: Never multiply without decoding.
        is_rotated: The weight was turned before it was stored.
    """

    format: str
    full_precision: bool = False
    is_rotated: bool = False


@dataclass(frozen=True)
class ScaledWeight:
    """weight = stored * weight_scale, the scale being one number or one for each output row.

    Attributes:
        dtype: Type of the stored weight.
        multiplies_in_float8: Its products may be computed without decoding.
    """

    dtype: torch.dtype
    multiplies_in_float8: bool
    rewrites: ClassVar[bool] = True

    def decode(self, stored: torch.Tensor, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """See `comfy.ops.encoded.Encoding`."""
        return casting.cast_to(stored, dtype) * self._scale(parts, stored).to(dtype)

    def encode(self, weight: torch.Tensor, parts: Parts, seed: int | None) -> torch.Tensor:
        """Values beyond the scale's range become the largest that can be stored."""
        scaled = weight.float() / self._scale(parts, weight)
        limit = torch.finfo(self.dtype).max
        return stochastic_rounding(scaled.clamp(-limit, limit), self.dtype, seed=seed or 0)

    def decode_rows(
        self, stored: torch.Tensor, parts: Parts, chosen: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Some rows of a table."""
        scale = parts["weight_scale"]
        taken = stored.view(torch.uint8)[chosen] if stored.element_size() == 1 else stored[chosen]
        own = {"weight_scale": scale if scale.numel() == 1 else scale.reshape(-1)[chosen]}
        return self.decode(taken.view(stored.dtype), own, dtype)

    @staticmethod
    def _scale(parts: Parts, weight: torch.Tensor) -> torch.Tensor:
        scale = parts["weight_scale"].float()
        return (
            scale.reshape(()) if scale.numel() == 1 else scale.reshape(-1, *[1] * (weight.ndim - 1))
        )

    @classmethod
    def of_file(cls, settings: Settings, weight: torch.Tensor, parts: Parts) -> ScaledWeight:
        """The code of a layer as its file describes it.

        Raises:
            BrokenCodeError: Scales are neither one nor one for each row, or the weight is in bytes.
        """
        name = settings.format
        four_bit.require_count(parts, name, "weight_scale", 1, *weight.shape[:1])
        if not weight.is_floating_point():
            found = str(weight.dtype).removeprefix("torch.")
            raise four_bit.BrokenCodeError(f"is stored as {name!r}; found {found}")
        single = parts["weight_scale"].numel() == 1
        products = single and not settings.full_precision and weight.dtype == torch.float8_e4m3fn
        return cls(weight.dtype, products)


STORED_TYPES = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32")

ENCODINGS: dict[str, Callable[[Settings, torch.Tensor, Parts], Encoding]] = {
    **dict.fromkeys(STORED_TYPES, ScaledWeight.of_file),
    "nvfp4": lambda _, weight, parts: four_bit.nvfp4(weight, parts),
    "mxfp8": lambda _, weight, parts: four_bit.mxfp8(weight, parts),
    "int8_tensorwise": lambda settings, weight, parts: four_bit.int8(
        weight, parts, settings.is_rotated
    ),
}
"""Name of a code in settings -> what makes it from a layer's settings and tensors."""

PART_NAMES = ("weight_scale", "weight_scale_2", "input_scale")
"""Names of the tensors that codes need beside the weight."""


def with_settings(
    state_dict: dict[str, Any], metadata: Mapping[str, str] | None, path: str | os.PathLike[str]
) -> dict[str, Any]:
    """The tensors of a file with the settings its metadata has, under the keys of the layers.

    Raises:
        NotSafetensorsError: The metadata is no description of layers.
    """
    text = (metadata or {}).get(METADATA)
    if text is None:
        return state_dict
    try:
        layers = _json(text, METADATA).get("layers")
    except UnknownEncodingError as error:
        raise NotSafetensorsError(path, str(error)) from error
    if not isinstance(layers, dict):
        raise NotSafetensorsError(path, f"'{METADATA}' in its metadata lists no layers")
    described = {
        f"{layer}.{SETTINGS}": _as_tensor(settings)
        for layer, settings in layers.items()
        if f"{layer}.weight" in state_dict and f"{layer}.{SETTINGS}" not in state_dict
    }
    return {**state_dict, **described}


def is_encoded(key: str, state_dict: Mapping[str, Any]) -> bool:
    """Whether the tensor under a key is a weight stored in a code."""
    if isinstance(state_dict[key], StoredWeight):
        return True
    if not key.endswith(".weight"):
        return False
    layer = key[: -len("weight")]
    return any(layer + name in state_dict for name in (SETTINGS, "scale_weight", "weight_scale"))


def gather(state_dict: dict[str, torch.Tensor]) -> None:
    """As `gathered`, in place."""
    found = gathered(state_dict)
    if found is not state_dict:
        state_dict.clear()
        state_dict.update(found)


def gathered(state_dict: MutableMapping[str, torch.Tensor]) -> MutableMapping[str, torch.Tensor]:
    """One tensor, of the shape the weight has decoded, in the place of all those of a coded layer.

    Args:
        state_dict: Not changed.
    Returns:
        `state_dict` itself when nothing is in a code, or everything was gathered before.
    Raises:
        UnknownEncodingError: A code is unknown, or a layer lacks what its code needs.
    """
    found = dict(_described(state_dict))
    bnb = dict(_of_bitsandbytes(state_dict))
    if not found and not bnb:
        return state_dict
    left = _renamed(state_dict, found)
    for layer, settings in found.items():
        _gather(layer, settings, left)
    for layer, kind in bnb.items():
        _gather_bitsandbytes(layer, kind, left)
    return left


def encode_layers(
    module: nn.Module, state_dict: MutableMapping[str, torch.Tensor]
) -> MutableMapping[str, torch.Tensor]:
    """Make layers of a network hold their weights in the code a file stores them in.

    Args:
        module: The network, not filled yet.
        state_dict: Tensors by the network's keys; not changed.
    Returns:
        What is left to fill in under the layers' own names; `state_dict` itself when nothing is
        encoded. What no layer can hold in a code is decoded.
    Raises:
        UnknownEncodingError: A code is unknown, or a layer lacks what its code needs.
    """
    whole = gathered(state_dict)
    if not any(isinstance(value, StoredWeight) for value in whole.values()):
        return whole
    left: dict[str, torch.Tensor] = {}
    for key, value in whole.items():
        if not isinstance(value, StoredWeight):
            left[key] = value
        elif _encode(module, key, value):
            layer = key.removesuffix("weight")
            left[key] = value.stored
            left.update({f"{layer}{n}": t for n, t in (*value.parts.items(), *value.notes.items())})
        else:
            left[key] = value.decoded()
    return left


def code_names(state_dict: Mapping[str, torch.Tensor], prefix: str = "") -> list[str]:
    """Names of the codes of few bits below a prefix, those of most weights first."""
    counts: dict[str, int] = {}
    for key, value in state_dict.items():
        if key.startswith(prefix) and isinstance(value, StoredWeight):
            name = str(getattr(value.code, "name", value.stored.dtype)).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + value.numel()
    return sorted(counts, key=lambda name: -counts[name])


def convert_old_quants(
    state_dict: dict[str, torch.Tensor],
    model_prefix: str = "",
    metadata: Mapping[str, str] | None = None,
) -> tuple[dict[str, torch.Tensor], Mapping[str, str]]:
    """Coded weights of older files, and settings in metadata, in the form of today's files.

    Args:
        state_dict: Tensors of a file; not changed.
        model_prefix: Only layers under this prefix are rewritten.
        metadata: The file's metadata.
    Returns:
        (tensors with settings for each coded layer, metadata).
    Raises:
        UnknownEncodingError: A description is broken.
    """
    whole = with_settings(state_dict, metadata, "the file")
    inside = {key: value for key, value in whole.items() if key.startswith(model_prefix)}
    renamed = _renamed(inside, dict(_described(inside)))
    outside = {key: value for key, value in whole.items() if key not in inside}
    return {**outside, **renamed}, metadata or {}


def _described(state_dict: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Settings]]:
    """(layer, settings) of every encoded weight."""
    markers = {k[: -len(MARKER)]: t for k, t in state_dict.items() if k.split(".")[-1] == MARKER}
    for key in state_dict:
        if isinstance(state_dict[key], StoredWeight) or not is_encoded(key, state_dict):
            continue
        layer = key[: -len(".weight")]
        described = state_dict.get(f"{layer}.{SETTINGS}")
        if described is not None:
            said = described.cpu().flatten().view(torch.uint8).numpy().tobytes()
            raw = _json(said, f"{layer}.{SETTINGS}")
            full = bool(raw.get("full_precision_matrix_mult", False))
            yield layer, Settings(str(raw.get("format")), full, bool(raw.get("convrot", False)))
        else:
            name = str(state_dict[key].dtype).removeprefix("torch.")
            full = any(layer.startswith(p) and t.numel() == 2 for p, t in markers.items())
            yield layer, Settings(name, full)


def _json(text: str | bytes, what: str) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UnknownEncodingError(f"'{what}' is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise UnknownEncodingError(f"'{what}' is not a JSON object")
    return raw


def _as_tensor(settings: Any) -> torch.Tensor:
    """Settings as a file keeps them."""
    return torch.frombuffer(bytearray(json.dumps(settings).encode()), dtype=torch.uint8)


def _renamed(
    state_dict: Mapping[str, torch.Tensor], found: Mapping[str, Settings]
) -> dict[str, torch.Tensor]:
    """The tensors under today's names, with settings for every layer found, without markers."""
    left: dict[str, torch.Tensor] = {}
    for key, tensor in state_dict.items():
        layer, _, name = key.rpartition(".")
        if name == MARKER:
            continue
        new = OLD_NAMES.get(name, name) if layer in found else name
        left[f"{layer}.{new}" if layer else new] = tensor
    for layer, settings in found.items():
        written: dict[str, Any] = {"format": settings.format}
        if settings.full_precision:
            written["full_precision_matrix_mult"] = True
        left.setdefault(f"{layer}.{SETTINGS}", _as_tensor(written))
    return left


def _gather(layer: str, settings: Settings, tensors: dict[str, torch.Tensor]) -> None:
    """Put one tensor in the place of those of a layer."""
    make = ENCODINGS.get(settings.format)
    if make is None:
        raise UnknownEncodingError(
            f"'{layer}' is stored as {settings.format!r}; known: {', '.join(ENCODINGS)}"
        )
    names = [name for name in PART_NAMES if f"{layer}.{name}" in tensors]
    parts = {name: tensors.pop(f"{layer}.{name}") for name in names}
    notes = {SETTINGS: tensors.pop(f"{layer}.{SETTINGS}")}
    if "weight_scale" not in parts:
        raise UnknownEncodingError(f"'{layer}' is stored as {settings.format!r} without its scale")
    weight = tensors[f"{layer}.weight"]
    with _naming(layer):
        code = make(settings, weight, parts)
    shape = getattr(code, "shape", weight.shape)
    tensors[f"{layer}.weight"] = StoredWeight(weight, code, shape, parts, notes)


def _of_bitsandbytes(state_dict: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """(layer, kind) of every weight that bitsandbytes stored in four bits."""
    for key in state_dict:
        layer, mark, kind = key.partition(f".{four_bit.BNB_STATE}")
        if mark and f"{layer}.weight" in state_dict:
            yield layer, kind


def _gather_bitsandbytes(layer: str, kind: str, tensors: dict[str, torch.Tensor]) -> None:
    weight = f"{layer}.weight"
    state = tensors.pop(f"{layer}.{four_bit.BNB_STATE}{kind}")
    names = [name for name in four_bit.BNB_PARTS if f"{weight}.{name}" in tensors]
    parts = {name: tensors.pop(f"{weight}.{name}") for name in names}
    with _naming(layer):
        code = four_bit.bitsandbytes(kind, tensors[weight], parts, state)
    tensors[weight] = StoredWeight(tensors[weight], code, code.shape, parts)


@contextlib.contextmanager
def _naming(layer: str) -> Iterator[None]:
    """Puts a layer's name on what is wrong with its tensors."""
    try:
        yield
    except four_bit.BrokenCodeError as error:
        raise UnknownEncodingError(f"'{layer}' {error}") from error


def _encode(module: nn.Module, key: str, value: StoredWeight) -> bool:
    """Make the layer of a key hold its weight in the code; False where no layer can."""
    path, _, name = key.rpartition(".")
    try:
        target: Any = module.get_submodule(path)
    except AttributeError:  # no such layer: reported with the other keys that have no place
        return False
    own = getattr(target, "weight", None)
    if name != "weight" or not is_castable(target) or own is None or own.shape != value.shape:
        return False  # a wrong shape is reported when the network is filled
    encode_layer(target, value.code, value.stored, value.parts, value.notes)
    return True
