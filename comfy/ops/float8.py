"""Matrix products of float8 weights without decoding them, on devices that have them.

The input is scaled and rounded to float8 too, which changes results a little: so they are opt-in,
by `--fast fp8_matrix_mult` or the loader's weight type ending in `_fast`.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from comfy.devices import precision
from comfy.devices.runtime import get_runtime
from comfy.ops.cast import cast_bias_weight, uncast_bias_weight
from comfy.ops.layers import manual_cast

logger = logging.getLogger(__name__)

OPTION = "fp8_matrix_mult"
"""Name of the speed option."""

MULTIPLE = 16
"""Both sizes of a weight must be multiples of this for the hardware's kernels."""

INPUT_TYPE = torch.float8_e4m3fn
"""Type of the rounded input: it keeps more digits than the other one."""


def multiplies(input: torch.Tensor, weight: torch.Tensor, wanted: bool = False) -> bool:
    """Whether a product is computed in float8; says once when it is asked for and impossible.

    Args:
        input: [..., K].
        weight: [N, K] as stored.
        wanted: Asked for by the model; else the speed option decides.
    """
    if not (wanted or OPTION in get_runtime().precision.fast):
        return False
    if not precision.supports_fp8_compute(input.device):
        _say_once(f"{input.device} has no float8 products: float8 weights are decoded instead")
        return False
    fits = weight.dtype == torch.float8_e4m3fn and weight.ndim == 2
    return fits and not any(size % MULTIPLE for size in weight.shape)


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + b with both factors in float8 and sums in float32.

    Args:
        input: [..., K].
        weight: [N, K] in float8.
        weight_scale: What stored weights are multiplied by; None is 1.
        input_scale: What the input is divided by before it is rounded; None finds one from its
            largest value when the weight has a scale too, else 1.
    """
    flat = input.reshape(-1, input.shape[-1])
    one = torch.ones((), device=input.device, dtype=torch.float32)
    limit = torch.finfo(INPUT_TYPE).max
    if input_scale is None and weight_scale is not None:
        input_scale = flat.abs().amax().float().clamp(min=1e-12) / limit
    scale_in = one if input_scale is None else input_scale.float().reshape(())
    scale_w = one if weight_scale is None else weight_scale.float().reshape(())
    rounded = (flat / scale_in.to(flat.dtype)).clamp(-limit, limit).to(INPUT_TYPE)
    out = torch._scaled_mm(
        rounded.contiguous(), weight.t(), scale_a=scale_in, scale_b=scale_w, out_dtype=input.dtype
    )
    if bias is not None:
        out += bias
    return out.reshape(*input.shape[:-1], weight.shape[0])


class fp8_ops(manual_cast):
    """Layers that multiply plain float8 weights as they are, where the device can."""

    class Linear(manual_cast.Linear):
        """Linear with products in float8."""

        def forward_comfy_cast_weights(self, input: torch.Tensor) -> torch.Tensor:
            layer: Any = self
            if not multiplies(input, layer.weight, wanted=True):
                return super().forward_comfy_cast_weights(input)
            weight, bias, token = cast_bias_weight(
                self, device=input.device, bias_dtype=input.dtype, offloadable=True
            )
            out = linear(input, weight, bias)
            uncast_bias_weight(self, weight, bias, token)
            return out
