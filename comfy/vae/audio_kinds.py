"""Recognises autoencoders of sound by the keys and shapes of their weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from comfy.ldm.audio.autoencoder import AudioOobleckVAE
from comfy.vae.spec import AutoencoderSpec, unchanged
from comfy.weights import weight_norm
from comfy.weights.state_dict import count_parts

OOBLECK_MARK = "decoder.layers.1.layers.0.beta"
USUAL_RATE = 44100  # hertz
HIGH_RATIO, HIGH_RATE = 1920, 48000  # samples of a cell by which ACE-Step 1.5 is known; its hertz
BYTES_A_SAMPLE = 1000  # values that live at once for a sample of the full-size network


def detect_oobleck(
    weights: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> AutoencoderSpec | None:
    """Oobleck, of Stable Audio and of ACE-Step 1.5."""
    del metadata
    if OOBLECK_MARK not in weights:
        return None
    channels, sound_channels, _ = weights["encoder.layers.0.weight"].shape
    levels = count_parts(weights, "encoder.layers.") - 3  # other layers come before and after
    ends = [weights[f"encoder.layers.{n}.layers.4.weight"].shape for n in range(1, levels + 1)]
    strides = tuple(kernel // 2 for _, _, kernel in ends)
    latent_channels = weights["decoder.layers.0.weight"].shape[1]
    ratio = math.prod(strides)

    def memory_encode(shape: Sequence[int], dtype: torch.dtype) -> float:
        return float(BYTES_A_SAMPLE * shape[0] * shape[2] * dtype.itemsize)

    def memory_decode(shape: Sequence[int], dtype: torch.dtype) -> float:
        return float(BYTES_A_SAMPLE * shape[0] * shape[2] * ratio * dtype.itemsize)

    is_high = ratio == HIGH_RATIO
    return AutoencoderSpec(
        name="ACE-Step 1.5" if is_high else "Stable Audio",
        build=functools.partial(
            AudioOobleckVAE,
            sound_channels,
            channels,
            latent_channels,
            tuple(out // channels for out, _, _ in ends),
            strides,
        ),
        memory_encode=memory_encode,
        memory_decode=memory_decode,
        latent_channels=latent_channels,
        latent_dim=1,
        of_sound=True,
        output_channels=sound_channels,
        downscale_ratio=ratio,
        upscale_ratio=ratio,
        working_dtypes=(torch.float16, torch.bfloat16, torch.float32),
        process_input=unchanged,
        process_output=unchanged,
        pad_channel_value="replicate",
        to_file=weight_norm.parted,
        sample_rate=HIGH_RATE if is_high else USUAL_RATE,
    )
