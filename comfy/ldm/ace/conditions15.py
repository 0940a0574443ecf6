"""What ACE-Step 1.5 is told: text, lyrics and a voice as tokens, and codes of the music as latents.

Source: https://github.com/ace-step/ACE-Step-1.5; Mentzer et al. 2023,
https://arxiv.org/abs/2309.15505, for the codes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from comfy.ldm.ace.layers15 import Encoder, LayerSizes

LEVELS = (8, 8, 8, 5, 5, 5)  # values of each digit of a code
CODES = math.prod(LEVELS)


class TimbreEncoder(Encoder):
    """A voice as one token: the state of its first cell.

    Files hold a special token, of which the network makes no use.
    """

    def __init__(self, inputs: int, sizes: LayerSizes, operations: Any, **place: Any) -> None:
        super().__init__(inputs, sizes, operations, **place)
        self.special_token = nn.Parameter(torch.empty(1, 1, sizes.width, **place))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, L, inputs]`` to ``[B, 1, D]``."""
        return super().forward(x)[:, :1]


class ConditionEncoder(nn.Module):
    """Lyrics, a voice and text in one sequence.

    Args:
        text: Channels of tokens of text and lyrics.
        channels: Channels of a latent.
    """

    def __init__(
        self, text: int, channels: int, lyrics: LayerSizes, timbre: LayerSizes, operations: Any,
        **place: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.text_projector = operations.Linear(text, lyrics.width, bias=False, **place)
        self.lyric_encoder = Encoder(text, lyrics, operations, **place)
        self.timbre_encoder = TimbreEncoder(channels, timbre, operations, **place)

    def forward(self, text: Tensor, lyrics: Tensor, voice: Tensor) -> Tensor:
        """Tokens ``[B, L + 1 + T, D]``.

        Args:
            text: States of the text ``[B, T, text]``.
            lyrics: Rows of the table of tokens, of the lyrics ``[B, L, text]``.
            voice: Latents ``[B, cells, channels]``.
        """
        parts = [self.lyric_encoder(lyrics), self.timbre_encoder(voice), self.text_projector(text)]
        return torch.cat(parts, dim=1)


class Quantizer(nn.Module):
    """Codes and the vectors they stand for."""

    def __init__(self, width: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.project_in = operations.Linear(width, len(LEVELS), **place)
        self.project_out = operations.Linear(len(LEVELS), width, **place)

    def vectors(self, codes: Tensor) -> Tensor:
        """``[B, n]`` in 0..63999 to ``[B, n, D]`` float32: each digit is a place in -1..1."""
        levels = torch.tensor(LEVELS, device=codes.device)
        steps = torch.tensor(
            [math.prod(LEVELS[:digit]) for digit in range(len(LEVELS))], device=codes.device
        )
        digits = codes[..., None] // steps % levels
        return self.project_out(digits.float() * (2.0 / (levels.float() - 1)) - 1)


class AttentionPooler(Encoder):
    """Pools cells to codes; see `AudioTokenizer`."""

    def __init__(self, sizes: LayerSizes, operations: Any, **place: Any) -> None:
        super().__init__(sizes.width, sizes, operations, **place)
        self.special_token = nn.Parameter(torch.empty(1, 1, sizes.width, **place))


class AudioTokenizer(nn.Module):
    """Codes of music. What makes codes of latents is held, so that it can be saved, and not used:
    a language model makes them.
    """

    def __init__(
        self, channels: int, quantized: int, sizes: LayerSizes, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.audio_acoustic_proj = operations.Linear(channels, sizes.width, **place)
        self.attention_pooler = AttentionPooler(sizes, operations, **place)
        self.quantizer = Quantizer(quantized, operations, **place)


class Detokenizer(Encoder):
    """Vectors of codes as latents, some cells for each.

    Args:
        cells: How many.
    """

    def __init__(
        self, channels: int, cells: int, sizes: LayerSizes, operations: Any, **place: Any
    ) -> None:
        super().__init__(sizes.width, sizes, operations, **place)
        self.special_tokens = nn.Parameter(torch.empty(1, cells, sizes.width, **place))
        self.proj_out = operations.Linear(sizes.width, channels, **place)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, n, D]`` to ``[B, n * cells, channels]``."""
        count = x.shape[1]
        cells = self.embed_tokens(x)[:, :, None] + self.special_tokens.to(x)
        made = self.proj_out(self.through(cells.flatten(0, 1)))
        return made.unflatten(0, (-1, count)).flatten(1, 2)
