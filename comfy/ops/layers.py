"""torch layers that skip weight initialisation and can cast or stream their weights.

Every network takes one of these namespaces as `operations` and builds its layers from it:
`disable_weight_init` computes with weights as they are stored, `manual_cast` casts them to the
input's device and type on every call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comfy.ops import convolution, normalization
from comfy.ops.cast import CastLayer, cast_bias_weight, uncast_bias_weight


class _Convolution(CastLayer):
    """Shared casting forward of the plain convolutions."""

    def forward_comfy_cast_weights(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias, token = cast_bias_weight(self, input, offloadable=True)
        out = self._conv_forward(input, weight, bias)  # type: ignore[attr-defined]
        uncast_bias_weight(self, weight, bias, token)
        return out


class _TransposedConvolution(CastLayer):
    """Shared casting forward of the transposed convolutions."""

    dimensions: int

    def forward_comfy_cast_weights(
        self, input: torch.Tensor, output_size: list[int] | None = None
    ) -> torch.Tensor:
        layer: Any = self
        output_padding = layer._output_padding(
            input, output_size, layer.stride, layer.padding, layer.kernel_size, self.dimensions,
            layer.dilation,
        )  # fmt: skip
        weight, bias, token = cast_bias_weight(self, input, offloadable=True)
        convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[self.dimensions - 1]
        out = convolve(
            input, weight, bias, layer.stride, layer.padding, output_padding, layer.groups,
            layer.dilation,
        )  # fmt: skip
        uncast_bias_weight(self, weight, bias, token)
        return out


class disable_weight_init:
    """Layers that leave their weights as allocated and compute in the type they are stored in."""

    class Linear(CastLayer, nn.Linear):
        """x W^T + b."""

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(convolution.in_rows(input))

        def forward_comfy_cast_weights(self, input: torch.Tensor) -> torch.Tensor:
            weight, bias, token = cast_bias_weight(self, input, offloadable=True)
            out = F.linear(input, weight, bias)
            uncast_bias_weight(self, weight, bias, token)
            return out

    class Conv1d(_Convolution, nn.Conv1d):
        """Convolution over [B, C, L]."""

        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out = convolution.convolve_line_or_video(self, input, weight, bias)
            return super()._conv_forward(input, weight, bias) if out is None else out

    class Conv2d(_Convolution, nn.Conv2d):
        """Convolution over [B, C, H, W]."""

        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out = convolution.convolve(self, input, weight, bias)
            return super()._conv_forward(input, weight, bias) if out is None else out

    class Conv3d(_Convolution, nn.Conv3d):
        """Convolution over [B, C, T, H, W]."""

        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out = convolution.convolve_line_or_video(self, input, weight, bias)
            return super()._conv_forward(input, weight, bias) if out is None else out

    class ConvTranspose1d(_TransposedConvolution, nn.ConvTranspose1d):
        """Transposed convolution over [B, C, L]."""

        dimensions = 1

    class ConvTranspose2d(_TransposedConvolution, nn.ConvTranspose2d):
        """Transposed convolution over [B, C, H, W]."""

        dimensions = 2

    class ConvTranspose3d(_TransposedConvolution, nn.ConvTranspose3d):
        """Transposed convolution over [B, C, T, H, W]."""

        dimensions = 3

    class GroupNorm(CastLayer, normalization.ItemwiseGroupNorm):
        """Normalisation over groups of channels."""

        def forward_comfy_cast_weights(self, input: torch.Tensor) -> torch.Tensor:
            weight, bias, token = cast_bias_weight(self, input, offloadable=True)
            out = normalization.group_norm(input, self.num_groups, weight, bias, self.eps)
            uncast_bias_weight(self, weight, bias, token)
            return out

    class LayerNorm(CastLayer, nn.LayerNorm):
        """Normalisation over the last axes; affine parameters may be absent."""

        def forward_comfy_cast_weights(self, input: torch.Tensor) -> torch.Tensor:
            weight, bias, token = cast_bias_weight(self, input, offloadable=True)
            out = F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
            uncast_bias_weight(self, weight, bias, token)
            return out

    class RMSNorm(CastLayer, nn.RMSNorm):
        """Division by the root mean square over the last axes; no bias."""

        bias = None

        def forward_comfy_cast_weights(self, input: torch.Tensor) -> torch.Tensor:
            weight, bias, token = cast_bias_weight(self, input, offloadable=True)
            out = F.rms_norm(input, self.normalized_shape, weight, self.eps)
            uncast_bias_weight(self, weight, bias, token)
            return out

    class Embedding(CastLayer, nn.Embedding):
        """Rows of a table; `out_dtype` is the type of the result."""

        bias = None

        def forward_comfy_cast_weights(
            self, input: torch.Tensor, out_dtype: torch.dtype | None = None
        ) -> torch.Tensor:
            at_rest = self.weight.device != input.device and not self.patched_on_arrival
            is_here = self.stream_plan is not None and self.stream_plan.holds(self)
            if at_rest and not self.weight_function and not is_here:
                rows = self._rows(input.to(self.weight.device), self.weight).to(input.device)
            else:
                weight, _ = cast_bias_weight(self, device=input.device)
                rows = self._rows(input, weight)
            return rows if out_dtype is None else rows.to(dtype=out_dtype)

        def _rows(self, indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if weight.element_size() == 1:  # no gather kernel for float8: look up bytes
                found = F.embedding(indices, weight.view(torch.uint8), self.padding_idx)
                return found.view(weight.dtype)
            return F.embedding(
                indices, weight, self.padding_idx, self.max_norm, self.norm_type,
                self.scale_grad_by_freq, self.sparse,
            )  # fmt: skip

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            """As the base; without casting `out_dtype` is applied to the rows."""
            if self.needs_cast():
                return super().forward(*args, **kwargs)
            out_dtype = kwargs.pop("out_dtype", None)
            rows = super().forward(*args, **kwargs)
            return rows if out_dtype is None else rows.to(dtype=out_dtype)

    @classmethod
    def conv_nd(cls, dims: int, *args: Any, **kwargs: Any) -> nn.Module:
        """A convolution over `dims` axes: 2 or 3.

        Raises:
            ValueError: Any other number of axes.
        """
        if dims not in (2, 3):
            raise ValueError(f"unsupported dimensions: {dims}; supported: 2, 3")
        return (cls.Conv2d if dims == 2 else cls.Conv3d)(*args, **kwargs)


class manual_cast(disable_weight_init):
    """The same layers, casting weight and bias to the input's device and type on every call."""

    class Linear(disable_weight_init.Linear):
        """Casting Linear."""

        comfy_cast_weights = True

    class Conv1d(disable_weight_init.Conv1d):
        """Casting Conv1d."""

        comfy_cast_weights = True

    class Conv2d(disable_weight_init.Conv2d):
        """Casting Conv2d."""

        comfy_cast_weights = True

    class Conv3d(disable_weight_init.Conv3d):
        """Casting Conv3d."""

        comfy_cast_weights = True

    class ConvTranspose1d(disable_weight_init.ConvTranspose1d):
        """Casting ConvTranspose1d."""

        comfy_cast_weights = True

    class ConvTranspose2d(disable_weight_init.ConvTranspose2d):
        """Casting ConvTranspose2d."""

        comfy_cast_weights = True

    class ConvTranspose3d(disable_weight_init.ConvTranspose3d):
        """Casting ConvTranspose3d."""

        comfy_cast_weights = True

    class GroupNorm(disable_weight_init.GroupNorm):
        """Casting GroupNorm."""

        comfy_cast_weights = True

    class LayerNorm(disable_weight_init.LayerNorm):
        """Casting LayerNorm."""

        comfy_cast_weights = True

    class RMSNorm(disable_weight_init.RMSNorm):
        """Casting RMSNorm."""

        comfy_cast_weights = True

    class Embedding(disable_weight_init.Embedding):
        """Casting Embedding."""

        comfy_cast_weights = True
