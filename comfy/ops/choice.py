"""Which layers a network is built from, given how it is stored and how it computes."""

from __future__ import annotations

from typing import Any

import torch

from comfy.devices.precision import FLOAT8_TYPES
from comfy.devices.runtime import get_runtime
from comfy.ops.float8 import OPTION, fp8_ops
from comfy.ops.layers import disable_weight_init, manual_cast


def pick_operations(
    weight_dtype: torch.dtype | None,
    compute_dtype: torch.dtype | None,
    load_device: torch.device | None = None,
    disable_fast_fp8: bool = False,
    fp8_optimizations: bool = False,
    scaled_fp8: torch.dtype | None = None,
    model_config: Any | None = None,
) -> type[disable_weight_init]:
    """The layer namespace for a network.

    Args:
        weight_dtype: Type the weights are stored in.
        compute_dtype: Type to compute in; None means the stored one.
        load_device: Device the network will run on.
        disable_fast_fp8: Never multiply in float8.
        fp8_optimizations: Multiply float8 weights as they are where the device can; the speed
            option asks for it too.
        scaled_fp8: Accepted for compatibility.
        model_config: Family description; its `custom_operations` win.
    """
    del load_device, scaled_fp8  # layers that carry a scale are made so when they are filled
    custom = getattr(model_config, "custom_operations", None)
    if custom is not None:
        return custom
    if compute_dtype is None or weight_dtype == compute_dtype:
        return disable_weight_init
    asked = fp8_optimizations or OPTION in get_runtime().precision.fast
    if weight_dtype in FLOAT8_TYPES and asked and not disable_fast_fp8:
        return fp8_ops
    return manual_cast
