"""Whisper's encoder: a transformer over the log-mel spectrogram of up to 30 seconds.

Keys follow the published files: ``conv1``, ``conv2``, ``embed_positions``, ``layers.N``,
``layer_norm``.
Source: Radford et al. 2022, https://arxiv.org/abs/2212.04356.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.nn import attention
from comfy.nn.mel import mel_filters

RATE, WINDOW, HOP = 16000, 400, 160  # samples
HEAD_WIDTH = 64
FAINTEST, RANGE = 1e-10, 8.0  # least power; decades below a sound's loudest that are told apart


def log_mel(waveform: Tensor, bands: int) -> Tensor:
    """The spectrogram [B, bands, samples / HOP] of waveforms [B, samples] at RATE.

    Decades of power, cut RANGE below each sound's loudest, moved to about -1..1.
    """
    window = torch.hann_window(WINDOW, device=waveform.device, dtype=waveform.dtype)
    waves = torch.stft(waveform, WINDOW, HOP, window=window, return_complex=True)
    power = waves[..., :-1].abs().square()
    filters = mel_filters(bands, RATE, WINDOW).to(power)
    decades = (filters.T @ power).clamp(min=FAINTEST).log10()
    loudest = decades.amax(dim=(1, 2), keepdim=True)
    return (torch.maximum(decades, loudest - RANGE) + 4) / 4


@dataclass(frozen=True)
class WhisperConfig:
    """Sizes of one encoder.

    Attributes:
        width, layers, inner: Of the transformer; its heads are HEAD_WIDTH wide.
        bands: Mel bands.
        places: States of a full window: 1500 in the published models, 30 seconds.
    """

    width: int
    layers: int
    inner: int
    bands: int
    places: int


def config_of(sd: Mapping[str, Tensor]) -> WhisperConfig:
    """Sizes from an encoder's weights.

    Raises:
        KeyError: A weight that tells a size is missing.
    """
    width, bands = sd["conv1.weight"].shape[:2]
    return WhisperConfig(
        width=width,
        layers=len({m[1] for key in sd if (m := re.match(r"layers\.(\d+)\.", key))}),
        inner=sd["layers.0.fc1.weight"].shape[0],
        bands=bands,
        places=sd["embed_positions.weight"].shape[0],
    )


class WhisperAttention(nn.Module):
    """Self-attention over all states; keys have no bias."""

    def __init__(self, width: int, place: dict[str, Any], operations: Any) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.q_proj = operations.Linear(width, width, **place)
        self.k_proj = operations.Linear(width, width, bias=False, **place)
        self.v_proj = operations.Linear(width, width, **place)
        self.out_proj = operations.Linear(width, width, **place)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.out_proj(attention.optimized_attention(q, k, v, self.heads))


class WhisperLayer(nn.Module):
    """Attention and MLP, each normed before and added after."""

    def __init__(self, config: WhisperConfig, place: dict[str, Any], operations: Any) -> None:
        super().__init__()
        width = config.width
        self.self_attn = WhisperAttention(width, place, operations)
        self.self_attn_layer_norm = operations.LayerNorm(width, **place)
        self.fc1 = operations.Linear(width, config.inner, **place)
        self.fc2 = operations.Linear(config.inner, width, **place)
        self.final_layer_norm = operations.LayerNorm(width, **place)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class WhisperEncoder(nn.Module):
    """The network from a waveform to the states of all layers."""

    def __init__(
        self,
        config: WhisperConfig,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        width = config.width
        self.config = config
        self.conv1 = operations.Conv1d(config.bands, width, 3, padding=1, **place)
        self.conv2 = operations.Conv1d(width, width, 3, stride=2, padding=1, **place)
        self.embed_positions = operations.Embedding(config.places, width, **place)
        self.layers = nn.ModuleList(
            WhisperLayer(config, place, operations) for _ in range(config.layers)
        )
        self.layer_norm = operations.LayerNorm(width, **place)

    def forward(self, waveform: Tensor) -> list[Tensor]:
        """Waveform [B, samples] at RATE -> states [B, T, D], 50 a second, before each layer, and
        the final ones.

        What is longer than a window is heard window by window; silence fills the last one.
        """
        window = self.config.places * 2 * HOP
        parts = [self._heard(part, window) for part in waveform.split(window, dim=-1)]
        return [torch.cat(states, dim=1) for states in zip(*parts)]

    def _heard(self, waveform: Tensor, window: int) -> list[Tensor]:
        full = F.pad(waveform, (0, window - waveform.shape[-1]))
        x = F.gelu(self.conv1(log_mel(full, self.config.bands)))
        x = F.gelu(self.conv2(x)).transpose(1, 2)
        numbers = torch.arange(x.shape[1], device=x.device)
        x = x + self.embed_positions(numbers, out_dtype=x.dtype)
        states = []
        for layer in self.layers:
            states.append(x)
            x = layer(x)
        return [*states, self.layer_norm(x)]
