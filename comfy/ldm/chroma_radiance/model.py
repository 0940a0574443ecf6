"""Chroma Radiance: Chroma without an autoencoder.

A convolution makes tokens of patches of pixels, the blocks are Chroma's, and in the end each token
makes its patch pixel by pixel (`layers`). Custom nodes reach in as into FLUX.
Source: https://huggingface.co/lodestones/Chroma1-Radiance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.chroma.model import Chroma
from comfy.ldm.chroma_radiance.layers import (
    NerfEmbedder,
    NerfFinalLayer,
    NerfFinalLayerConv,
    NerfGLUBlock,
)
from comfy.ldm.common_dit import pad_to_patch_size

X0_MARK = "__x0__"  # empty weights by which files tell how their network works
WIDE_MARK = "__32x32__"
OPTIONS = "chroma_radiance_options"
Options = dict[str, Any]


class ChromaRadiance(Chroma):
    """Predicts the flow of a noisy picture in -1..1 from a time 0..1 and text tokens.

    Args:
        in_channels: Colours.
        patch_size: Pixels of a patch's side.
        patch_kernel: Pixels of a patch's side that its token is made of, after the picture has been
            made so much smaller; None: all.
        nerf_hidden_size, nerf_mlp_ratio, nerf_depth, nerf_max_freqs: Sizes of the layers that work
            pixel by pixel.
        nerf_tile_size: Patches of a picture that go through them at once; 0: all.
        nerf_final_head_type: "conv" or "linear".
        nerf_embedder_dtype: Type that pixels and their places are put together in; None: as all.
        use_x0: Whether it was taught to predict the clean picture.
        **kwargs: As of Chroma.
    """

    def __init__(
        self,
        in_channels: int = 3,
        patch_size: int = 16,
        patch_kernel: int | None = None,
        nerf_hidden_size: int = 64,
        nerf_mlp_ratio: int = 4,
        nerf_depth: int = 4,
        nerf_max_freqs: int = 8,
        nerf_tile_size: int = 512,
        nerf_final_head_type: str = "conv",
        nerf_embedder_dtype: torch.dtype | None = torch.float32,
        use_x0: bool = False,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **kwargs: Any,
    ) -> None:
        heads = {"conv": NerfFinalLayerConv, "linear": NerfFinalLayer}
        kernel = patch_kernel or patch_size
        if nerf_final_head_type not in heads or patch_size % kernel:
            raise ValueError(
                f"nerf_final_head_type is one of {', '.join(heads)}, and patch_kernel divides "
                f"patch_size; got {nerf_final_head_type!r}, {kernel} and {patch_size}"
            )
        parts = {"dtype": dtype, "device": device, "operations": operations}
        channels = in_channels * patch_size**2
        own = {"in_channels": channels, "out_channels": channels, "patch_size": patch_size}
        super().__init__(**{**kwargs, **own}, **parts)
        del self.img_in, self.final_layer
        self.shrink, self.nerf_tile_size, self.use_x0 = patch_size // kernel, nerf_tile_size, use_x0
        place = {"dtype": dtype, "device": device}
        self.img_in_patch = operations.Conv2d(
            in_channels, self.hidden_size, kernel, stride=kernel, **place
        )
        self.nerf_image_embedder = NerfEmbedder(
            in_channels, nerf_hidden_size, nerf_max_freqs,
            **{**parts, "dtype": nerf_embedder_dtype or dtype},
        )  # fmt: skip
        self.nerf_blocks = nn.ModuleList(
            NerfGLUBlock(self.hidden_size, nerf_hidden_size, nerf_mlp_ratio, **parts)
            for _ in range(nerf_depth)
        )
        head = heads[nerf_final_head_type](nerf_hidden_size, in_channels, **parts)
        self._head_name = "nerf_final_layer" + "_conv" * (nerf_final_head_type == "conv")
        self.add_module(self._head_name, head)
        for mark, is_set in ((X0_MARK, use_x0), (WIDE_MARK, self.shrink > 1)):
            if is_set:  # kept, so that a saved file tells it too
                self.register_buffer(mark, torch.empty(0, **place))

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        guidance: Tensor | None = None,
        ref_latents: Sequence[Tensor] | None = None,
        control: Options | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Noisy pixels ``[B, C, H, W]`` in -1..1; other references than the text are not known."""
        del y, ref_latents
        options = {} if transformer_options is None else transformer_options
        patch = (self.patch_size, self.patch_size)
        pixels = pad_to_patch_size(x, patch)
        _, img_ids = self.process_img(pixels, transformer_options=options)
        tokens = self.forward_orig(
            pixels, img_ids, context, self._text_ids(context), timestep, None, guidance, control,
            options, attn_mask=kwargs.get("attention_mask"),
        )  # fmt: skip
        made = self._pixels_of(tokens, pixels, self._tile_size(options.get(OPTIONS) or {}))
        made = made[..., : x.shape[-2], : x.shape[-1]]
        if self.use_x0:  # x = (1 - t) clean + t noise, and the flow is noise - clean
            made = (x - made) / timestep.reshape(-1, 1, 1, 1)
        return made

    def _tokens_of(self, patches: Tensor) -> Tensor:
        """Tokens ``[B, L, D]`` of a picture of whole patches."""
        if self.shrink > 1:
            height, width = (size // self.shrink for size in patches.shape[-2:])
            patches = F.interpolate(patches, size=(height, width), mode="nearest")
        made: Tensor = self.img_in_patch(patches)
        return made.flatten(2).transpose(1, 2)

    def _output_of(self, tokens: Tensor, vec: Tensor) -> Tensor:
        """The tokens as they are: `_pixels_of` makes the picture."""
        del vec
        return tokens

    def _tile_size(self, chosen: Mapping[str, Any]) -> int:
        """Patches of a picture to take at once, by the node's choice before the network's own."""
        unknown = sorted(chosen.keys() - {"nerf_tile_size"})
        if unknown:
            raise ValueError(f"unknown options {', '.join(unknown)}; known: nerf_tile_size")
        return int(chosen.get("nerf_tile_size", self.nerf_tile_size))

    def _pixels_of(self, tokens: Tensor, pixels: Tensor, tile_size: int) -> Tensor:
        """Each patch's pixels ``[B, C, H, W]``, of its token and of the noisy ones."""
        side, (batch, count) = self.patch_size, tokens.shape[:2]
        cut = rearrange(pixels, "b c (h p) (w q) -> (b h w) (p q) c", p=side, q=side)
        hidden = tokens.flatten(0, 1)
        at_once = batch * (min(tile_size, count) or count)
        made = torch.cat(
            [self._field(*piece) for piece in zip(hidden.split(at_once), cut.split(at_once))]
        )
        rows = pixels.shape[-2] // side
        whole = rearrange(
            made, "(b h w) (p q) d -> b d (h p) (w q)", b=batch, h=rows, p=side, q=side
        )
        finished: Tensor = getattr(self, self._head_name)(whole)
        return finished

    def _field(self, hidden: Tensor, pixels: Tensor) -> Tensor:
        """Vectors of the pixels ``[N, P * P, C]`` of patches with tokens ``[N, D]``."""
        x: Tensor = self.nerf_image_embedder(pixels)
        for block in self.nerf_blocks:
            x = block(x, hidden)
        return x
