"""Which layers a network is built from, given how it is stored and how it computes."""

from __future__ import annotations

from typing import Any

import torch

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
        fp8_optimizations: Multiply in float8 where the device can.
        scaled_fp8: Type of float8 weights that carry a scale.
        model_config: Family description; its `custom_operations` win.
    """
    del load_device, disable_fast_fp8, fp8_optimizations, scaled_fp8
    custom = getattr(model_config, "custom_operations", None)
    if custom is not None:
        return custom
    if compute_dtype is None or weight_dtype == compute_dtype:
        return disable_weight_init
    return manual_cast
