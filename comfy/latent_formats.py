"""Latent spaces: how an autoencoder's latent is scaled for the network, and how it is previewed.

Each class describes the latent space of one autoencoder. `process_in` maps what the autoencoder
made to what the network was trained on, `process_out` back. Latents are [B, C, ...] with
`latent_dimensions` axes after the channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from comfy import latent_constants as constants

Rows = list[list[float]]


class LatentFormat:
    """Base: a latent space that is only scaled.

    Attributes:
        scale_factor: What the latent is multiplied by for the network.
        latent_channels: Channels of the latent.
        latent_dimensions: Axes after the channels: 1 sound or sets, 2 pictures, 3 video.
        spacial_downscale_ratio: Pixels per latent cell and axis.
        latent_rgb_factors: One row [red, green, blue] per channel, or None where no preview is
        known. latent_rgb_factors_bias: Colour of an all-zero latent, -1..1.
        latent_rgb_factors_reshape: Rearranges a latent before the factors apply.
        taesd_decoder_name: Stem of the file of a tiny preview decoder.
    """

    scale_factor: float = 1.0
    latent_channels: int = 4
    latent_dimensions: int = 2
    spacial_downscale_ratio: int = 8
    latent_rgb_factors: ClassVar[Rows | None] = None
    latent_rgb_factors_bias: ClassVar[list[float] | None] = None
    latent_rgb_factors_reshape: Callable[[Tensor], Tensor] | None = None
    taesd_decoder_name: str | None = None

    def process_in(self, latent: Tensor) -> Tensor:
        """Autoencoder's latent -> network's latent."""
        return latent * self.scale_factor

    def process_out(self, latent: Tensor) -> Tensor:
        """Network's latent -> autoencoder's latent."""
        return latent / self.scale_factor


class ShiftedFormat(LatentFormat):
    """A latent space that is shifted, then scaled."""

    shift_factor: float = 0.0

    def process_in(self, latent: Tensor) -> Tensor:
        return (latent - self.shift_factor) * self.scale_factor

    def process_out(self, latent: Tensor) -> Tensor:
        return latent / self.scale_factor + self.shift_factor


class NormalisedFormat(LatentFormat):
    """A latent space whose channels are brought to zero mean and a common deviation.

    Attributes:
        channel_mean, channel_std: One number per channel.
    """

    channel_mean: list[float]
    channel_std: list[float]

    def __init__(self) -> None:
        per_channel = (1, -1, *(1,) * self.latent_dimensions)
        self.latents_mean = torch.tensor(self.channel_mean).view(per_channel)
        self.latents_std = torch.tensor(self.channel_std).view(per_channel)

    def process_in(self, latent: Tensor) -> Tensor:
        mean, std = self.latents_mean.to(latent), self.latents_std.to(latent)
        return (latent - mean) * self.scale_factor / std

    def process_out(self, latent: Tensor) -> Tensor:
        mean, std = self.latents_mean.to(latent), self.latents_std.to(latent)
        return latent * std / self.scale_factor + mean


class SD15(LatentFormat):
    """Stable Diffusion 1.x and 2.x."""

    latent_rgb_factors = constants.SD15_RGB
    taesd_decoder_name = "taesd_decoder"

    def __init__(self, scale_factor: float = 0.18215) -> None:
        self.scale_factor = scale_factor


class SDXL(LatentFormat):
    """Stable Diffusion XL."""

    scale_factor = 0.13025
    latent_rgb_factors = constants.SDXL_RGB
    latent_rgb_factors_bias: ClassVar = [0.1084, -0.0175, -0.0011]
    taesd_decoder_name = "taesdxl_decoder"


class SDXL_Playground_2_5(NormalisedFormat):
    """Playground 2.5, which trained on a normalised SDXL latent."""

    scale_factor = 0.5
    channel_mean = constants.SDXL_PLAYGROUND_2_5_MEAN
    channel_std = constants.SDXL_PLAYGROUND_2_5_STD
    latent_rgb_factors = constants.SDXL_PLAYGROUND_2_5_RGB
    taesd_decoder_name = "taesdxl_decoder"


class SD_X4(LatentFormat):
    """The Stable Diffusion x4 upscaler."""

    scale_factor = 0.08333
    spacial_downscale_ratio = 4
    latent_rgb_factors = constants.SD_X4_RGB


class SC_Prior(LatentFormat):
    """Stage C of Stable Cascade."""

    latent_channels = 16
    spacial_downscale_ratio = 42
    latent_rgb_factors = constants.SC_PRIOR_RGB


class SC_B(LatentFormat):
    """Stage B of Stable Cascade."""

    scale_factor = 1.0 / 0.43
    spacial_downscale_ratio = 4
    latent_rgb_factors = constants.SC_B_RGB


class SD3(ShiftedFormat):
    """Stable Diffusion 3.x."""

    latent_channels = 16
    scale_factor = 1.5305
    shift_factor = 0.0609
    latent_rgb_factors = constants.SD3_RGB
    latent_rgb_factors_bias: ClassVar = [0.2394, 0.2135, 0.1925]
    taesd_decoder_name = "taesd3_decoder"


class StableAudio1(LatentFormat):
    """Stable Audio Open."""

    latent_channels = 64
    latent_dimensions = 1


class Flux(ShiftedFormat):
    """FLUX.1 and models that share its autoencoder."""

    latent_channels = 16
    scale_factor = 0.3611
    shift_factor = 0.1159
    latent_rgb_factors = constants.FLUX_RGB
    latent_rgb_factors_bias: ClassVar = [-0.0329, -0.0718, -0.0851]
    taesd_decoder_name = "taef1_decoder"


def _unpatchify(latent: Tensor) -> Tensor:
    """[B, 4 C, H, W] with 2 x 2 patches in the channels -> [B, C, 2 H, 2 W]."""
    batch, channels, height, width = latent.shape
    patches = latent.reshape(batch, channels // 4, 2, 2, height, width)
    return patches.permute(0, 1, 4, 2, 5, 3).reshape(batch, channels // 4, height * 2, width * 2)


class Flux2(LatentFormat):
    """FLUX.2: 2 x 2 patches of 32 channels, already normalised by the autoencoder."""

    latent_channels = 128
    spacial_downscale_ratio = 16
    latent_rgb_factors = constants.FLUX2_RGB
    latent_rgb_factors_bias: ClassVar = [-0.0329, -0.0718, -0.0851]

    def __init__(self) -> None:
        self.latent_rgb_factors_reshape = _unpatchify


class Mochi(NormalisedFormat):
    """Mochi 1 video."""

    latent_channels = 12
    latent_dimensions = 3
    channel_mean = constants.MOCHI_MEAN
    channel_std = constants.MOCHI_STD
    latent_rgb_factors = constants.MOCHI_RGB
    latent_rgb_factors_bias: ClassVar = [-0.0940, -0.1418, -0.1453]


class LTXV(LatentFormat):
    """LTX video."""

    latent_channels = 128
    latent_dimensions = 3
    spacial_downscale_ratio = 32
    latent_rgb_factors: ClassVar[Rows | None] = constants.LTXV_RGB
    latent_rgb_factors_bias: ClassVar[list[float] | None] = [-0.0571, -0.1657, -0.2512]


class LTXAV(LTXV):
    """LTX video with sound."""

    latent_rgb_factors = None
    latent_rgb_factors_bias = None


class HunyuanVideo(LatentFormat):
    """Hunyuan video."""

    latent_channels = 16
    latent_dimensions = 3
    scale_factor = 0.476986
    latent_rgb_factors = constants.HUNYUANVIDEO_RGB
    latent_rgb_factors_bias: ClassVar = [0.0259, -0.0192, -0.0761]
    taesd_decoder_name = "taehv"


class Cosmos1CV8x8x8(LatentFormat):
    """Cosmos tokenizer, continuous video, 8 x 8 x 8."""

    latent_channels = 16
    latent_dimensions = 3
    latent_rgb_factors = constants.COSMOS1CV8X8X8_RGB
    latent_rgb_factors_bias: ClassVar = [-0.1223, -0.1889, -0.1976]


class Wan21(NormalisedFormat):
    """Wan 2.1 video, also used for pictures by other families."""

    latent_channels = 16
    latent_dimensions = 3
    channel_mean = constants.WAN21_MEAN
    channel_std = constants.WAN21_STD
    latent_rgb_factors = constants.WAN21_RGB
    latent_rgb_factors_bias: ClassVar = [-0.1835, -0.0868, -0.3360]
    taesd_decoder_name = "lighttaew2_1"


class Wan22(NormalisedFormat):
    """Wan 2.2 video with 16 x 16 cells."""

    latent_channels = 48
    latent_dimensions = 3
    spacial_downscale_ratio = 16
    channel_mean = constants.WAN22_MEAN
    channel_std = constants.WAN22_STD
    latent_rgb_factors = constants.WAN22_RGB
    latent_rgb_factors_bias: ClassVar = [0.0317, -0.0878, -0.1388]
    taesd_decoder_name = "lighttaew2_2"


class HunyuanImage21(LatentFormat):
    """Hunyuan image 2.1."""

    latent_channels = 64
    scale_factor = 0.75289
    spacial_downscale_ratio = 32
    latent_rgb_factors = constants.HUNYUANIMAGE21_RGB
    latent_rgb_factors_bias: ClassVar = [0.0007, -0.0256, -0.0206]


class HunyuanImage21Refiner(LatentFormat):
    """Refiner of Hunyuan image 2.1: pairs of frames share one latent frame."""

    latent_channels = 64
    latent_dimensions = 3
    scale_factor = 1.03682
    spacial_downscale_ratio = 16

    def process_in(self, latent: Tensor) -> Tensor:
        """[B, 32, 2 T - 1, H, W] -> [B, 64, T, H, W]; the first frame is paired with itself."""
        latent = torch.cat([latent[:, :, :1], latent], dim=2) * self.scale_factor
        batch, channels, frames, height, width = latent.shape
        pairs = latent.reshape(batch, channels, frames // 2, 2, height, width)
        return pairs.permute(0, 3, 1, 2, 4, 5).reshape(batch, -1, frames // 2, height, width)

    def process_out(self, latent: Tensor) -> Tensor:
        """[B, 64, T, H, W] -> [B, 32, 2 T - 1, H, W]."""
        batch, channels, frames, height, width = latent.shape
        pairs = latent.reshape(batch, 2, channels // 2, frames, height, width)
        single = pairs.permute(0, 2, 3, 1, 4, 5).reshape(batch, -1, frames * 2, height, width)
        return single[:, :, 1:] / self.scale_factor


class HunyuanVideo15(LatentFormat):
    """Hunyuan video 1.5."""

    latent_channels = 32
    latent_dimensions = 3
    scale_factor = 1.03682
    spacial_downscale_ratio = 16
    latent_rgb_factors = constants.HUNYUANVIDEO15_RGB
    latent_rgb_factors_bias: ClassVar = [0.0456, -0.0202, -0.0644]
    taesd_decoder_name = "lighttaehy1_5"


class Hunyuan3Dv2(LatentFormat):
    """Hunyuan 3D 2.0 shape tokens."""

    latent_channels = 64
    latent_dimensions = 1
    scale_factor = 0.9990943042622529


class Hunyuan3Dv2_1(LatentFormat):
    """Hunyuan 3D 2.1 shape tokens."""

    latent_channels = 64
    latent_dimensions = 1
    scale_factor = 1.0039506158752403


class Hunyuan3Dv2mini(LatentFormat):
    """Hunyuan 3D 2.0 mini shape tokens."""

    latent_channels = 64
    latent_dimensions = 1
    scale_factor = 1.0188137142395404


class ACEAudio(LatentFormat):
    """ACE-Step music."""

    latent_channels = 8
    latent_dimensions = 2


class ACEAudio15(LatentFormat):
    """ACE-Step 1.5 music: 25 cells a second."""

    latent_channels = 64
    latent_dimensions = 1


class ChromaRadiance(LatentFormat):
    """Chroma Radiance works on pixels."""

    latent_channels = 3
    spacial_downscale_ratio = 1
    latent_rgb_factors: ClassVar = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]

    def process_in(self, latent: Tensor) -> Tensor:
        return latent

    def process_out(self, latent: Tensor) -> Tensor:
        return latent
