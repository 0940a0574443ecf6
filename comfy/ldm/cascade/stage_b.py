"""Stage B of Stable Cascade: the latent of stage C to that of a picture.

Custom nodes reach in through ``transformer_options``: ``patches["attn1_output_patch"]`` sees every
attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.cascade.common import (
    NORM_EPS,
    WIDER,
    LayerNorm2d,
    Levels,
    Options,
    all_waves,
    resized,
    tokens_of,
)
from comfy.nn.wrappers import run_wrapped

NUMBERS = ("sca",)
KINDS = ("CT", "CT", "CTA", "CTA")
COLOURS, PIXELS = 3, 8  # of a small picture to look at, which no node gives


class StageB(Levels):
    """Predicts noise of a latent from a time 0..1, the latent of stage C and pooled text.

    Args:
        c_r: Waves of a number.
        c_cond: Width of tokens that attention sees.
        c_hidden, nhead, blocks, block_repeat: Of each level; no heads where there is no attention.
        c_clip, c_clip_seq: Width of the pooled text; tokens it becomes.
        c_effnet: Channels of stage C's latent.
    """

    def __init__(
        self,
        c_in: int = 4,
        c_out: int = 4,
        c_r: int = 64,
        patch_size: int = 2,
        c_cond: int = 1280,
        c_hidden: Sequence[int] = (320, 640, 1280, 1280),
        nhead: Sequence[int] = (-1, -1, 20, 20),
        blocks: Sequence[Sequence[int]] = ((2, 6, 28, 6), (6, 28, 6, 2)),
        block_repeat: Sequence[Sequence[int]] = ((1, 1, 1, 1), (3, 3, 2, 2)),
        c_clip: int = 1280,
        c_clip_seq: int = 4,
        c_effnet: int = 16,
        c_pixels: int = COLOURS,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        parts = {"operations": operations, **place}
        self.dtype, self.c_r, self.c_clip_seq, self.c_cond = dtype, c_r, c_clip_seq, c_cond
        self.c_pixels = c_pixels
        first, cell = c_hidden[0], patch_size**2

        def mapper(width: int) -> nn.Sequential:
            return nn.Sequential(
                operations.Conv2d(width, WIDER * first, 1, **place),
                nn.GELU(),
                operations.Conv2d(WIDER * first, first, 1, **place),
                LayerNorm2d(first),
            )

        self.effnet_mapper, self.pixels_mapper = mapper(c_effnet), mapper(c_pixels)
        self.clip_mapper = operations.Linear(c_clip, c_cond * c_clip_seq, **place)
        self.embedding = nn.Sequential(
            nn.PixelUnshuffle(patch_size),
            operations.Conv2d(c_in * cell, first, 1, **place),
            LayerNorm2d(first),
        )
        self.build_levels(c_hidden, nhead, blocks, block_repeat, KINDS, c_cond, c_r, NUMBERS, parts)

        def between(kind: Any, width: int, out: int) -> nn.Module:
            return nn.Sequential(LayerNorm2d(width), kind(width, out, 2, stride=2, **place))

        pairs = list(itertools.pairwise(c_hidden))
        down, up = operations.Conv2d, operations.ConvTranspose2d
        self.down_downscalers = nn.ModuleList(
            [nn.Identity(), *(between(down, a, b) for a, b in pairs)]
        )
        self.up_upscalers = nn.ModuleList(
            [*(between(up, b, a) for a, b in reversed(pairs)), nn.Identity()]
        )
        self.clf = nn.Sequential(
            LayerNorm2d(first),
            operations.Conv2d(first, c_out * cell, 1, **place),
            nn.PixelShuffle(patch_size),
        )

    def forward(
        self,
        x: Tensor,
        r: Tensor,
        effnet: Tensor,
        clip: Tensor,
        pixels: Tensor | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, H, W]``.
            r: Times ``[B]`` in 0..1.
            effnet: Latent of stage C ``[B, E, h, w]``.
            clip: Pooled text ``[B, P]``.
            pixels: A small picture ``[B, 3, h, w]``.
            kwargs: ``sca`` ``[B]``.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, r, effnet, clip, pixels, options, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        r: Tensor,
        effnet: Tensor,
        clip: Tensor,
        pixels: Tensor | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        if pixels is None:
            pixels = torch.zeros(x.shape[0], self.c_pixels, PIXELS, PIXELS).to(x)
        waves = all_waves(r, (kwargs.get(name) for name in NUMBERS), self.c_r).to(x.dtype)
        text = tokens_of(self.clip_mapper, clip, self.c_clip_seq)
        text = functional.layer_norm(text, (self.c_cond,), eps=NORM_EPS)
        x = self.embedding(x)
        x = x + self.effnet_mapper(resized(effnet.to(x), x.shape[-2:]))
        x = x + resized(self.pixels_mapper(pixels.to(x)), x.shape[-2:])
        return self.clf(self.run_levels(x, waves, text, options))
