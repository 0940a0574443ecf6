"""wav2vec 2.0: a transformer over short pieces of a sound's waveform.

Keys follow the published files: ``feature_extractor.conv_layers.N``, ``feature_projection``,
``encoder.pos_conv_embed``, ``encoder.layers.N``.
Source: Baevski et al. 2020, https://arxiv.org/abs/2006.11477.
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

STRIDES = (5, 2, 2, 2, 2, 2, 2)  # of the convolutions: one state for 320 samples
HEAD_WIDTH, MOST_HEADS = 64, 16  # the models wider than 1024 have wider heads instead of more
SILENCE = 1e-7  # added to a sound's variance
POSITIONS = "encoder.pos_conv_embed.conv."
# Scale and direction of the weight-normed convolution: the older names, and the newer.
NORMED = (
    ("weight_g", "weight_v"),
    ("parametrizations.weight.original0", "parametrizations.weight.original1"),
)


@dataclass(frozen=True)
class Wav2Vec2Config:
    """Sizes of one network.

    Attributes:
        width, heads, layers, inner: Of the transformer.
        channels, kernels: Of each convolution over the waveform.
        conv_bias: Whether those have biases.
        stable: The large kind: a layer norm after each convolution and before each part of a
            layer, and sounds of unit variance. Else a group norm after the first convolution
            alone, which makes a sound's loudness immaterial, and a layer norm after each part.
        reach, groups: Kernel and groups of the convolution that tells places.
    """

    width: int
    heads: int
    layers: int
    inner: int
    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    conv_bias: bool
    stable: bool
    reach: int
    groups: int

    def __post_init__(self) -> None:
        if len(self.channels) != len(STRIDES):
            raise ValueError(
                f"wav2vec 2.0 has {len(STRIDES)} convolutions, found {len(self.channels)}"
            )
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")


def merged_position_weight(sd: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights, with the weight norm of the positional convolution multiplied out in float32.

    Scale times direction, one scale for each place of the kernel.
    """
    made = dict(sd)
    for scale_name, direction_name in NORMED:
        scale = made.pop(POSITIONS + scale_name, None)
        direction = made.pop(POSITIONS + direction_name, None)
        if scale is not None and direction is not None:
            long = direction.float()
            norm = long.square().sum(dim=(0, 1), keepdim=True).sqrt()
            made[POSITIONS + "weight"] = scale.float() * long / norm
    return made


def config_of(sd: Mapping[str, Tensor]) -> Wav2Vec2Config:
    """Sizes from weights whose weight norm is multiplied out.

    Raises:
        KeyError: A weight that tells a size is missing.
        ValueError: The sizes are those of no such network.
    """
    kernels: list[Tensor] = []
    while f"feature_extractor.conv_layers.{len(kernels)}.conv.weight" in sd:
        kernels.append(sd[f"feature_extractor.conv_layers.{len(kernels)}.conv.weight"])
    places = sd[POSITIONS + "weight"].shape
    width = sd["encoder.layer_norm.weight"].shape[0]
    layers = {m[1] for key in sd if (m := re.match(r"encoder\.layers\.(\d+)\.", key))}
    return Wav2Vec2Config(
        width=width,
        heads=min(MOST_HEADS, max(1, width // HEAD_WIDTH)),
        layers=len(layers),
        inner=sd["encoder.layers.0.feed_forward.intermediate_dense.weight"].shape[0],
        channels=tuple(kernel.shape[0] for kernel in kernels),
        kernels=tuple(kernel.shape[2] for kernel in kernels),
        conv_bias="feature_extractor.conv_layers.0.conv.bias" in sd,
        stable="feature_extractor.conv_layers.1.layer_norm.weight" in sd,
        reach=places[2],
        groups=places[0] // places[1],
    )


class Wav2Vec2Convolution(nn.Module):
    """A convolution over the waveform, its norm and GELU."""

    def __init__(
        self, config: Wav2Vec2Config, number: int, place: dict[str, Any], operations: Any
    ) -> None:
        super().__init__()
        taken = config.channels[number - 1] if number else 1
        made = config.channels[number]
        self.conv = operations.Conv1d(
            taken, made, config.kernels[number], STRIDES[number], bias=config.conv_bias, **place
        )
        self.is_layer_norm = config.stable
        self.layer_norm: nn.Module | None = None  # the files' name for either norm
        if config.stable:
            self.layer_norm = operations.LayerNorm(made, **place)
        elif number == 0:
            self.layer_norm = operations.GroupNorm(made, made, **place)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.layer_norm is not None and self.is_layer_norm:
            x = self.layer_norm(x.transpose(1, 2)).transpose(1, 2)
        elif self.layer_norm is not None:
            x = self.layer_norm(x)
        return F.gelu(x)


class Wav2Vec2Features(nn.Module):
    """Waveform [B, samples] -> features [B, T, channels]."""

    def __init__(self, config: Wav2Vec2Config, place: dict[str, Any], operations: Any) -> None:
        super().__init__()
        self.conv_layers = nn.ModuleList(
            Wav2Vec2Convolution(config, number, place, operations)
            for number in range(len(config.channels))
        )

    def forward(self, waveform: Tensor) -> Tensor:
        x = waveform[:, None]
        for layer in self.conv_layers:
            x = layer(x)
        return x.transpose(1, 2)


class Wav2Vec2Projection(nn.Module):
    """Features to the transformer's width."""

    def __init__(self, config: Wav2Vec2Config, place: dict[str, Any], operations: Any) -> None:
        super().__init__()
        self.layer_norm = operations.LayerNorm(config.channels[-1], **place)
        self.projection = operations.Linear(config.channels[-1], config.width, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.layer_norm(x))


class Wav2Vec2Positions(nn.Module):
    """Tells places by what is around them: a wide grouped convolution and GELU."""

    def __init__(self, config: Wav2Vec2Config, place: dict[str, Any], operations: Any) -> None:
        super().__init__()
        self.conv = operations.Conv1d(
            config.width,
            config.width,
            config.reach,
            padding=config.reach // 2,
            groups=config.groups,
            **place,
        )

    def forward(self, x: Tensor) -> Tensor:
        near = self.conv(x.transpose(1, 2))[..., : x.shape[1]]  # an even kernel makes one too many
        return F.gelu(near).transpose(1, 2)


class Wav2Vec2Attention(nn.Module):
    """Self-attention over all states."""

    def __init__(self, config: Wav2Vec2Config, place: dict[str, Any], operations: Any) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = operations.Linear(config.width, config.width, **place)
        self.k_proj = operations.Linear(config.width, config.width, **place)
        self.v_proj = operations.Linear(config.width, config.width, **place)
        self.out_proj = operations.Linear(config.width, config.width, **place)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.out_proj(attention.optimized_attention(q, k, v, self.heads))


class Wav2Vec2FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, config: Wav2Vec2Config, place: dict[str, Any], operations: Any) -> None:
        super().__init__()
        self.intermediate_dense = operations.Linear(config.width, config.inner, **place)
        self.output_dense = operations.Linear(config.inner, config.width, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.output_dense(F.gelu(self.intermediate_dense(x)))


class Wav2Vec2Layer(nn.Module):
    """Attention and MLP, each added to what it was given; normed before, or after the sum."""

    def __init__(self, config: Wav2Vec2Config, place: dict[str, Any], operations: Any) -> None:
        super().__init__()
        self.stable = config.stable
        self.attention = Wav2Vec2Attention(config, place, operations)
        self.layer_norm = operations.LayerNorm(config.width, **place)
        self.feed_forward = Wav2Vec2FeedForward(config, place, operations)
        self.final_layer_norm = operations.LayerNorm(config.width, **place)

    def forward(self, x: Tensor) -> Tensor:
        if self.stable:
            x = x + self.attention(self.layer_norm(x))
            return x + self.feed_forward(self.final_layer_norm(x))
        x = self.layer_norm(x + self.attention(x))
        return self.final_layer_norm(x + self.feed_forward(x))


class Wav2Vec2Encoder(nn.Module):
    """The transformer."""

    def __init__(self, config: Wav2Vec2Config, place: dict[str, Any], operations: Any) -> None:
        super().__init__()
        self.stable = config.stable
        self.pos_conv_embed = Wav2Vec2Positions(config, place, operations)
        self.layer_norm = operations.LayerNorm(config.width, **place)
        self.layers = nn.ModuleList(
            Wav2Vec2Layer(config, place, operations) for _ in range(config.layers)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """States [B, T, D] before each layer, and the final ones."""
        x = x + self.pos_conv_embed(x)
        if not self.stable:
            x = self.layer_norm(x)
        states = []
        for layer in self.layers:
            states.append(x)
            x = layer(x)
        return [*states, self.layer_norm(x) if self.stable else x]


class Wav2Vec2Model(nn.Module):
    """The network from a waveform to the states of all layers."""

    def __init__(
        self,
        config: Wav2Vec2Config,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        self.config = config
        self.feature_extractor = Wav2Vec2Features(config, place, operations)
        self.feature_projection = Wav2Vec2Projection(config, place, operations)
        self.encoder = Wav2Vec2Encoder(config, place, operations)

    @property
    def least_samples(self) -> int:
        """The shortest sound with a state."""
        samples = 1
        for kernel, stride in reversed(list(zip(self.config.kernels, STRIDES))):
            samples = (samples - 1) * stride + kernel
        return samples

    def forward(self, waveform: Tensor) -> list[Tensor]:
        """Waveform [B, samples] at 16,000 a second -> states [B, T, D], 50 a second.

        Raises:
            ValueError: The sound is too short for one state.
        """
        if waveform.shape[-1] < self.least_samples:
            raise ValueError(
                f"audio: expected a sound of at least {self.least_samples} samples at 16,000 a "
                f"second, found {waveform.shape[-1]}"
            )
        if self.config.stable:
            spread, mean = torch.var_mean(waveform, dim=-1, correction=0, keepdim=True)
            waveform = (waveform - mean) / (spread + SILENCE).sqrt()
        return self.encoder(self.feature_projection(self.feature_extractor(waveform)))
