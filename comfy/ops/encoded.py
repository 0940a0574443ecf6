"""Layers whose weight is stored in a code: float8 with a scale now, other families of codes later.

An `Encoding` says how a weight is decoded and encoded; `encode_layer` makes any casting layer hold
its weight that way. The layer decodes at use, so a network keeps the size it has in the file, and
patches see the decoded weight through `convert_weight` and `set_weight`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from comfy.ops import float8
from comfy.ops.cast import CastWeightBiasOp, cast_bias_weight, uncast_bias_weight

Parts = Mapping[str, torch.Tensor]
"""What a code needs beside the stored weight, by name: scales, zero points, tables."""


class Encoding(Protocol):
    """How a weight is stored.

    Attributes:
        multiplies_in_float8: Its products may be computed without decoding.
    """

    multiplies_in_float8: bool

    def decode(self, stored: torch.Tensor, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """The weight in `dtype`; `stored` is not modified."""
        ...

    def encode(self, weight: torch.Tensor, parts: Parts, seed: int | None) -> torch.Tensor:
        """A weight in the stored form; `seed` makes rounding at random reproducible."""
        ...


class EncodedWeight(CastWeightBiasOp):
    """Mixin put before a casting layer by `encode_layer`.

    Attributes:
        encoding: How the weight is stored.
        part_names: Names of the layer's parameters the encoding needs.
    """

    comfy_cast_weights = True
    encoding: Encoding
    part_names: tuple[str, ...]

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
        """Store a decoded weight, or return its stored form."""
        stored = self.encoding.encode(weight, self.parts(weight.device), seed)
        if return_weight:
            return stored
        layer: Any = self
        if inplace_update:
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


@functools.cache
def _encoded_class(layer_class: Any) -> Any:
    mixin = _EncodedLinear if issubclass(layer_class, nn.Linear) else EncodedWeight
    return type(f"Encoded{layer_class.__name__}", (mixin, layer_class), {})


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
    held.encoding, held.part_names = encoding, tuple(parts)
    for name, tensor in {"weight": stored, **parts, **notes}.items():
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        held.register_parameter(name, nn.Parameter(empty, requires_grad=False))
