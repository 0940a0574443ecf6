"""TAESD: a small convolutional stand-in for a diffusion model's autoencoder.

Source: https://github.com/madebyollin/taesd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops

WIDTH = 64


def conv(
    n_in: int, n_out: int, operations: Any = ops.disable_weight_init, **options: Any
) -> nn.Module:
    """A 3x3 convolution that keeps the size (or halves it with ``stride=2``)."""
    return operations.Conv2d(n_in, n_out, 3, padding=1, **options)


class Clamp(nn.Module):
    """Keep latents within -3..3, softly."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 3) * 3


class Block(nn.Module):
    """Three convolutions with a residual connection."""

    def __init__(
        self, n_in: int, n_out: int, operations: Any = ops.disable_weight_init, **place: Any
    ) -> None:
        super().__init__()

        def layer(width: int) -> nn.Module:
            return conv(width, n_out, operations, **place)

        self.conv = nn.Sequential(layer(n_in), nn.ReLU(), layer(n_out), nn.ReLU(), layer(n_out))
        self.skip: nn.Module = nn.Identity()
        if n_in != n_out:
            self.skip = operations.Conv2d(n_in, n_out, 1, bias=False, **place)
        self.fuse = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fuse(self.conv(x) + self.skip(x))


def Encoder(
    latent_channels: int = 4, operations: Any = ops.disable_weight_init, **place: Any
) -> nn.Sequential:
    """Picture in 0..1 to latent, 8 times smaller."""
    layers: list[nn.Module] = [
        conv(3, WIDTH, operations, **place),
        Block(WIDTH, WIDTH, operations, **place),
    ]
    for _ in range(3):
        layers.append(conv(WIDTH, WIDTH, operations, stride=2, bias=False, **place))
        layers += [Block(WIDTH, WIDTH, operations, **place) for _ in range(3)]
    return nn.Sequential(*layers, conv(WIDTH, latent_channels, operations, **place))


def Decoder(
    latent_channels: int = 4, operations: Any = ops.disable_weight_init, **place: Any
) -> nn.Sequential:
    """Latent to picture in about 0..1, 8 times larger."""
    layers: list[nn.Module] = [
        Clamp(),
        conv(latent_channels, WIDTH, operations, **place),
        nn.ReLU(),
    ]
    for _ in range(3):
        layers += [Block(WIDTH, WIDTH, operations, **place) for _ in range(3)]
        layers.append(nn.Upsample(scale_factor=2))
        layers.append(conv(WIDTH, WIDTH, operations, bias=False, **place))
    return nn.Sequential(
        *layers, Block(WIDTH, WIDTH, operations, **place), conv(WIDTH, 3, operations, **place)
    )


class TAESD(nn.Module):
    """Encoder and decoder, told how the latents of the model they stand in for are scaled.

    Attributes:
        vae_scale, vae_shift: ``(latent - vae_shift) * vae_scale`` is what the networks work on.
    """

    def __init__(
        self,
        encoder_path: str | None = None,
        decoder_path: str | None = None,
        latent_channels: int = 4,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        place = {"operations": operations, "dtype": dtype, "device": device}
        self.taesd_encoder = Encoder(latent_channels, **place)
        self.taesd_decoder = Decoder(latent_channels, **place)
        self.vae_scale = nn.Parameter(torch.tensor(1.0, device=device), requires_grad=False)
        self.vae_shift = nn.Parameter(torch.tensor(0.0, device=device), requires_grad=False)
        for network, path in (
            (self.taesd_encoder, encoder_path),
            (self.taesd_decoder, decoder_path),
        ):
            if path is not None:
                from safetensors.torch import load_file

                network.load_state_dict(load_file(path))

    def decode(self, x: Tensor, **_: Any) -> Tensor:
        """Picture about -1..1 of a latent."""
        return self.taesd_decoder((x - self.vae_shift.to(x)) * self.vae_scale.to(x)) * 2 - 1

    def encode(self, x: Tensor, **_: Any) -> Tensor:
        """Latent of a picture in -1..1."""
        return self.taesd_encoder(x * 0.5 + 0.5) / self.vae_scale.to(x) + self.vae_shift.to(x)
