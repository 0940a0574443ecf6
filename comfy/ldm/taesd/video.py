"""TAEHV: a small convolutional stand-in for the autoencoder of a video model.

All convolutions work on single frames. Time enters in two ways: memory blocks are also given the
frame before (zeros before the first), and between the stages frames are pooled or grown. Nothing
looks ahead, so a video can be worked in pieces, each handing its last frames to the next, with the
result of the whole.

Source: https://github.com/madebyollin/taehv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import interrupt, ops
from comfy.ldm.taesd.model import Clamp, conv

COLOURS = 3
WIDTHS = (256, 128, 64, 64)
"""Channels of the decoder: of its three stages and before the picture."""
ENCODER_WIDTH = 64
PATCHES = {48: 2, 32: 2, 128: 4}
"""Pixels along a side that lie in the channels, by channels of the latent; 1 for others."""
PIECE_PIXELS = 2**21
"""Pixels of all frames that are computed at a time; one latent frame at least."""

Memory = dict[int, Tensor]
"""Last frame [B, 1, C, H, W] that each memory block was given, by its place in the network."""


class MemBlock(nn.Module):
    """Three convolutions over a frame and the one before, with a residual connection."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        operations: Any = ops.disable_weight_init,
        leak: float = 0.0,
        **place: Any,
    ) -> None:
        super().__init__()

        def layer(width: int) -> nn.Module:
            return conv(width, n_out, operations, **place)

        self.conv = nn.Sequential(
            layer(2 * n_in), activation(leak), layer(n_out), activation(leak), layer(n_out)
        )
        self.skip: nn.Module = nn.Identity()
        if n_in != n_out:
            self.skip = operations.Conv2d(n_in, n_out, 1, bias=False, **place)
        self.act = activation(leak)

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        return self.act(self.conv(torch.cat([x, past], dim=1)) + self.skip(x))


class TPool(nn.Module):
    """One frame of `stride` frames."""

    def __init__(
        self, n_f: int, stride: int, operations: Any = ops.disable_weight_init, **place: Any
    ) -> None:
        super().__init__()
        self.stride = stride
        self.conv = operations.Conv2d(n_f * stride, n_f, 1, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        _, channels, height, width = x.shape
        return self.conv(x.reshape(-1, self.stride * channels, height, width))


class TGrow(nn.Module):
    """`stride` frames of one frame."""

    def __init__(
        self, n_f: int, stride: int, operations: Any = ops.disable_weight_init, **place: Any
    ) -> None:
        super().__init__()
        self.stride = stride
        self.conv = operations.Conv2d(n_f, n_f * stride, 1, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).reshape(-1, *x.shape[1:])


def activation(leak: float) -> nn.Module:
    """ReLU, of which negative values keep a share."""
    return nn.LeakyReLU(leak) if leak else nn.ReLU()


def run_with_memory(network: nn.Sequential, frames: Tensor, memory: Memory) -> Tensor:
    """Frames [B, T, C, H, W] through a network.

    Args:
        memory: What the piece before left; empty before the first. Changed to what this one leaves.
    """
    batch = frames.shape[0]
    x = frames.flatten(0, 1)
    for place, layer in enumerate(network):
        if not isinstance(layer, MemBlock):
            x = layer(x)
            continue
        seen = x.unflatten(0, (batch, -1))
        before = memory.get(place)
        if before is None:
            before = torch.zeros_like(seen[:, :1])
        memory[place] = seen[:, -1:].clone()
        x = layer(x, torch.cat([before, seen[:, :-1]], dim=1).flatten(0, 1))
    return x.unflatten(0, (batch, -1))


def apply_model_with_memblocks(
    model: nn.Sequential,
    x: Tensor,
    parallel: bool = True,  # noqa: ARG001 - public signature; both ways give the same
    show_progress_bar: bool = False,  # noqa: ARG001 - public signature
) -> Tensor:
    """A whole video [B, T, C, H, W] through an encoder or a decoder."""
    return run_with_memory(model, x, {})


class TAEHV(nn.Module):
    """Encoder and decoder of videos.

    Attributes:
        process_in, process_out: From latents of the model's autoencoder to those that the networks
            work on, and back.
        patch_size: Pixels along a side that lie in the channels.
        t_downscale, t_upscale: Frames per latent frame of the encoder and of the decoder.
        frames_to_trim: Frames that the decoder makes before the first of the video: the first
            latent frame stands for one frame, each other for `t_upscale`.
    """

    def __init__(
        self,
        latent_channels: int,
        parallel: bool = False,
        encoder_time_downscale: Sequence[bool] = (True, True, False),
        decoder_time_upscale: Sequence[bool] = (False, True, True),
        decoder_space_upscale: Sequence[bool] = (True, True, True),
        latent_format: Callable[[], Any] | None = None,
        show_progress_bar: bool = False,
        *,
        patch_size: int | None = None,
        widths: Sequence[int] = WIDTHS,
        encoder_width: int = ENCODER_WIDTH,
        leak: float = 0.0,
        is_signed: bool = False,
        operations: Any = ops.disable_weight_init,
        dtype: Any = None,
        device: Any = None,
    ) -> None:
        """Build both networks.

        Args:
            latent_channels: Channels of a latent.
            parallel, show_progress_bar: Kept as attributes for packages; nothing depends on them.
            encoder_time_downscale, decoder_time_upscale: Whether each of three stages halves or
                doubles the number of frames; of the decoder also the last two alone.
            decoder_space_upscale: Whether each stage doubles height and width.
            latent_format: Maker of the latent space the networks were trained in; None for that of
                the model's own autoencoder.
            patch_size: See the class; None: by `PATCHES`.
            widths, encoder_width: Channels inside.
            leak: Share of negative values that activations keep.
            is_signed: Whether pixels are in -1..1 instead of 0..1.
        """
        super().__init__()
        self.latent_channels, self.image_channels = latent_channels, COLOURS
        self.parallel, self.show_progress_bar = parallel, show_progress_bar
        self.patch_size = PATCHES.get(latent_channels, 1) if patch_size is None else patch_size
        self.is_signed = is_signed
        self.process_in: Callable[[Tensor], Tensor] = _unchanged
        self.process_out: Callable[[Tensor], Tensor] = _unchanged
        if latent_format is not None:
            space = latent_format()
            self.process_in, self.process_out = space.process_in, space.process_out
        pools = [2 if halves else 1 for halves in encoder_time_downscale]
        grows = [2 if doubles else 1 for doubles in decoder_time_upscale]
        grows = [1] * (3 - len(grows)) + grows
        scales = [2 if doubles else 1 for doubles in decoder_space_upscale]
        self.t_downscale = pools[0] * pools[1] * pools[2]
        self.t_upscale = grows[0] * grows[1] * grows[2]
        self.frames_to_trim = self.t_upscale - 1
        channels = COLOURS * self.patch_size**2
        place = {"operations": operations, "dtype": dtype, "device": device}
        self.encoder = _encoder(channels, latent_channels, encoder_width, pools, leak, **place)
        self.decoder = _decoder(latent_channels, channels, widths, grows, scales, leak, **place)

    def decode(self, x: Tensor, **_: Any) -> Tensor:
        """Video [B, 3, F (T - 1) + 1, H, W] of a latent [B, C, T, h, w], F being `t_upscale`."""
        frames = self.process_in(x).movedim(2, 1)
        area = self._pixels(frames) * (8 * self.patch_size) ** 2 * self.t_upscale
        made, memory = [], Memory()
        for piece in _pieces(frames, max(1, PIECE_PIXELS // area)):
            pixels = run_with_memory(self.decoder, piece, memory)
            if self.patch_size > 1:
                pixels = functional.pixel_shuffle(pixels, self.patch_size)
            made.append(pixels if self.is_signed else pixels.clamp_(0.0, 1.0))
        made[0] = made[0][:, self.frames_to_trim :]
        return torch.cat(made, dim=1).movedim(1, 2)

    def encode(self, x: Tensor, **_: Any) -> Tensor:
        """Latent [B, C, ceil(T / F), h, w] of a video [B, 3, T, H, W], F being `t_downscale`.

        The last frame is repeated until latent frames are full.
        """
        frames = x.movedim(2, 1)
        missing = -frames.shape[1] % self.t_downscale
        if missing:
            frames = torch.cat([frames, frames[:, -1:].expand(-1, missing, -1, -1, -1)], dim=1)
        area = self._pixels(frames) * self.t_downscale
        made, memory = [], Memory()
        for piece in _pieces(frames, max(1, PIECE_PIXELS // area) * self.t_downscale):
            if self.patch_size > 1:
                piece = functional.pixel_unshuffle(piece, self.patch_size)
            made.append(run_with_memory(self.encoder, piece, memory))
        return self.process_out(torch.cat(made, dim=1).movedim(1, 2))

    @staticmethod
    def _pixels(frames: Tensor) -> int:
        """Pixels, or cells, of one frame of all videos [B, T, C, H, W]."""
        return frames.shape[0] * frames.shape[-2] * frames.shape[-1]


def _pieces(frames: Tensor, size: int) -> Iterator[Tensor]:
    """Parts of a video [B, T, C, H, W], `size` frames each; a cancelled run ends between them."""
    for piece in frames.split(size, dim=1):
        interrupt.throw_exception_if_processing_interrupted()
        yield piece


def _encoder(
    channels: int, latent_channels: int, width: int, pools: Sequence[int], leak: float, **place: Any
) -> nn.Sequential:
    """Pixels to latent, 8 times smaller."""
    layers = [conv(channels, width, **place), activation(leak)]
    for stride in pools:
        layers += [TPool(width, stride, **place), conv(width, width, stride=2, bias=False, **place)]
        layers += [MemBlock(width, width, leak=leak, **place) for _ in range(3)]
    return nn.Sequential(*layers, conv(width, latent_channels, **place))


def _decoder(
    latent_channels: int,
    channels: int,
    widths: Sequence[int],
    grows: Sequence[int],
    scales: Sequence[int],
    leak: float,
    **place: Any,
) -> nn.Sequential:
    """Latent to pixels, up to 8 times larger."""
    layers: list[nn.Module] = [
        Clamp(),
        conv(latent_channels, widths[0], **place),
        activation(leak),
    ]
    for width, following, stride, scale in zip(widths, widths[1:], grows, scales):
        layers += [MemBlock(width, width, leak=leak, **place) for _ in range(3)]
        layers += [nn.Upsample(scale_factor=scale), TGrow(width, stride, **place)]
        layers.append(conv(width, following, bias=False, **place))
    return nn.Sequential(*layers, activation(leak), conv(widths[-1], channels, **place))


def _unchanged(latent: Tensor) -> Tensor:
    return latent
