"""Stage C of Stable Cascade: text to a small latent, which stage B makes a picture's.

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
    LayerNorm2d,
    Levels,
    Options,
    all_waves,
    tokens_of,
)
from comfy.nn.wrappers import run_wrapped

NUMBERS = ("sca", "crp")


class UpDownBlock2d(nn.Module):
    """A change of width between levels of one size; ``place`` is where published keys have it."""

    def __init__(self, conv: nn.Module, place: int) -> None:
        super().__init__()
        parts = [nn.Identity(), nn.Identity()]
        parts[place] = conv  # type: ignore[call-overload]
        self.blocks = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class StageC(Levels):
    """Predicts noise of a latent from a time 0..1, text tokens, pooled text and pictures.

    Args:
        c_r: Waves of a number.
        c_cond: Width of tokens that attention sees.
        c_hidden, nhead, blocks, block_repeat: Of each level.
        c_clip_text, c_clip_text_pooled, c_clip_img: Widths of text tokens, pooled text, pictures.
        c_clip_seq: Tokens that a pooled text or a picture becomes.
    """

    def __init__(
        self,
        c_in: int = 16,
        c_out: int = 16,
        c_r: int = 64,
        patch_size: int = 1,
        c_cond: int = 2048,
        c_hidden: Sequence[int] = (2048, 2048),
        nhead: Sequence[int] = (32, 32),
        blocks: Sequence[Sequence[int]] = ((8, 24), (24, 8)),
        block_repeat: Sequence[Sequence[int]] = ((1, 1), (1, 1)),
        c_clip_text: int = 1280,
        c_clip_text_pooled: int = 1280,
        c_clip_img: int = 768,
        c_clip_seq: int = 4,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        parts = {"operations": operations, **place}
        self.dtype, self.c_r, self.c_clip_seq, self.c_cond = dtype, c_r, c_clip_seq, c_cond
        cell = patch_size**2
        self.clip_txt_mapper = operations.Linear(c_clip_text, c_cond, **place)
        self.clip_txt_pooled_mapper = operations.Linear(
            c_clip_text_pooled, c_cond * c_clip_seq, **place
        )
        self.clip_img_mapper = operations.Linear(c_clip_img, c_cond * c_clip_seq, **place)
        self.embedding = nn.Sequential(
            nn.PixelUnshuffle(patch_size),
            operations.Conv2d(c_in * cell, c_hidden[0], 1, **place),
            LayerNorm2d(c_hidden[0]),
        )
        self.build_levels(
            c_hidden, nhead, blocks, block_repeat, ["CTA"] * len(c_hidden), c_cond, c_r, NUMBERS,
            parts,
        )  # fmt: skip

        def between(width: int, out: int, place_of_conv: int) -> nn.Module:
            conv = operations.Conv2d(width, out, 1, **place)
            return nn.Sequential(LayerNorm2d(width), UpDownBlock2d(conv, place_of_conv))

        pairs = list(itertools.pairwise(c_hidden))
        self.down_downscalers = nn.ModuleList(
            [nn.Identity(), *(between(a, b, 0) for a, b in pairs)]
        )
        self.up_upscalers = nn.ModuleList(
            [*(between(b, a, 1) for a, b in reversed(pairs)), nn.Identity()]
        )
        self.clf = nn.Sequential(
            LayerNorm2d(c_hidden[0]),
            operations.Conv2d(c_hidden[0], c_out * cell, 1, **place),
            nn.PixelShuffle(patch_size),
        )

    def forward(
        self,
        x: Tensor,
        r: Tensor,
        clip_text: Tensor,
        clip_text_pooled: Tensor,
        clip_img: Tensor,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, H, W]``.
            r: Times ``[B]`` in 0..1.
            clip_text, clip_text_pooled: Text ``[B, L, D]``, pooled text ``[B, P]``.
            clip_img: Pictures ``[B, N, I]``.
            kwargs: ``sca`` and ``crp`` ``[B]``.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, r, clip_text, clip_text_pooled, clip_img, options, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        r: Tensor,
        clip_text: Tensor,
        clip_text_pooled: Tensor,
        clip_img: Tensor,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        waves = all_waves(r, (kwargs.get(name) for name in NUMBERS), self.c_r).to(x.dtype)
        tokens = [
            self.clip_txt_mapper(clip_text),
            tokens_of(self.clip_txt_pooled_mapper, clip_text_pooled, self.c_clip_seq),
            tokens_of(self.clip_img_mapper, clip_img, self.c_clip_seq),
        ]
        text = functional.layer_norm(torch.cat(tokens, dim=1), (self.c_cond,), eps=NORM_EPS)
        return self.clf(self.run_levels(self.embedding(x), waves, text, options))
