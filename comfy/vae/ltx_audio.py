"""The sound autoencoder of LTX-2 and LTX-2.3 as nodes use it: sounds to latents, latents to sounds.

A sound becomes the logarithm of its mel spectrogram, which the autoencoder codes; what it decodes a
vocoder turns into a sound. Both stand in one file beside the video network, or alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comfy.audio_encoders.resampling import resample
from comfy.devices import placement, residency
from comfy.ldm.lightricks.audio_vae import AudioAutoencoder, AudioVAEConfig
from comfy.ldm.lightricks.vocoder import Vocoder
from comfy.ldm.lightricks.wide_vocoder import WideVocoder, WideVocoderConfig
from comfy.nn.mel import mel_filters
from comfy.patching.patcher import ModelPatcher
from comfy.vae.ltx_vocoders import VOCODER, AnyVocoderConfig, vocoder_config
from comfy.weights import weight_norm
from comfy.weights.contents import contents_in_words
from comfy.weights.errors import WeightFileError
from comfy.weights.fill import IncompleteWeightsError, UnknownWeightsError, fill
from comfy.weights.ltx_header import told_of
from comfy.weights.marks import cannot_run
from comfy.weights.state_dict import count_parts, load_torch_file

AUTOENCODER = "audio_vae."
MARK = f"{AUTOENCODER}decoder.conv_in.conv.weight"
CAUSAL_AXIS = "height"  # along time, as the published files' header says
FAINTEST = 1e-5  # least magnitude of a band
COPIES = 6  # of the widest layer's values at full length that live at once
WAVE_AXES = 3
CHOICE = "choose a checkpoint of LTX-2, or its sound autoencoder with the vocoder"


@dataclass(frozen=True)
class Spectra:
    """How spectrograms are made.

    Attributes:
        rate: Samples a second.
        hop, window: Samples from one spectrum to the next, and of one.
    """

    rate: int = 16000
    hop: int = 160
    window: int = 1024

    def of(self, waveform: Tensor, bands: int) -> Tensor:
        """Natural logarithms ``[B, C, T, bands]`` of the magnitudes of sounds ``[B, C, samples]``.

        Raises:
            ValueError: They are shorter than half a window.
        """
        if waveform.shape[-1] <= self.window // 2:
            raise ValueError(
                f"audio: expected more than {self.window // 2} samples at {self.rate} hertz, found "
                f"{waveform.shape[-1]}; take a longer sound"
            )
        window = torch.hann_window(self.window, device=waveform.device, dtype=waveform.dtype)
        waves = torch.stft(
            waveform.flatten(0, 1), self.window, self.hop, window=window, return_complex=True
        )
        filters = mel_filters(bands, self.rate, self.window).to(waves.real)
        heard = waves.abs().transpose(1, 2) @ filters
        return heard.clamp(min=FAINTEST).log().unflatten(0, waveform.shape[:2])


class SoundNetworks(nn.Module):
    """Both networks, under their names in files."""

    def __init__(self, config: AudioVAEConfig, vocoder: AnyVocoderConfig, **place: Any) -> None:
        super().__init__()
        self.audio_vae = AudioAutoencoder(config, **place)
        self.vocoder: nn.Module
        if isinstance(vocoder, WideVocoderConfig):
            self.vocoder = WideVocoder(vocoder, **place)
        else:
            self.vocoder = Vocoder(vocoder, **place)


class AudioVAE:
    """The sound autoencoder of LTX-2 with its vocoder; both compute in float32.

    Attributes:
        sample_rate, output_sample_rate: Samples a second of sounds taken, and made.
        mel_bins, mel_hop_length, n_fft: Bands; samples from spectrum to spectrum, and of one.
        latent_channels, latent_frequency_bins: Of latents ``[B, channels, T, bins]``.
        latents_per_second: Their rate.
        patcher: The patcher around the networks.
    """

    def __init__(
        self, state_dict: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Recognise weights and build their networks.

        Args:
            state_dict: A whole checkpoint, or these parts of one.
            metadata: The file's header, for what shapes do not tell.
        Raises:
            UnknownWeightsError: It is of another kind.
            IncompleteWeightsError: Some weights are missing, or contradict each other.
        """
        parts = (AUTOENCODER, VOCODER)
        weights = {key: value for key, value in state_dict.items() if key.startswith(parts)}
        if MARK not in weights:
            raise UnknownWeightsError(
                f"no sound autoencoder of LTX-2: found {contents_in_words(list(state_dict))}"
            )
        weights = weight_norm.joined(weights)
        try:
            config, vocoder = _autoencoder_config(weights), vocoder_config(weights, metadata)
        except KeyError as error:
            raise IncompleteWeightsError(
                f"the sound autoencoder lacks {error}; fetch the file again"
            ) from error
        self.config, self.spectra = config, _spectra(metadata)
        _check_axis(metadata)
        if vocoder.spectrum != config.channels * config.bands:
            raise IncompleteWeightsError(
                f"the vocoder takes {vocoder.spectrum} bands, the autoencoder makes "
                f"{config.bands} of each of {config.channels} channels"
            )
        networks = SoundNetworks(config, vocoder, dtype=torch.float32, device="meta")
        fill(networks, weights, "sound autoencoder (LTX-2)")
        self.first_stage_model = networks.eval()
        self.device = placement.vae_device()
        self.patcher = ModelPatcher(networks, self.device, placement.vae_offload_device())
        self.sample_rate, self.mel_hop_length = self.spectra.rate, self.spectra.hop
        self.n_fft, self.mel_bins = self.spectra.window, config.bands
        self.latent_channels = config.z_channels
        self.latent_frequency_bins = config.bands // config.ratio
        self.latents_per_second = self.sample_rate / self.mel_hop_length / config.ratio
        self._vocoder_values = vocoder.values
        self.output_sample_rate = self.sample_rate * vocoder.samples // self.mel_hop_length

    def num_of_latents_from_frames(self, frames_number: int, frame_rate: float) -> int:
        """Length of the latent of a sound that lasts as long as some frames."""
        return math.ceil(frames_number / frame_rate * self.latents_per_second)

    def get_sd(self) -> dict[str, Tensor]:
        """Weights by the keys of a file."""
        return self.first_stage_model.state_dict()

    def encode(self, audio: Mapping[str, Any]) -> Tensor:
        """Latents ``[B, channels, T, bins]`` of sounds.

        Args:
            audio: ``waveform`` [B, C, samples] and ``sample_rate``. One channel is heard on all.
        Raises:
            ValueError: They are of another form, or too short.
        """
        waveform = self._channels_of(_waveform(audio))
        sound = resample(waveform.float(), int(audio["sample_rate"]), self.sample_rate)
        self._load(sound.shape[0] * sound.shape[-1] // self.mel_hop_length)

        def run() -> Tensor:
            spectrogram = self.spectra.of(sound.to(self.device), self.mel_bins)
            return self.first_stage_model.audio_vae.encode(spectrogram)

        return residency.run_or_make_room(self.patcher, run).to(placement.intermediate_device())

    def decode(self, latents: Tensor) -> Tensor:
        """Sounds ``[B, C, samples]`` at `output_sample_rate`, in -1..1, of latents.

        Raises:
            ValueError: The latents are another model's.
        """
        wanted = (self.latent_channels, self.latent_frequency_bins)
        if latents.ndim != 4 or (latents.shape[1], latents.shape[3]) != wanted:
            raise ValueError(
                f"samples: expected a latent of sound [batch, {wanted[0]}, length, {wanted[1]}], "
                f"found shape {list(latents.shape)}; make one with LTXVEmptyLatentAudio"
            )
        self._load(latents.shape[0] * latents.shape[2] * self.config.ratio)

        def run() -> Tensor:
            networks = self.first_stage_model
            spectrogram = networks.audio_vae.decode(latents.to(self.device, torch.float32))
            return networks.vocoder(spectrogram)

        return residency.run_or_make_room(self.patcher, run).to(placement.intermediate_device())

    def _channels_of(self, waveform: Tensor) -> Tensor:
        """As many channels as the network hears."""
        wanted = self.config.channels
        if waveform.shape[1] == 1:
            return waveform.expand(-1, wanted, -1)
        if waveform.shape[1] != wanted:
            raise ValueError(
                f"audio: expected 1 or {wanted} channels, found {waveform.shape[1]}; mix them first"
            )
        return waveform

    def _load(self, spectra: int) -> None:
        """Bring the networks to their device, beside what a number of spectra takes."""
        values = max(self.config.bands * self.config.ch, self._vocoder_values)
        needed = spectra * values * COPIES * torch.float32.itemsize
        residency.load_models_gpu([self.patcher], memory_required=needed)


def _waveform(audio: Mapping[str, Any]) -> Tensor:
    found = audio.get("waveform") if isinstance(audio, Mapping) else None
    if not torch.is_tensor(found) or found.ndim != WAVE_AXES or not found.numel():
        shape = list(found.shape) if torch.is_tensor(found) else type(audio).__name__
        raise ValueError(
            "audio: expected waveforms [batch, channels, samples], none of them 0, found "
            f"{shape}; connect a sound to LTXVAudioVAEEncode"
        )
    return found


def _autoencoder_config(weights: Mapping[str, Tensor]) -> AudioVAEConfig:
    """Sizes, by keys and shapes."""
    root = f"{AUTOENCODER}encoder."
    channels = weights[f"{root}conv_in.conv.weight"].shape[1]
    ch = weights[f"{root}conv_in.conv.weight"].shape[0]
    levels = count_parts(weights, f"{root}down.")
    widths = [weights[f"{root}down.{n}.block.0.conv2.conv.weight"].shape[0] for n in range(levels)]
    z_channels = weights[MARK].shape[1]
    cells = weights[f"{AUTOENCODER}per_channel_statistics.std-of-means"].shape[0] // z_channels
    return AudioVAEConfig(
        ch=ch,
        ch_mult=tuple(width // ch for width in widths),
        num_res_blocks=count_parts(weights, f"{root}down.0.block."),
        z_channels=z_channels,
        channels=channels,
        bands=cells << (levels - 1),
    )


def _spectra(metadata: Mapping[str, str] | None) -> Spectra:
    """How spectrograms are made, as the header says, or as published."""
    root, usual = ("audio_vae", "preprocessing"), Spectra()
    stft = told_of(metadata, *root, "stft")
    return Spectra(
        int(told_of(metadata, *root, "audio").get("sampling_rate", usual.rate)),
        int(stft.get("hop_length", usual.hop)),
        int(stft.get("filter_length", usual.window)),
    )


def _check_axis(metadata: Mapping[str, str] | None) -> None:
    """Refuse autoencoders that do not see the past only."""
    sizes = told_of(metadata, "audio_vae", "model", "params", "ddconfig")
    axis = sizes.get("causality_axis", CAUSAL_AXIS)
    if axis != CAUSAL_AXIS:
        raise UnknownWeightsError(
            cannot_run(f"a sound autoencoder whose convolutions look back along {axis!r}")
        )


def load(path: str) -> AudioVAE:
    """The sound autoencoder of a file.

    Raises:
        WeightFileError: The file cannot be read or holds no such network.
    """
    tensors, metadata = load_torch_file(path, safe_load=True, return_metadata=True)
    try:
        return AudioVAE(tensors, metadata)
    except ValueError as error:
        raise WeightFileError(path, str(error).rstrip("."), CHOICE) from error
