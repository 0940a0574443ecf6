"""Steps of the UNet's forward pass that custom nodes replace: networks reach them as
`steps.name`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from comfy.ldm.unet.blocks import TimestepBlock, Upsample
from comfy.ldm.unet.transformer import SpatialTransformer
from comfy.ldm.unet.video import SpatialVideoTransformer, VideoResBlock


class TimestepEmbedSequential(nn.Sequential, TimestepBlock):
    """A block of the UNet: its layers in turn, each given what it takes."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return forward_timestep_embed(self, *args, **kwargs)


def forward_timestep_embed(
    layers: Iterable[nn.Module],
    x: Tensor,
    emb: Tensor,
    context: Tensor | None = None,
    transformer_options: dict[str, Any] | None = None,
    output_shape: Sequence[int] | None = None,
    time_context: Tensor | None = None,
    num_video_frames: int | None = None,
    image_only_indicator: Tensor | None = None,
) -> Tensor:
    """Run the layers of one block, each with the arguments its kind takes.

    Args:
        x: Features ``[B, C, H, W]``.
        emb: Timestep embedding ``[B, E]``.
        context: Cross-attention context ``[B, L, D]``.
        output_shape: Shape an upsampling layer has to reach (odd sizes cannot be doubled back).
        time_context: Context of temporal attention (video networks).
        num_video_frames: Frames in the batch (video networks).
        image_only_indicator: ``[B, T]``, 1 where a frame stands alone (video networks).
    """
    options = {} if transformer_options is None else transformer_options
    patches = options.get("patches") or {}
    extra = patches.get("forward_timestep_embed_patch", ())
    for layer in layers:
        if isinstance(layer, VideoResBlock):
            x = layer(x, emb, num_video_frames, image_only_indicator)
        elif isinstance(layer, TimestepBlock):
            x = layer(x, emb)
        elif isinstance(layer, SpatialTransformer):
            if isinstance(layer, SpatialVideoTransformer):
                x = layer(x, context, time_context, num_video_frames, image_only_indicator, options)
            else:
                x = layer(x, context, options)
            if "transformer_index" in options:
                options["transformer_index"] += 1
        elif isinstance(layer, Upsample):
            x = layer(x, output_shape=output_shape)
        else:
            handler = next((run for kind, run in extra if isinstance(layer, kind)), None)
            if handler is None:
                x = layer(x)
            else:  # a kind of layer that a custom patch put in and knows how to call
                x = handler(
                    layer, x, emb, context, options, output_shape, time_context, num_video_frames,
                    image_only_indicator,
                )  # fmt: skip
    return x


def apply_control(h: Tensor, control: dict[str, list[Tensor | None]] | None, name: str) -> Tensor:
    """Add the next control residual of one part of the network ("input", "middle", "output") to h.

    Residuals are taken from the end of their list. Raises ValueError when one does not fit h.
    """
    if not control or not control.get(name):
        return h
    residual = control[name].pop()
    if residual is None:
        return h
    if any(ours != theirs != 1 for ours, theirs in zip(h.shape, residual.shape)):
        raise ValueError(
            f"a control residual of shape {tuple(residual.shape)} does not fit the features "
            f"{tuple(h.shape)} ({name}): the ControlNet or adapter was made for another model"
        )
    return (h + residual).to(h.dtype)  # the control network may compute in a wider type
