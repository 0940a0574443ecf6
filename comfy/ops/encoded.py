"""Layers whose weight is stored in a code: float8 with a scale, blocks of few bits.

An `Encoding` says how a weight is decoded and encoded; `encode_layer` makes any casting layer hold
its weight that way. The layer decodes at use, so a network keeps the size it has in the file.
Patches see the decoded weight through `convert_weight` and `set_weight`; where a code has too few
bits to hold them, they stay apart and are added at every use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from comfy.ops import float8
from comfy.ops.cast import CastWeightBiasOp, cast_bias_weight, uncast_bias_weight

PLAIN_TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Types of weights that are in no code (any more): codes of few bits leave them as they are."""

PLAIN_TYPE = torch.float16
"""Type of weights that had to leave such a code; it keeps more digits than any of them."""

Parts = Mapping[str, torch.Tensor]
"""What a code needs beside the stored weight, by name: scales, zero points, tables."""


class Encoding(Protocol):
    """How a weight is stored.

    Attributes:
        multiplies_in_float8: Its products may be computed without decoding.
        rewrites: A patched weight is stored in the code again; else patches are added at use.
    """

    @property
    def multiplies_in_float8(self) -> bool: ...

    @property
    def rewrites(self) -> bool: ...

    def decode(self, stored: torch.Tensor, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """The weight in `dtype`; `stored` is not modified."""
        ...

    def encode(self, weight: torch.Tensor, parts: Parts, seed: int | None) -> torch.Tensor:
        """A weight in the stored form, or a plain one, which `decode` then leaves as it is.

        Args:
            seed: Makes rounding at random reproducible.
        """
        ...

    def decode_rows(
        self, stored: torch.Tensor, parts: Parts, chosen: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Rows ``[n, D]`` of a table by their numbers ``[n]``; None: decode the whole."""
        ...


class EncodedWeight(CastWeightBiasOp):
    """Mixin put before a casting layer by `encode_layer`.

    Attributes:
        encoding: How the weight is stored.
        part_names: Names of the layer's parameters the encoding needs.
        note_names: Names of those that only travel along.
    """

    comfy_cast_weights = True
    encoding: Encoding
    part_names: tuple[str, ...]
    note_names: tuple[str, ...]
    _decoded_shape: tuple[int, ...]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """How copies and pickles are made: the class is made anew from the plain layer's."""
        plain = next(kind for kind in type(self).__mro__ if not issubclass(kind, EncodedWeight))
        return _revived, (plain,), dict(self.__dict__)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **options: Any) -> Any:
        """Moves like any layer; in another type bytes of a code would be read as other numbers."""
        layer: Any = self
        code = {id(getattr(layer, n)) for n in ("weight", *self.part_names, *self.note_names)}

        def keeping_types(tensor: torch.Tensor) -> torch.Tensor:
            changed = fn(tensor)
            if id(tensor) not in code or changed.dtype == tensor.dtype:
                return changed
            return tensor.to(changed.device)

        return super()._apply(keeping_types, *args, **options)  # type: ignore[misc]

    @property
    def patches_apart(self) -> bool:
        """Whether patches are added at every use, also to a weight that is resident."""
        return not self.encoding.rewrites

    def decoded_shape(self) -> tuple[int, ...]:
        """Shape of the weight as layers compute with it."""
        return tuple(self._decoded_shape)

    def parts(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The encoding's parameters on a device."""
        return {name: getattr(self, name).to(device) for name in self.part_names}

    def decode_weight(self, stored: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """The weight as layers compute with it."""
        return self.encoding.decode(stored, self.parts(stored.device), dtype or torch.float32)

    def convert_weight(
        self,
        weight: torch.Tensor,
        inplace: bool = False,  # noqa: ARG002 - the decoded weight has another type
        **_: Any,
    ) -> torch.Tensor:
        """A stored weight decoded for patching."""
        return self.decode_weight(weight, torch.float32)

    def set_weight(
        self,
        weight: torch.Tensor,
        inplace_update: bool = False,
        seed: int | None = None,
        return_weight: bool = False,
        **_: Any,
    ) -> torch.Tensor | None:
        """Store a decoded weight, or return its stored form.

        Args:
            inplace_update: Write into the parameter, unless it is a plain one from now on.
        """
        stored = self.encoding.encode(weight, self.parts(weight.device), seed)
        if return_weight:
            return stored
        layer: Any = self
        if inplace_update and stored.dtype == layer.weight.dtype:
            layer.weight.data.copy_(stored)
        else:
            layer.weight = nn.Parameter(stored, requires_grad=False)
        return None


class _EncodedLinear(EncodedWeight):
    """Adds products in float8, for codes that allow them."""

    def forward_comfy_cast_weights(self, input: torch.Tensor) -> torch.Tensor:
        layer: Any = self
        if not (self.encoding.multiplies_in_float8 and float8.multiplies(input, layer.weight)):
            return super().forward_comfy_cast_weights(input)  # type: ignore[misc]
        if any(not getattr(f, "takes_stored", False) for f in self.weight_function):
            return super().forward_comfy_cast_weights(input)  # type: ignore[misc]
        stored, bias, token = cast_bias_weight(
            self, device=input.device, bias_dtype=input.dtype, offloadable=True, decoded=False
        )
        parts = self.parts(input.device)
        out = float8.linear(
            input, stored, bias, parts.get("weight_scale"), parts.get("input_scale")
        )
        uncast_bias_weight(self, stored, bias, token)
        return out


class _EncodedEmbedding(EncodedWeight):
    """Decodes the rows that are looked up, where the code has them apart."""

    def forward_comfy_cast_weights(
        self, input: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        layer: Any = self
        rows = None
        if not self.weight_function and not self.patched_on_arrival:
            chosen = input.to(layer.weight.device).reshape(-1)
            dtype = out_dtype or torch.float32
            parts = self.parts(chosen.device)
            rows = self.encoding.decode_rows(layer.weight, parts, chosen, dtype)
        if rows is None:
            weight, _ = cast_bias_weight(self, dtype=out_dtype, device=input.device)
            return nn.functional.embedding(input, weight)
        return rows.to(input.device).reshape(*input.shape, rows.shape[-1])


@functools.cache
def _encoded_class(layer_class: Any) -> Any:
    mixin: Any = EncodedWeight
    if issubclass(layer_class, nn.Linear):
        mixin = _EncodedLinear
    elif issubclass(layer_class, nn.Embedding):
        mixin = _EncodedEmbedding
    return type(f"Encoded{layer_class.__name__}", (mixin, layer_class), {})


def _revived(layer_class: Any) -> Any:
    """An empty encoded layer, to be given its state."""
    kind = _encoded_class(layer_class)
    return kind.__new__(kind)


def encode_layer(
    layer: nn.Module, encoding: Encoding, stored: torch.Tensor, parts: Parts, notes: Parts
) -> None:
    """Make a layer hold its weight in a code; its parameters are then meta tensors to be filled.

    Args:
        layer: A casting layer; its class becomes an encoded one.
        encoding: How the weight is stored.
        stored: Shape and type of the stored weight.
        parts: Shape and type of what else the encoding needs, by the layer's parameter names.
        notes: Likewise what only travels along, so that it is saved again.
    """
    held: Any = layer
    if not isinstance(layer, EncodedWeight):
        layer_class: Any = type(layer)
        held.__class__ = _encoded_class(layer_class)
        held._decoded_shape = tuple(held.weight.shape)
    held.encoding, held.part_names, held.note_names = encoding, tuple(parts), tuple(notes)
    for name, tensor in {"weight": stored, **parts, **notes}.items():
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        held.register_parameter(name, nn.Parameter(empty, requires_grad=False))


def state_dict_for_file(module: nn.Module) -> dict[str, torch.Tensor]:
    """A network's tensors as a file may hold them.

    Weights in the code of a file that says so itself stay in it. Others, such as those of GGUF
    files, and patched ones, which have no code any more, become float16.
    """
    saved: dict[str, torch.Tensor] = module.state_dict()
    for path, layer in module.named_modules():
        if not isinstance(layer, EncodedWeight) or layer.encoding.rewrites:
            continue
        held: Any = layer
        plain = held.weight.dtype in PLAIN_TYPES
        if layer.note_names and not plain:
            continue
        prefix = f"{path}." if path else ""
        saved[f"{prefix}weight"] = layer.decode_weight(held.weight.detach(), PLAIN_TYPE)
        for name in (*layer.part_names, *layer.note_names):
            del saved[f"{prefix}{name}"]
    return saved


def weight_shape(layer: Any) -> tuple[int, ...]:
    """Shape of a layer's weight as the layer computes with it: decoded, and with its patches."""
    weight: torch.Tensor = layer.weight
    is_coded = isinstance(layer, EncodedWeight) and weight.dtype not in PLAIN_TYPES
    shape = layer.decoded_shape() if is_coded else tuple(weight.shape)
    for function in getattr(layer, "weight_function", ()):
        shape = getattr(function, "grown_shape", tuple)(shape)
    return shape


def decoded_tensor(module: nn.Module, key: str) -> torch.Tensor | None:
    """A network's tensor by its key, decoded where it is a weight in a code; None: it has none."""
    path, _, name = key.rpartition(".")
    try:
        layer: Any = module.get_submodule(path)
        found: torch.Tensor = getattr(layer, name)
    except AttributeError:
        return None
    if name != "weight" or not isinstance(layer, EncodedWeight):
        return found
    return layer.decode_weight(found.detach(), torch.float32)


def decoded_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """A network's tensors by key, with empty ones of the decoded shape for weights in a code."""
    weights: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    for path, layer in module.named_modules():
        if isinstance(layer, EncodedWeight):
            key = f"{path}.weight" if path else "weight"
            weights[key] = torch.empty(layer.decoded_shape(), device="meta")
    return weights
