"""Layers injected into every network, under the names custom nodes import."""
# ruff: noqa: F401

from comfy.ops.cast import (
    CastWeightBiasOp,
    cast_bias_weight,
    cast_to,
    cast_to_input,
    uncast_bias_weight,
)
from comfy.ops.choice import pick_operations
from comfy.ops.float8 import fp8_ops
from comfy.ops.layers import disable_weight_init, manual_cast
from comfy.ops.plain import is_plain_linear, linear_parts
from comfy.public import write_through

write_through(__name__)
