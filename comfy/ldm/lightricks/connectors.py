"""What stands between the language model of LTX-2 and its network: one projection of all states,
then a small transformer for the video's text and one for the sound's.

LTX-2.3 has a projection for each, made for states that are normed one by one.
Behind the text stand learned registers, so that all texts are equally long.
Source: HaCohen et al. 2026, https://arxiv.org/abs/2601.03233.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.lightricks.av_layers import QK_EPS
from comfy.ldm.lightricks.layers import CrossAttention, FeedForward, Options, normed
from comfy.ldm.lightricks.rotations import LTXRopeType, Turn, angles, halves, neighbours
from comfy.nn.config import NetworkConfig

LONGEST = 4096  # tokens that rotations were made for
FEWEST = 1024  # tokens of a text with its registers
SPREAD = 8.0  # of states, from the least to the greatest
RANGE_EPS = 1e-6
STATE_EPS = 1e-6


@dataclass(frozen=True)
class ConnectorsConfig(NetworkConfig):
    """Sizes of both connectors.

    Attributes:
        states: Width of all states of a token together.
        width, heads, layers: Of the transformers.
        registers: Learned registers.
        rope_type: Which channels turn together (see `LTXAVModel`).
        is_gated: Whether attentions have gates for their heads.
        sound: Sizes of the sound's, where each has a projection of its own; None where both read
            one projection and are alike.
    """

    states: int = 3840 * 49
    width: int = 3840
    heads: int = 30
    layers: int = 2
    registers: int = 128
    rope_type: str = "split"
    is_gated: bool = False
    sound: ConnectorsConfig | None = None


class ConnectorBlock(nn.Module):
    """Attention among the tokens and feed-forward."""

    def __init__(self, config: ConnectorsConfig, parts: Options) -> None:
        super().__init__()
        width, head = config.width, config.width // config.heads
        kind = {"eps": QK_EPS, "apply_gated_attention": config.is_gated, **parts}
        self.attn1 = CrossAttention(width, None, config.heads, head, **kind)
        self.ff = FeedForward(width, width, **parts)

    def forward(self, x: Tensor, turn: Turn) -> Tensor:
        x = x + self.attn1(normed(x), pe=turn)
        return x + self.ff(normed(x))


class Connector(nn.Module):
    """A transformer over a text ``[B, L, D]`` and the registers that follow it."""

    def __init__(self, config: ConnectorsConfig, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.config = config
        self.learnable_registers = nn.Parameter(
            torch.empty(config.registers, config.width, **place)
        )
        self.transformer_1d_blocks = nn.ModuleList(
            ConnectorBlock(config, parts) for _ in range(config.layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.filled_up(x)
        places = torch.arange(x.shape[1], device=x.device)[None, None]
        turned = angles(places, (LONGEST,), self.config.width, torch.float64)
        if self.config.rope_type == LTXRopeType.SPLIT:
            turn = halves(turned, self.config.heads, x.dtype)
        else:
            turn = neighbours(turned, x.dtype)
        for block in self.transformer_1d_blocks:
            x = block(x, turn)
        return normed(x)

    def filled_up(self, x: Tensor) -> Tensor:
        """The text and, from its end on, the registers of those places: whole rounds of them."""
        rounds = math.ceil(max(FEWEST, x.shape[1]) / self.config.registers)
        registers = self.learnable_registers.to(x).repeat(rounds, 1)[x.shape[1] :]
        return torch.cat([x, registers.expand(x.shape[0], -1, -1)], dim=1)


def spread_out(states: Tensor) -> Tensor:
    """All states of tokens side by side ``[B, L, D * n]``, those of each layer about -4..4.

    Args:
        states: ``[B, n, L, D]``, of the tokens and behind each layer.
    """
    mean = states.mean(dim=(2, 3), keepdim=True)
    reach = states.amax(dim=(2, 3), keepdim=True) - states.amin(dim=(2, 3), keepdim=True)
    even = (states - mean) / (reach + RANGE_EPS) * SPREAD
    return even.movedim(1, -1).flatten(2)


def normed_states(states: Tensor) -> Tensor:
    """All states of tokens side by side ``[B, L, D * n]``, each divided by its root mean square.

    Args:
        states: ``[B, n, L, D]``, of the tokens and behind each layer.
    """
    even = states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + STATE_EPS)
    return even.movedim(1, -1).flatten(2)


class Connectors(nn.Module):
    """States of a text ``[B, n, L, D]`` to what both streams read, side by side."""

    def __init__(
        self,
        config: ConnectorsConfig,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        parts = {"dtype": dtype, "device": device, "operations": operations}
        self.config = config
        place = {"dtype": dtype, "device": device}
        sound, linear = config.sound, operations.Linear
        if sound is None:
            made = {"aggregate_embed": linear(config.states, config.width, bias=False, **place)}
        else:
            made = {
                "video_aggregate_embed": linear(config.states, config.width, **place),
                "audio_aggregate_embed": linear(sound.states, sound.width, **place),
            }
        self.text_embedding_projection = nn.ModuleDict(made)
        self.video_embeddings_connector = Connector(config, parts)
        self.audio_embeddings_connector = Connector(sound or config, parts)

    def forward(self, states: Tensor) -> Tensor:
        """``[B, tokens and registers, width of video + width of sound]``, for the video first."""
        video, sound = self._projected(states)
        both = (self.video_embeddings_connector(video), self.audio_embeddings_connector(sound))
        return torch.cat(both, dim=-1)

    def _projected(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """What each connector reads of a text."""
        projections, sound = self.text_embedding_projection, self.config.sound
        if sound is None:
            text = projections["aggregate_embed"](spread_out(states))
            return text, text
        even, width = normed_states(states), states.shape[-1]
        # Scaled so that projections keep the size of values, whatever width they lead to.
        video = projections["video_aggregate_embed"](even * math.sqrt(self.config.width / width))
        heard = projections["audio_aggregate_embed"](even * math.sqrt(sound.width / width))
        return video, heard
