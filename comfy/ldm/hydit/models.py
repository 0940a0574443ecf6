"""Hunyuan-DiT: a transformer over the patches of a picture, whose second half is given what the
first half saw, as a U-Net is.

It reads two texts: tokens of BERT and of mT5. Custom nodes reach in through
``transformer_options``: ``patches["attn1_output_patch"]`` and ``patches["attn2_output_patch"]`` see
the attention of the picture with itself and with the texts, ``patches_replace["dit"]`` has keys
``("double_block", i)`` with the picture's tokens ``[B, L, D]``.
Source: Li et al. 2024, https://arxiv.org/abs/2405.08748.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.ldm.hydit.layers import (
    AttentionPool,
    Block,
    FinalLayer,
    Options,
    Parts,
    perceptron,
    place_of,
    position_angles,
)
from comfy.nn import patches
from comfy.nn.layout import tokens_of_patches
from comfy.nn.residuals import check_residual
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped

WAVES = 256  # of a time or of a size
SIZES = 6  # height and width of the original, of the target, and where it was cropped
POOLER_HEADS = 8
POOLED = 1024  # channels of the pooled text in every published network
BASE_CELLS = 64  # of a side of the pictures that positions were made for


class Texts(NamedTuple):
    """Tokens of BERT and of mT5 ``[B, L, D]``, each with a mask ``[B, L]`` of those that count."""

    bert: Tensor
    mask: Tensor | None
    t5: Tensor | None
    t5_mask: Tensor | None


class HunYuanDiT(nn.Module):
    """Predicts the v of a latent from a timestep 0..1000 and two texts.

    Args:
        text_states_dim, text_states_dim_t5: Widths of BERT's and of mT5's tokens.
        text_len, text_len_t5: How many of each the network was trained with.
        size_cond, use_style_cond: Whether it is told the picture's sizes, and a style (1.0, 1.1).
        learn_sigma: Whether it also predicts variances, which are not used here.
        attn_precision: Type in which attention is computed where its function can choose.
    """

    reads_patches = frozenset({"dit", patches.OUTPUT, patches.CROSS_OUTPUT})
    is_whole = True  # a control network has the layers of the first half only

    def __init__(
        self,
        patch_size: int = 2,
        in_channels: int = 4,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        text_states_dim: int = 1024,
        text_states_dim_t5: int = 2048,
        text_len: int = 77,
        text_len_t5: int = 256,
        qk_norm: bool = True,
        size_cond: bool = False,
        use_style_cond: bool = False,
        learn_sigma: bool = True,
        attn_precision: Any = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads or hidden_size // num_heads % 4:
            raise ValueError(
                f"{hidden_size} channels, which {num_heads} heads do not divide into fours"
            )
        parts: Parts = {"dtype": dtype, "device": device, "operations": operations}
        place, width, text = place_of(parts), hidden_size, text_states_dim
        self.dtype, self.patch_size, self.heads = dtype, patch_size, num_heads
        self.in_channels, self.text_len, self.text_len_t5 = in_channels, text_len, text_len_t5
        self.size_cond, self.use_style_cond = size_cond, use_style_cond
        self.out_channels = in_channels * 2 if learn_sigma else in_channels
        self.mlp_t5 = perceptron(text_states_dim_t5, text_states_dim_t5 * 4, text, parts)
        # What stands in the place of padding, of BERT's tokens and then of mT5's.
        self.text_embedding_padding = nn.Parameter(
            torch.empty(text_len + text_len_t5, text, **place)
        )
        self.pooler = AttentionPool(text_len_t5, text_states_dim_t5, POOLER_HEADS, POOLED, parts)
        told = POOLED
        if size_cond:
            told += SIZES * WAVES
        if use_style_cond:
            self.style_embedder = operations.Embedding(1, width, **place)
            told += width
        patch = {"kernel_size": patch_size, "stride": patch_size, **place}
        self.x_embedder = nn.ModuleDict({"proj": operations.Conv2d(in_channels, width, **patch)})
        self.t_embedder = nn.ModuleDict({"mlp": perceptron(WAVES, width, width, parts)})
        self.extra_embedder = perceptron(told, width * 4, width, parts)
        inner = int(width * mlp_ratio + 1e-6)  # a ratio read from weights may round down
        self.blocks = nn.ModuleList(
            Block(
                width,
                text,
                num_heads,
                inner,
                qk_norm,
                self._joins(number, depth),
                attn_precision,
                parts,
            )
            for number in range(depth)
        )
        self.final_layer = FinalLayer(width, patch_size**2 * self.out_channels, parts)

    def _joins(self, number: int, depth: int) -> bool:
        """Whether a layer is given what an earlier one saw."""
        return self.is_whole and number > depth // 2

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor,
        text_embedding_mask: Tensor | None = None,
        encoder_hidden_states_t5: Tensor | None = None,
        text_embedding_mask_t5: Tensor | None = None,
        image_meta_size: Tensor | None = None,
        style: Tensor | None = None,
        control: Any = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, H, W]``.
            t: Timesteps ``[B]`` in 0..1000.
            context: BERT's tokens ``[B, L, D]``, with a mask ``[B, L]`` of those that count.
            encoder_hidden_states_t5: mT5's tokens, likewise.
            image_meta_size: Sizes in pixels ``[B, 6]``: height and width of the original and of
                the target, and the corner of a crop.
            style: Number of a style ``[B]``; 0 by default, the only one.
            control: Residuals of a control network under ``"output"``, one for each layer whose
                tokens a later layer is given.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, t, context, text_embedding_mask, encoder_hidden_states_t5, text_embedding_mask_t5,
            image_meta_size, style, control, options, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor,
        text_embedding_mask: Tensor | None = None,
        encoder_hidden_states_t5: Tensor | None = None,
        text_embedding_mask_t5: Tensor | None = None,
        image_meta_size: Tensor | None = None,
        style: Tensor | None = None,
        control: Any = None,
        transformer_options: Options | None = None,
        **_: Any,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        given = Texts(
            context, text_embedding_mask, encoder_hidden_states_t5, text_embedding_mask_t5
        )
        height, width = x.shape[-2:]
        patch = self.patch_size
        tokens, angles = self.embed(x)
        vec, text = self.read(t, given, (image_meta_size, style), tokens)
        seen = (control or {}).get("output") or []
        tokens = self._run_blocks(tokens, vec, text, angles, seen, options)
        out = rearrange(
            self.final_layer(tokens, vec), "b (h w) (p q c) -> b c (h p) (w q)",
            h=-(-height // patch), p=patch, q=patch,
        )  # fmt: skip
        return out[:, : self.in_channels, :height, :width]

    def embed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``[B, L, D]`` of a latent, and their angles."""
        patch = self.patch_size
        x = pad_to_patch_size(x, (patch, patch))
        rows, columns = (side // patch for side in x.shape[-2:])
        tokens = tokens_of_patches(self.x_embedder["proj"](x))
        head = tokens.shape[-1] // self.heads
        return tokens, position_angles(rows, columns, BASE_CELLS // patch, head, x.device)

    def read(
        self, t: Tensor, given: Texts, told: tuple[Tensor | None, Tensor | None], like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The time with what the network is told (sizes and style) ``[B, D]``, and both texts
        ``[B, L, D]``.

        Raises:
            ValueError: There is no text of mT5, or nothing that it has to be told.
        """
        if given.t5 is None:
            raise ValueError(
                "Hunyuan-DiT reads tokens of BERT and of mT5, and the conditioning has none of "
                "mT5; encode the text with the model's own encoders (a Load CLIP node of type "
                "hunyuan_dit, or the checkpoint's)"
            )
        waves = timestep_embedding(t, WAVES).to(like.dtype)
        extra = self.extra_embedder(self._told(given.t5, *told, like))
        second = (self.mlp_t5(given.t5), given.t5_mask)
        return self.t_embedder["mlp"](waves) + extra, self._text((given.bert, given.mask), second)

    def _told(
        self, text: Tensor, sizes: Tensor | None, style: Tensor | None, like: Tensor
    ) -> Tensor:
        """What the network is told beside the time: the text as one vector, sizes and style."""
        told = [self.pooler(text)]
        if self.size_cond:
            if sizes is None:
                raise ValueError("this network is told the picture's sizes, and none are given")
            waves = timestep_embedding(sizes.flatten().float(), WAVES).to(like.dtype)
            told.append(waves.reshape(sizes.shape[0], -1).expand(like.shape[0], -1))
        if self.use_style_cond:
            if style is None:
                style = torch.zeros(like.shape[0], device=like.device, dtype=torch.long)
            told.append(self.style_embedder(style, out_dtype=like.dtype))
        return torch.cat(told, dim=1)

    def _text(self, bert: tuple[Tensor, Tensor | None], t5: tuple[Tensor, Tensor | None]) -> Tensor:
        """Both texts ``[B, L, D]``, padding replaced by what was learned to stand for it.

        Only the last tokens, as many as the training had, are searched for padding.
        """
        padding = self.text_embedding_padding.to(bert[0]).split([self.text_len, self.text_len_t5])
        joined = []
        for (states, mask), fill in zip((bert, t5), padding):
            if mask is not None:
                count = min(len(fill), states.shape[1])
                kept, last = states.split([states.shape[1] - count, count], dim=1)
                is_text = mask[:, -count:, None] != 0
                states = torch.cat([kept, torch.where(is_text, last, fill[:count])], dim=1)
            joined.append(states)
        return torch.cat(joined, dim=1)

    def _run_blocks(
        self,
        tokens: Tensor,
        vec: Tensor,
        text: Tensor,
        angles: Tensor,
        control: list[Tensor | None],
        options: Options,
    ) -> Tensor:
        table = (options.get("patches_replace") or {}).get("dit") or {}
        options["total_blocks"], options["block_type"] = len(self.blocks), "double"
        half, residuals = len(self.blocks) // 2, list(control)
        skips: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            options["block_index"] = number
            skip = skips.pop() if number > half else None
            residual = residuals.pop() if skip is not None and residuals else None
            if skip is not None and residual is not None:
                check_residual(skip, residual, "output")
                skip = skip + residual.to(skip)

            def original(
                args: Mapping[str, Any], block: nn.Module = block, skip: Tensor | None = skip
            ) -> Options:
                given = (args["vec"], args["txt"], args["pe"], skip)
                return {"img": block(args["img"], *given, args["transformer_options"])}

            args = {"img": tokens, "txt": text, "vec": vec, "pe": angles}
            args["transformer_options"] = options  # type: ignore[assignment]
            replacement = table.get(("double_block", number))
            if replacement is None:
                tokens = original(args)["img"]
            else:
                tokens = replacement(args, {"original_block": original})["img"]
            if number < half - 1:
                skips.append(tokens)
        return tokens
