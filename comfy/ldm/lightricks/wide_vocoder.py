"""The vocoder of LTX-2.3: one that makes a sound, and one that adds the pitches above its band.

The second reads the spectrogram of the first's sound and gives what is missing in that sound at a
higher rate. Keys follow the published files: ``vocoder.``, ``bwe_generator.``, ``mel_stft.``.
Source: HaCohen et al. 2026, https://arxiv.org/abs/2601.03233.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.lightricks.smooth_activation import at_rate
from comfy.ldm.lightricks.vocoder import Vocoder, VocoderConfig

FAINTEST = 1e-5  # least magnitude of a band


@dataclass(frozen=True)
class WideVocoderConfig:
    """Sizes of both vocoders, and how the spectrogram between them is made.

    Attributes:
        first, second: The vocoders.
        hop, window, bands: Samples from one spectrum to the next, of one, and its mel bands.
    """

    first: VocoderConfig
    second: VocoderConfig
    hop: int = 80
    window: int = 512
    bands: int = 64

    def __post_init__(self) -> None:
        if self.second.samples % self.hop:
            raise ValueError(
                f"a vocoder that makes {self.second.samples} samples of {self.hop} cannot make a "
                "sound a whole number of times longer"
            )
        if self.second.spectrum != self.first.sounds * self.bands:
            raise ValueError(
                f"the second vocoder takes {self.second.spectrum} bands, and is given {self.bands} "
                f"of each of {self.first.sounds} channels"
            )

    @property
    def spectrum(self) -> int:
        """Bands of all channels of the spectrogram."""
        return self.first.spectrum

    @property
    def times(self) -> int:
        """How many times as high the rate becomes."""
        return self.second.samples // self.hop

    @property
    def samples(self) -> int:
        """Samples of the sound for each spectrum."""
        return self.first.samples * self.times

    @property
    def values(self) -> int:
        """Values of the widest layer for each spectrum."""
        return max(self.first.values, self.second.values * self.first.samples // self.hop)


class PastSpectra(nn.Module):
    """Spectrograms of sounds whose spectra see the past only; waves and bands are weights."""

    def __init__(self, config: WideVocoderConfig, place: dict[str, Any]) -> None:
        super().__init__()
        self.hop, self.window = config.hop, config.window
        pitches = config.window // 2 + 1
        self.stft_fn = nn.Module()
        waves = torch.empty(2 * pitches, 1, config.window, **place)
        self.stft_fn.register_buffer("forward_basis", waves)
        self.register_buffer("mel_basis", torch.empty(config.bands, pitches, **place))

    def forward(self, sound: Tensor) -> Tensor:
        """Natural logarithms ``[B, C, T, bands]`` of the magnitudes of sounds ``[B, C, L]``."""
        waves, bands = self.stft_fn.get_buffer("forward_basis"), self.get_buffer("mel_basis")
        past = F.pad(sound.flatten(0, 1)[:, None], (max(0, self.window - self.hop), 0))
        cosines, sines = F.conv1d(past, waves.to(past), stride=self.hop).chunk(2, dim=1)
        heard = (cosines.square() + sines.square()).sqrt().transpose(1, 2) @ bands.to(past).T
        return heard.clamp(min=FAINTEST).log().unflatten(0, sound.shape[:2])


class WideVocoder(nn.Module):
    """Spectrograms ``[B, C, T, bands]``, natural logarithms, to sounds ``[B, C, T * samples]`` in
    -1..1.
    """

    def __init__(
        self,
        config: WideVocoderConfig,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        self.config = config
        self.vocoder = Vocoder(config.first, dtype, device, operations)
        self.bwe_generator = Vocoder(config.second, dtype, device, operations)
        self.mel_stft = PastSpectra(config, {"dtype": dtype, "device": device})

    def forward(self, spectrogram: Tensor) -> Tensor:
        sound = self.vocoder(spectrogram)
        samples = sound.shape[-1] * self.config.times
        sound = F.pad(sound, (0, -sound.shape[-1] % self.config.hop))
        added = self.bwe_generator(self.mel_stft(sound))
        return (at_rate(sound, self.config.times) + added).clamp(-1, 1)[..., :samples]
