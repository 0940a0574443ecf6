"""OFT and BOFT: the weight is rotated by learned orthogonal blocks instead of added to.

A block's rotation is the Cayley transform of a skew-symmetric matrix Q, R = (I + Q)(I - Q)^-1;
`alpha` bounds the norm of Q. OFT rotates groups of rows once, BOFT in butterfly stages.
Sources: Qiu et al. 2023, https://arxiv.org/abs/2306.07280; Liu et al. 2023,
https://arxiv.org/abs/2311.06243.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from comfy.weights.adapters.base import (
    AdapterError,
    DeltaFunction,
    WeightAdapterBase,
    moved,
    take,
)
from comfy.weights.adapters.dora import add_delta


def cayley(blocks: torch.Tensor, bound: float | None) -> torch.Tensor:
    """Rotations [..., b, b] of blocks [..., b, b]; `bound` limits the norm of the whole Q."""
    skew = blocks - blocks.transpose(-1, -2)
    if bound is not None and bound > 0:
        norm = skew.norm() + 1e-8
        if norm > bound:
            skew = skew * (bound / norm)
    identity = torch.eye(blocks.shape[-1], device=blocks.device, dtype=torch.float32)
    skew = skew.float()  # there is no inverse in half precision
    return ((identity + skew) @ torch.linalg.inv(identity - skew)).to(blocks.dtype)


class _RotationAdapter(WeightAdapterBase):
    """weights = (blocks, rescale or None, alpha or None, dora_scale or None)."""

    block_axes: int

    @classmethod
    def load(
        cls,
        x: str,
        lora: Mapping[str, torch.Tensor],
        alpha: float | None,
        dora_scale: torch.Tensor | None,
        loaded_keys: set[str] | None = None,
    ) -> _RotationAdapter | None:
        """See the base class."""
        blocks = lora.get(f"{x}.oft_blocks")
        if blocks is None or blocks.ndim != cls.block_axes:
            return None
        used = set() if loaded_keys is None else loaded_keys
        blocks, rescale = take(lora, used, f"{x}.oft_blocks", f"{x}.rescale")
        return cls(used, (blocks, rescale, alpha, dora_scale))

    def extent(self) -> tuple[int, int | None] | None:
        """See the base class."""
        blocks = self.weights[0]
        return blocks.shape[-3] * blocks.shape[-1], None

    def calculate_weight(
        self,
        weight: torch.Tensor,
        key: str,
        strength: float,
        strength_model: float,  # noqa: ARG002
        offset: tuple[int, int, int] | None,  # noqa: ARG002
        function: DeltaFunction,
        intermediate_dtype: torch.dtype = torch.float32,
        original_weight: torch.Tensor | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """See the base class."""
        blocks, rescale, alpha, dora_scale = self.weights
        blocks = moved(blocks, weight.device, intermediate_dtype)
        rescale = moved(rescale, weight.device, intermediate_dtype)
        assert blocks is not None
        # Training takes gradients of it, and the weight is changed in place.
        running = weight.to(intermediate_dtype, copy=blocks.requires_grad)
        try:
            delta = self._change(running, cayley(blocks, alpha), rescale, strength)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise AdapterError(
                f"'{key}': rotation blocks {tuple(blocks.shape)} do not fit weight "
                f"{tuple(weight.shape)}"
            ) from error
        return add_delta(weight, delta, 1.0, strength, dora_scale, function, intermediate_dtype)

    def _change(
        self,
        weight: torch.Tensor,
        rotation: torch.Tensor,
        rescale: torch.Tensor | None,
        strength: float,
    ) -> torch.Tensor:
        """What is added to the weight, before `strength` multiplies it; each kind defines it."""
        del rotation, rescale, strength
        return torch.zeros_like(weight)


class OFTAdapter(_RotationAdapter):
    """blocks [k, b, b] rotate k groups of b rows."""

    name = "oft"
    block_axes = 3

    def _change(
        self,
        weight: torch.Tensor,
        rotation: torch.Tensor,
        rescale: torch.Tensor | None,  # noqa: ARG002 - the reference reads and ignores it
        strength: float,
    ) -> torch.Tensor:
        count, size, _ = rotation.shape
        identity = torch.eye(size, device=rotation.device, dtype=rotation.dtype)
        grouped = weight.reshape(count, size, *weight.shape[1:])
        # `strength` enters here as well as in the sum, as the files' authors expect
        step = rotation * strength - strength * identity
        return torch.einsum("k n m, k n ... -> k m ...", step, grouped).reshape(weight.shape)


class BOFTAdapter(_RotationAdapter):
    """blocks [m, k, b, b] rotate rows in m butterfly stages."""

    name = "boft"
    block_axes = 4

    def _change(
        self,
        weight: torch.Tensor,
        rotation: torch.Tensor,
        rescale: torch.Tensor | None,
        strength: float,
    ) -> torch.Tensor:
        stages, _, size, _ = rotation.shape
        identity = torch.eye(size, device=rotation.device, dtype=rotation.dtype)
        turned = weight
        for stage in range(stages):
            stride = 2**stage * (size // 2)
            turn = rotation[stage]
            if strength != 1.0:
                turn = turn * strength + (1.0 - strength) * identity
            turned = turned.unflatten(0, (-1, 2, stride)).transpose(1, 2).flatten(0, 2)
            turned = turned.unflatten(0, (-1, size))
            turned = torch.einsum("b i j, b j ... -> b i ...", turn, turned).flatten(0, 1)
            turned = turned.unflatten(0, (-1, stride, 2)).transpose(1, 2).flatten(0, 2)
        if rescale is not None:
            turned = turned * rescale
        return turned - weight
