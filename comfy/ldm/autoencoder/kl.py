"""AutoencoderKL: pictures to a small Gaussian latent and back.

Source: Rombach et al. 2022, https://arxiv.org/abs/2112.10752.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.autoencoder.layers import AutoencoderConfig, Decoder, Encoder, LayerMaker


class DiagonalGaussianDistribution:
    """Independent Gaussians whose mean and log-variance are the two halves of ``moments``."""

    def __init__(self, parameters: Tensor, deterministic: bool = False) -> None:
        self.parameters = parameters
        self.mean, log_variance = parameters.chunk(2, dim=1)
        self.logvar = log_variance.clamp(-30.0, 20.0)
        self.deterministic = deterministic

    @property
    def std(self) -> Tensor:
        """Standard deviation; 0 for a deterministic one."""
        if self.deterministic:
            return torch.zeros_like(self.mean)
        return torch.exp(0.5 * self.logvar)

    @property
    def var(self) -> Tensor:
        """Variance."""
        return self.std**2

    def sample(self) -> Tensor:
        """A draw, from the global generator of torch."""
        noise = torch.randn(self.mean.shape, dtype=self.mean.dtype, device=self.mean.device)
        return self.mean + self.std * noise

    def mode(self) -> Tensor:
        """The mean."""
        return self.mean


class AutoencoderKL(nn.Module):
    """Encoder and decoder, with 1x1 convolutions around the latent where ``embed_dim`` is given.

    Attributes:
        config: Sizes.
        sample: Whether encoding draws from the Gaussian. Otherwise it gives the mean, as the
            reference server does: the same picture gives the same latent.
    """

    def __init__(
        self,
        ddconfig: Mapping[str, Any] | AutoencoderConfig,
        embed_dim: int | None = None,
        sample: bool = False,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        if not isinstance(ddconfig, AutoencoderConfig):
            ddconfig = AutoencoderConfig.from_options(dict(ddconfig))
        self.config, self.embed_dim, self.sample = ddconfig, embed_dim, sample
        make = LayerMaker(operations, ddconfig.norm_num_groups, dtype, device)
        self.encoder = Encoder(ddconfig, make)
        self.decoder = Decoder(ddconfig, make)
        if embed_dim is not None:
            moments = 2 if ddconfig.double_z else 1
            self.quant_conv = make.conv(moments * ddconfig.z_channels, moments * embed_dim, 1)
            self.post_quant_conv = make.conv(embed_dim, ddconfig.z_channels, 1)

    def moments(self, x: Tensor) -> Tensor:
        """Mean and log-variance, side by side along the channels."""
        h = self.encoder(x)
        return h if self.embed_dim is None else self.quant_conv(h)

    def encode(self, x: Tensor, return_reg_log: bool = False, **_: Any) -> Any:
        """Latent ``[B, z, h, w]`` of a picture in -1..1 ``[B, 3, H, W]``.

        With ``return_reg_log`` a pair with an empty dict, which training code expects.
        """
        posterior = DiagonalGaussianDistribution(self.moments(x))
        z = posterior.sample() if self.sample else posterior.mode()
        return (z, {}) if return_reg_log else z

    def decode(self, z: Tensor, **options: Any) -> Tensor:
        """Picture about -1..1 of a latent."""
        if self.embed_dim is not None:
            z = self.post_quant_conv(z)
        return self.decoder(z, **options)

    def forward(self, x: Tensor) -> Tensor:
        """There and back."""
        return self.decode(self.encode(x))


class PatchedAutoencoderKL(AutoencoderKL):
    """With 2 x 2 cells of a latent in one, each channel normalised by what was seen in training
    (FLUX.2)."""

    patch = 2
    bn_eps = 1e-4

    def __init__(
        self,
        ddconfig: Mapping[str, Any] | AutoencoderConfig,
        embed_dim: int,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__(ddconfig, embed_dim, False, dtype, device, operations)
        self.bn = nn.BatchNorm2d(
            embed_dim * self.patch**2, eps=self.bn_eps, affine=False, dtype=dtype, device=device
        )

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = self.bn.running_mean, self.bn.running_var
        assert mean is not None  # it tracks them
        assert variance is not None
        spread = (variance.float() + self.bn_eps).sqrt()
        return mean.to(like)[:, None, None], spread.to(like)[:, None, None]

    def encode(self, x: Tensor, return_reg_log: bool = False, **_: Any) -> Any:
        """Latent ``[B, 4 * z, h, w]`` of a picture; see `AutoencoderKL.encode`."""
        cells = functional.pixel_unshuffle(super().encode(x), self.patch)
        mean, spread = self._statistics(cells)
        z = (cells - mean) / spread
        return (z, {}) if return_reg_log else z

    def decode(self, z: Tensor, **options: Any) -> Tensor:
        """Picture about -1..1 of a latent."""
        mean, spread = self._statistics(z)
        return super().decode(functional.pixel_shuffle(z * spread + mean, self.patch), **options)
