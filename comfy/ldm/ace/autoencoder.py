"""The autoencoder of ACE-Step: music as small pictures of its log-mel spectrogram, and back.

A sound of two channels at 44.1 kHz becomes a spectrum for every 512 samples, in 128 bands from
40 Hz to 16 kHz, of which the deep compression autoencoder makes a latent with a cell for 8 by 8.
Source: Gong et al. 2025, https://arxiv.org/abs/2506.00045, section 3.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.ace.dcae import DCAE, DCAESizes
from comfy.ldm.ace.vocoder import Vocoder, VocoderSizes
from comfy.nn.mel import mel_filters

RATE, HOP, WINDOW = 44100, 512, 2048
LOWEST, HIGHEST = 40.0, 16000.0  # hertz
FAINTEST, SQUARE_EPS = 1e-5, 1e-6  # least magnitude of a band; added below the root
SILENCE, LOUDEST = -11.0, 3.0  # logarithms that the autoencoder takes for -1 and 1
SHIFT, SCALE = -1.9091, 0.1786  # of latents, whose mean and deviation they bring to 0 and 1


def log_mel(waves: Tensor, bands: int) -> Tensor:
    """Natural logarithms ``[..., bands, L]`` of the magnitudes of sounds ``[..., 512 L]``.

    Every spectrum's window lies around its 512 samples; sounds are mirrored at their ends.
    """
    apart = WINDOW - HOP
    flat = waves.flatten(0, -2)
    padded = F.pad(flat[:, None], (apart // 2, apart - apart // 2), mode="reflect")[:, 0]
    window = torch.hann_window(WINDOW, device=waves.device, dtype=waves.dtype)
    spectra = torch.stft(padded, WINDOW, HOP, window=window, center=False, return_complex=True)
    heard = (spectra.abs().square() + SQUARE_EPS).sqrt()
    filters = mel_filters(bands, RATE, WINDOW, LOWEST, HIGHEST).to(heard)
    logarithms = (filters.T @ heard).clamp(min=FAINTEST).log()
    return logarithms.unflatten(0, waves.shape[:-1])


class MusicDCAE(nn.Module):
    """The deep compression autoencoder and the vocoder."""

    def __init__(
        self,
        dcae: DCAESizes,
        vocoder: VocoderSizes,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        self.bands = vocoder.bands
        self.dcae = DCAE(dcae, operations, **place)
        self.vocoder = Vocoder(vocoder, operations, **place)

    def encode(self, audio: Tensor) -> Tensor:
        """Latents ``[B, c, h, w]`` of sounds ``[B, C, samples]`` of whole cells."""
        # Half precision has neither the transform nor the range of the logarithms.
        spectra = log_mel(audio.float(), self.bands)
        unit = (spectra - SILENCE) / (LOUDEST - SILENCE) * 2 - 1
        return (self.dcae.encoder(unit.to(audio.dtype)) - SHIFT) * SCALE

    def decode(self, latents: Tensor) -> Tensor:
        """Sounds ``[B, C, samples]`` in -1..1 of latents ``[B, c, h, w]``."""
        unit = self.dcae.decoder(latents / SCALE + SHIFT) / 2 + 0.5
        spectra = unit * (LOUDEST - SILENCE) + SILENCE
        sounds = self.vocoder(spectra.flatten(0, 1))
        return sounds[:, 0].unflatten(0, spectra.shape[:2])
