"""FreeU: stronger backbone features and smoother skips in a UNet's decoder.

Source: Si et al. 2023, https://arxiv.org/abs/2309.11497.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

SKIP_CUTOFF = 1  # half width of the low frequencies of a skip

Gain = Callable[[Tensor, float], Tensor | float]


def scale_low_frequencies(x: Tensor, cutoff: int, scale: float) -> Tensor:
    """Multiply the frequencies of the last two axes within `cutoff` of zero by a factor."""
    spectrum = torch.fft.fftshift(torch.fft.fftn(x.float(), dim=(-2, -1)), dim=(-2, -1))
    centre = spectrum
    for axis in (-2, -1):
        middle = spectrum.shape[axis] // 2
        first, last = max(middle - cutoff, 0), min(middle + cutoff, spectrum.shape[axis])
        centre = centre.narrow(axis, first, last - first)
    centre.mul_(scale)
    spectrum = torch.fft.ifftshift(spectrum, dim=(-2, -1))
    return torch.fft.ifftn(spectrum, dim=(-2, -1)).real.to(x.dtype)


def uniform_gain(h: Tensor, strength: float) -> Tensor | float:
    """The same gain for all cells."""
    del h
    return strength


def structured_gain(h: Tensor, strength: float) -> Tensor:
    """More gain where the mean over the channels is large (FreeU version 2)."""
    mean = h.mean(1, keepdim=True)
    low, high = mean.amin((2, 3), keepdim=True), mean.amax((2, 3), keepdim=True)
    span = high - low
    place = (mean - low) / torch.where(span == 0, 1.0, span)  # of equal cells none stands out
    return (strength - 1) * place + 1


def freed(model: Any, b1: float, b2: float, s1: float, s2: float, gain: Gain) -> Any:
    """A view of the model with FreeU in its two deepest decoder widths.

    Raises:
        ValueError: Its network is no UNet.
    """
    config = model.model.model_config
    width = config.unet_config.get("model_channels")
    if width is None:
        raise ValueError(
            f"model: FreeU changes the decoder of a UNet (Stable Diffusion 1, 2, XL), which "
            f"{type(config).__name__} does not have; take the node out"
        )
    strengths = {width * 4: (b1, s1), width * 2: (b2, s2)}

    def patch(h: Tensor, skip: Tensor, transformer_options: Any) -> tuple[Tensor, Tensor]:
        del transformer_options
        found = strengths.get(h.shape[1])
        if found is None:
            return h, skip
        half = h.shape[1] // 2
        h = torch.cat([h[:, :half] * gain(h, found[0]), h[:, half:]], dim=1)
        return h, scale_low_frequencies(skip, SKIP_CUTOFF, found[1])

    view = model.clone()
    view.set_model_output_block_patch(patch)
    return view


def strength_input(id: str, default: float) -> io.Float.Input:
    """Declaration of a factor."""
    return io.Float.Input(id, default=default, min=0.0, max=10.0, step=0.01)


def freeu_schema(node_id: str, b1: float, b2: float) -> io.Schema:
    """Declaration of a FreeU node."""
    return io.Schema(
        node_id=node_id,
        category="model_patches/unet",
        inputs=[
            io.Model.Input("model"),
            strength_input("b1", b1),
            strength_input("b2", b2),
            strength_input("s1", 0.9),
            strength_input("s2", 0.2),
        ],
        outputs=[io.Model.Output()],
    )


class FreeU(io.ComfyNode):
    """Scales half of the backbone's channels and the skips' low frequencies."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return freeu_schema("FreeU", 1.1, 1.2)

    @classmethod
    def execute(cls, model: Any, b1: float, b2: float, s1: float, s2: float) -> io.NodeOutput:
        return io.NodeOutput(freed(model, b1, b2, s1, s2, uniform_gain))

    patch = execute


class FreeU_V2(io.ComfyNode):
    """FreeU whose gain follows the structure of the features."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return freeu_schema("FreeU_V2", 1.3, 1.4)

    @classmethod
    def execute(cls, model: Any, b1: float, b2: float, s1: float, s2: float) -> io.NodeOutput:
        return io.NodeOutput(freed(model, b1, b2, s1, s2, structured_gain))

    patch = execute


comfy_entrypoint = entrypoint_of(FreeU, FreeU_V2)
