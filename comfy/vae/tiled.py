"""Encoding and decoding in tiles, for pictures that do not fit in one piece.

Pictures are made three times, in square, wide and tall tiles, and averaged: seams of one run lie
inside tiles of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from comfy.progress import ProgressBar
from comfy.tiling import get_tiled_scale_steps, tiled_scale, tiled_scale_multidim

Apply = Callable[[Tensor], Tensor]


class TiledCoding:
    """The tiled half of the VAE class; pictures and latents with channels first, ready loaded."""

    upscale_ratio: Any
    downscale_ratio: Any
    upscale_index_formula: Any
    downscale_index_formula: Any
    output_channels: int
    latent_channels: int
    latent_dim: int
    extra_1d_channel: int | None
    output_device: Any
    process_output: Apply
    spacial_compression_decode: Callable[[], Any]
    _decoder: Callable[..., Apply]
    _encoder: Callable[[], Apply]

    def decode_tiled_(
        self, samples: Tensor, tile_x: int = 64, tile_y: int = 64, overlap: int = 16
    ) -> Tensor:
        """``[B, C, H, W]`` pictures of ``[B, c, h, w]`` latents."""
        run = self._decoder({})
        ratio, channels = self.upscale_ratio, self.output_channels
        out = three_tilings(
            samples, run, tile_x, tile_y, overlap, ratio, channels, self.output_device
        )
        return self.process_output(out)

    def encode_tiled_(
        self, pixel_samples: Tensor, tile_x: int = 512, tile_y: int = 512, overlap: int = 64
    ) -> Tensor:
        """``[B, c, h, w]`` latents of ``[B, C, H, W]`` pictures."""
        scale = 1 / self.downscale_ratio
        return three_tilings(
            pixel_samples,
            self._encoder(),
            tile_x,
            tile_y,
            overlap,
            scale,
            self.latent_channels,
            self.output_device,
        )

    def decode_tiled_1d(self, samples: Tensor, tile_x: int = 256, overlap: int = 32) -> Tensor:
        """Sound ``[B, C, L]`` of latents ``[B, c, l]`` (or ``[B, c, k, l]``)."""
        shape = samples.shape
        flat = samples.reshape(shape[0], -1, shape[-1]) if samples.ndim > 3 else samples
        run = self._decoder({})

        def decode(part: Tensor) -> Tensor:
            return run(part.reshape(-1, *shape[1:-1], part.shape[-1]))

        out = tiles_1d(
            flat,
            decode,
            tile_x,
            overlap,
            self.upscale_ratio,
            self.output_channels,
            self.output_device,
        )
        return self.process_output(out)

    def encode_tiled_1d(
        self, samples: Tensor, tile_x: int = 256 * 2048, overlap: int = 64 * 2048
    ) -> Tensor:
        """Latents ``[B, c, l]`` of sound ``[B, C, L]``."""
        scale = 1 / self.downscale_ratio
        channels = self.latent_channels * (self.extra_1d_channel or 1)
        run = self._encoder()

        def encode(part: Tensor) -> Tensor:
            out = run(part)
            return out.reshape(out.shape[0], channels, out.shape[-1])

        out = tiles_1d(samples, encode, tile_x, overlap, scale, channels, self.output_device)
        if self.extra_1d_channel is None:
            return out
        return out.reshape(samples.shape[0], self.latent_channels, self.extra_1d_channel, -1)

    def decode_tiled_3d(
        self,
        samples: Tensor,
        tile_t: int = 999,
        tile_x: int = 32,
        tile_y: int = 32,
        overlap: tuple[int, int, int] = (1, 8, 8),
    ) -> Tensor:
        """Video ``[B, C, T, H, W]`` of latents ``[B, c, t, h, w]``."""
        out = tiles_3d(
            samples,
            self._decoder({}),
            (tile_t, tile_x, tile_y),
            overlap,
            self.upscale_ratio,
            self.upscale_index_formula,
            self.output_channels,
            self.output_device,
        )
        return self.process_output(out)

    def encode_tiled_3d(
        self,
        samples: Tensor,
        tile_t: int = 9999,
        tile_x: int = 512,
        tile_y: int = 512,
        overlap: tuple[int, int, int] = (1, 64, 64),
    ) -> Tensor:
        """Latents ``[B, c, t, h, w]`` of video ``[B, C, T, H, W]``."""
        return tiles_3d(
            samples,
            self._encoder(),
            (tile_t, tile_x, tile_y),
            overlap,
            self.downscale_ratio,
            self.downscale_index_formula,
            self.latent_channels,
            self.output_device,
            downscale=True,
        )

    def _times(
        self, frames: int, tile_t: int | None, overlap_t: int | None
    ) -> tuple[int, int, int]:
        """Frames of a video to encode, of a tile, and that tiles share.

        Each is as many as some latent frames describe, the first of which is one frame: then what
        a tile makes falls on latent frames of the whole video.
        """
        cells, time = self.downscale_ratio[0], self.downscale_index_formula[0]
        tile = max(2, cells(frames if tile_t is None else tile_t))
        shared = min(max(1, cells(1 if overlap_t is None else overlap_t)), tile - 1)
        whole, tile, shared = ((count - 1) * time + 1 for count in (cells(frames), tile, shared))
        return whole, tile, shared

    def _decode_in_default_tiles(self, samples: Tensor) -> Tensor:
        dims = samples.ndim - 2
        if dims == 1 or self.extra_1d_channel is not None:
            return self.decode_tiled_1d(samples)
        if dims == 2:
            return self.decode_tiled_(samples)
        tile = 256 // self.spacial_compression_decode()
        lap = tile // 4
        return self.decode_tiled_3d(samples, tile_x=tile, tile_y=tile, overlap=(1, lap, lap))

    def _encode_in_default_tiles(self, pixels: Tensor) -> Tensor:
        if self.latent_dim == 1 or self.extra_1d_channel is not None:
            return self.encode_tiled_1d(pixels)
        if self.latent_dim == 2:
            return self.encode_tiled_(pixels)
        return self.encode_tiled_3d(pixels, tile_x=256, tile_y=256, overlap=(1, 64, 64))


def three_tilings(
    x: Tensor,
    function: Apply,
    tile_x: int,
    tile_y: int,
    overlap: int,
    scale: float,
    out_channels: int,
    output_device: Any,
) -> Tensor:
    """Mean of the results in tiles of three shapes; ``x [B, C, H, W]``."""
    shapes = [(tile_x // 2, tile_y * 2), (tile_x * 2, tile_y // 2), (tile_x, tile_y)]
    steps = sum(
        get_tiled_scale_steps(x.shape[3], x.shape[2], width, height, overlap)
        for width, height in shapes
    )
    bar = ProgressBar(x.shape[0] * steps)
    total: Tensor | None = None
    for width, height in shapes:
        result = tiled_scale(
            x,
            function,
            width,
            height,
            overlap,
            upscale_amount=scale,
            out_channels=out_channels,
            output_device=output_device,
            pbar=bar,
        )
        total = result if total is None else total + result  # not in place: see inference mode
    assert total is not None
    return total / 3.0


def tiles_1d(
    x: Tensor,
    function: Apply,
    tile: int,
    overlap: int,
    scale: float,
    out_channels: int,
    output_device: Any,
    downscale: bool = False,
) -> Tensor:
    """Sound ``[B, C, L]``, piece by piece."""
    return tiled_scale_multidim(
        x,
        function,
        tile=(tile,),
        overlap=overlap,
        upscale_amount=scale,
        out_channels=out_channels,
        output_device=output_device,
        downscale=downscale,
    )


def tiles_3d(
    x: Tensor,
    function: Apply,
    tile: Sequence[int],
    overlap: Sequence[int],
    ratio: Any,
    index_formulas: Any,
    out_channels: int,
    output_device: Any,
    downscale: bool = False,
) -> Tensor:
    """Video ``[B, C, T, H, W]``, in tiles of (frames, height, width)."""
    return tiled_scale_multidim(
        x,
        function,
        tile=tile,
        overlap=overlap,
        upscale_amount=ratio,
        index_formulas=index_formulas,
        out_channels=out_channels,
        output_device=output_device,
        downscale=downscale,
    )
