"""Lumina 2 and Z-Image: one stream of text tokens and patches, each refined alone first.

Custom nodes reach in through ``transformer_options``: ``patches_replace["dit"]`` with keys
``("double_block", i)`` for the main layers, whose ``img`` is text and patches in one,
``patches["double_block"]`` after each of them, ``patches["noise_refiner"]``, and ``rope_options``;
``patches["attn1_output_patch"]`` sees the attention of the main layers and finds the picture's
tokens at ``extra_options["img_slice"]``.
Source: https://arxiv.org/abs/2503.21758; https://github.com/Tongyi-MAI/Z-Image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.common_dit import RMSNorm, pad_to_patch_size
from comfy.ldm.flux.layers import EmbedND
from comfy.ldm.lumina.layers import (  # noqa: F401 - packs look here for the layers
    Z_MODULATION_WIDTH,
    FeedForward,
    FinalLayer,
    JointAttention,
    JointTransformerBlock,
    LuminaSizes,
    Options,
    TimestepEmbedder,
    feed_forward_width,
)
from comfy.nn import patches
from comfy.nn.wrappers import run_wrapped

MODULATION_WIDTH = 1024


class NextDiT(nn.Module):
    """Predicts the flow of a noisy latent from a time 0..1 and text tokens.

    Args:
        n_layers, n_refiner_layers: Main layers; layers over each stream alone.
        cap_feat_dim: Width of the text tokens.
        axes_dims: Channels of a head for text and index, row and column.
        z_image_modulation: The narrow modulation of Z-Image.
        time_scale: Factor of times before their waves are taken.
        pad_tokens_multiple: Both streams are filled to multiples of it with a learned token.
    """

    reads_patches = frozenset({"noise_refiner", "double_block", "dit", patches.OUTPUT})

    def __init__(
        self,
        patch_size: int = 2,
        in_channels: int = 16,
        dim: int = 2304,
        n_layers: int = 26,
        n_refiner_layers: int = 2,
        n_heads: int = 24,
        n_kv_heads: int = 8,
        multiple_of: int = 256,
        ffn_dim_multiplier: float = 4.0,
        qk_norm: bool = True,
        cap_feat_dim: int = 2304,
        axes_dims: Sequence[int] = (32, 32, 32),
        rope_theta: float = 10000.0,
        z_image_modulation: bool = False,
        time_scale: float = 1.0,
        pad_tokens_multiple: int | None = None,
        clip_text_dim: int | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        parts = {"operations": operations, **place}
        inner = feed_forward_width(dim, ffn_dim_multiplier, multiple_of)
        sizes = LuminaSizes(dim, n_heads, n_kv_heads, inner, qk_norm)
        width = min(dim, Z_MODULATION_WIDTH if z_image_modulation else MODULATION_WIDTH)
        self.dtype, self.dim = dtype, dim
        self.patch_size, self.in_channels = patch_size, in_channels
        self.time_scale, self.pad_tokens_multiple = time_scale, pad_tokens_multiple
        self.x_embedder = operations.Linear(patch_size**2 * in_channels, dim, **place)

        def layers(count: int, modulation: int | None) -> nn.ModuleList:
            return nn.ModuleList(
                JointTransformerBlock(sizes, modulation, z_image_modulation, **parts)
                for _ in range(count)
            )

        self.noise_refiner = layers(n_refiner_layers, width)
        self.context_refiner = layers(n_refiner_layers, None)
        self.t_embedder = TimestepEmbedder(min(dim, MODULATION_WIDTH), width, **parts)
        self.cap_embedder = nn.Sequential(
            RMSNorm(cap_feat_dim, sizes.norm_eps, **place),
            operations.Linear(cap_feat_dim, dim, **place),
        )
        self.layers = layers(n_layers, width)
        self.final_layer = FinalLayer(dim, patch_size**2 * in_channels, width, **parts)
        self.clip_text_dim = clip_text_dim
        if clip_text_dim is not None:
            self.clip_text_pooled_proj = nn.Sequential(
                RMSNorm(clip_text_dim, sizes.norm_eps, **place),
                operations.Linear(clip_text_dim, clip_text_dim, **place),
            )
            self.time_text_embed = nn.Sequential(
                nn.SiLU(), operations.Linear(width + clip_text_dim, width, **place)
            )
        if pad_tokens_multiple is not None:
            self.x_pad_token = nn.Parameter(torch.empty(1, dim, **place))
            self.cap_pad_token = nn.Parameter(torch.empty(1, dim, **place))
        self.rope_embedder = EmbedND(dim // n_heads, rope_theta, list(axes_dims))

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        num_tokens: int | None = None,
        attention_mask: Tensor | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, H, W]``.
            timesteps: Times ``[B]`` in 0..1.
            context: Text tokens ``[B, L, D]``.
            num_tokens: Accepted for compatibility.
            attention_mask: ``[B, L]``, added to the scores of text tokens.
            **kwargs: ``clip_text_pooled``, pooled text ``[B, P]`` (NewBie).
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, timesteps, context, num_tokens, attention_mask, options, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        num_tokens: int | None = None,
        attention_mask: Tensor | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        del num_tokens
        options = {} if transformer_options is None else transformer_options
        height, width = x.shape[-2:]
        p = self.patch_size
        padded = pad_to_patch_size(x, (p, p))
        rows, columns = (size // p for size in padded.shape[-2:])
        time = self.t_embedder((1.0 - timesteps) * self.time_scale, x)  # it counts from noise
        time = self._with_pooled(time, kwargs.get("clip_text_pooled"))
        patches = rearrange(padded, "b c (h p) (w q) -> b (h w) (p q c)", p=p, q=p)
        img, ids = self.x_embedder(patches), self._image_ids(x, rows, columns, options)
        txt = self.cap_embedder(context)
        if self.pad_tokens_multiple is not None:
            txt = _filled(txt, self.cap_pad_token, self.pad_tokens_multiple)
            img = _filled(img, self.x_pad_token, self.pad_tokens_multiple)
            ids = functional.pad(ids, (0, 0, 0, img.shape[1] - ids.shape[1]))
        length = txt.shape[1]
        ids[:, : rows * columns, 0] = length + 1
        text_ids = torch.zeros(1, length, 3, device=x.device)
        text_ids[..., 0] = torch.arange(length, device=x.device) + 1.0
        freqs = self.rope_embedder(torch.cat([text_ids, ids], dim=1))
        mask = _text_mask(attention_mask, txt)
        for layer in self.context_refiner:
            txt = layer(txt, mask, freqs[:, :, :length], None, options)
        for number, layer in enumerate(self.noise_refiner):
            given, own = img, freqs[:, :, length:]
            img = layer(img, None, own, time, options)
            facts = {"img_input": given, "pe": own, "vec": time, "x": x, "block_index": number}
            img, txt = _patched("noise_refiner", img, txt, facts, options)
        joined = self._run_layers(torch.cat([txt, img], dim=1), length, freqs, time, x, options)
        out = self.final_layer(joined[:, length : length + rows * columns], time)
        out = rearrange(out, "b (h w) (p q c) -> b c (h p) (w q)", h=rows, p=p, q=p)
        return -out[..., :height, :width]

    def _with_pooled(self, time: Tensor, pooled: Tensor | None) -> Tensor:
        """The time ``[B, M]`` with what pooled text ``[B, P]`` adds, in networks that have it
        (NewBie); a conditioning without counts as zeros.
        """
        if self.clip_text_dim is None:
            return time
        if pooled is None:
            told = time.new_zeros(time.shape[0], self.clip_text_dim)
        else:
            told = self.clip_text_pooled_proj(pooled.to(time))
        made: Tensor = self.time_text_embed(torch.cat([time, told], dim=-1))
        return made

    def _image_ids(self, x: Tensor, rows: int, columns: int, options: Options) -> Tensor:
        """Row and column of each patch ``[1, L, 3]``; the first axis is filled in later."""
        changes = options.get("rope_options") or {}
        ids = torch.zeros(rows, columns, 3, device=x.device)
        lines = torch.arange(rows, device=x.device, dtype=torch.float32)
        places = torch.arange(columns, device=x.device, dtype=torch.float32)
        lines = lines * changes.get("scale_y", 1.0) + changes.get("shift_y", 0.0)
        places = places * changes.get("scale_x", 1.0) + changes.get("shift_x", 0.0)
        ids[..., 1], ids[..., 2] = lines[:, None], places
        return ids.reshape(1, -1, 3)

    def _run_layers(
        self,
        joined: Tensor,
        length: int,
        freqs: Tensor,
        time: Tensor,
        x: Tensor,
        options: Options,
    ) -> Tensor:
        options["total_blocks"], options["block_type"] = len(self.layers), "double"
        table = (options.get("patches_replace") or {}).get("dit") or {}
        shared = {"vec": time, "pe": freqs, "transformer_options": options}
        picture = (length, joined.shape[1])
        for number, layer in enumerate(self.layers):
            options["block_index"] = number

            def original(args: Options, layer: nn.Module = layer) -> Options:
                rest = (args["pe"], args["vec"], options, picture)
                return {**args, "img": layer(args["img"], None, *rest)}

            given, args = joined, {"img": joined, **shared}
            replacement = table.get(("double_block", number))
            if replacement is None:
                joined = original(args)["img"]
            else:
                joined = replacement(args, {"original_block": original})["img"]
            if (options.get("patches") or {}).get("double_block"):
                facts = {
                    "img_input": given[:, length:], "pe": freqs[:, :, length:], "vec": time,
                    "x": x, "block_index": number,
                }  # fmt: skip
                txt, img = joined[:, :length], joined[:, length:]
                img, txt = _patched("double_block", img, txt, facts, options)
                joined = torch.cat([txt, img], dim=1)
        return joined


def _patched(
    name: str, img: Tensor, txt: Tensor, facts: Options, options: Options
) -> tuple[Tensor, Tensor]:
    """What custom nodes make of the patches' and the text's tokens after a layer.

    A patch may change the tokens it is given in place, and need not give anything back.

    Args:
        facts: What else it is told: ``img_input`` are the patches' tokens before the layer,
            ``pe`` their rotations, ``vec`` the time, ``x`` the latent.
    """
    for patch in (options.get("patches") or {}).get(name, ()):
        told = {**facts, "img": img, "txt": txt, "block_type": name}
        made = patch({**told, "transformer_options": options})
        if isinstance(made, dict):
            img, txt = made.get("img", img), made.get("txt", txt)
    return img, txt


def _filled(x: Tensor, token: Tensor, multiple: int) -> Tensor:
    """Tokens filled at their end to a multiple."""
    missing = -x.shape[1] % multiple
    if not missing:
        return x
    return torch.cat([x, token.to(x)[None].expand(x.shape[0], missing, -1)], dim=1)


def _text_mask(mask: Tensor | None, txt: Tensor) -> Tensor | None:
    """What is added to scores of text tokens ``[B, 1, 1, L]``: the mask's numbers as they are, as
    users' pictures have it; a mask of booleans hides."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = (mask.to(txt.dtype) - 1.0) * torch.finfo(txt.dtype).max
    mask = functional.pad(mask.to(txt), (0, txt.shape[1] - mask.shape[1]))
    return mask[:, None, None]
