"""Flux, Flux 2 and Ovis: blocks of two streams, then blocks of one, over patches and text tokens.

Custom nodes reach in through ``transformer_options``: ``patches_replace["dit"]`` with keys
``("double_block", i)`` and ``("single_block", i)``, ``patches["post_input"]``, and ``control``
residuals for both kinds of block; ``patches["attn1_output_patch"]`` sees every attention's result
and finds the picture's tokens at ``extra_options["img_slice"]``.
Source: https://github.com/black-forest-labs/flux.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.ldm.flux.layers import (
    DoubleStreamBlock,
    EmbedND,
    LastLayer,
    MLPEmbedder,
    Modulation,
    RMSNorm,
    SingleStreamBlock,
    timestep_embedding,
)
from comfy.ldm.flux.params import FluxParams
from comfy.nn import patches
from comfy.nn.residuals import add_at
from comfy.nn.wrappers import run_wrapped

TIME_WAVES = 256
Options = dict[str, Any]


class Flux(nn.Module):
    """Predicts the flow of a noisy latent, from a time 0..1, text tokens and pooled text."""

    reads_patches = frozenset({"post_input", "dit", patches.OUTPUT})  # by blocks and network
    reads_control = frozenset({"input", "output"})

    max_period: float = 10000  # of the waves of time and guidance

    def __init__(
        self,
        image_model: str | None = None,
        final_layer: bool = True,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **kwargs: Any,
    ) -> None:
        del image_model  # names the family, not the network
        super().__init__()
        self.dtype = dtype
        names = {item.name for item in fields(FluxParams)}
        params = self.params = FluxParams(**{k: v for k, v in kwargs.items() if k in names})
        parts = {"dtype": dtype, "device": device, "operations": operations}
        place = {"dtype": dtype, "device": device}
        width, bias = params.hidden_size, params.ops_bias
        self.patch_size, self.hidden_size, self.num_heads = (
            params.patch_size,
            width,
            params.num_heads,
        )
        self.in_channels = params.in_channels * params.patch_size**2
        self.out_channels = params.out_channels
        self.pe_embedder = EmbedND(width // params.num_heads, params.theta, params.axes_dim)
        self.img_in = operations.Linear(self.in_channels, width, bias=bias, **place)
        self.time_in = MLPEmbedder(TIME_WAVES, width, bias=bias, **parts)
        self.vector_in: MLPEmbedder | None = None
        if params.vec_in_dim is not None:
            self.vector_in = MLPEmbedder(params.vec_in_dim, width, **parts)
        self.guidance_in: nn.Module = nn.Identity()
        if params.guidance_embed:
            self.guidance_in = MLPEmbedder(TIME_WAVES, width, bias=bias, **parts)
        self.txt_norm: RMSNorm | None = None
        if params.txt_norm:
            self.txt_norm = RMSNorm(params.context_in_dim, **parts)
        self.txt_in = operations.Linear(params.context_in_dim, width, bias=bias, **place)
        self._build_blocks(params, parts)
        if final_layer:
            self.final_layer = LastLayer(width, self.patch_size, self.out_channels, bias, **parts)

    def _build_blocks(self, params: FluxParams, parts: Options) -> None:
        own = not params.global_modulation
        forms = {"mlp_silu_act": params.mlp_silu_act, "yak_mlp": params.yak_mlp}
        self.double_blocks = nn.ModuleList(
            DoubleStreamBlock(
                self.hidden_size, self.num_heads, params.mlp_ratio, params.qkv_bias,
                modulation=own, proj_bias=params.ops_bias, **forms, **parts,
            )
            for _ in range(params.depth)
        )  # fmt: skip
        self.single_blocks = nn.ModuleList(
            SingleStreamBlock(
                self.hidden_size, self.num_heads, params.mlp_ratio,
                modulation=own, bias=params.ops_bias, **forms, **parts,
            )
            for _ in range(params.depth_single_blocks)
        )  # fmt: skip
        if params.global_modulation:
            shared = {"bias": False, **parts}
            self.double_stream_modulation_img = Modulation(self.hidden_size, double=True, **shared)
            self.double_stream_modulation_txt = Modulation(self.hidden_size, double=True, **shared)
            self.single_stream_modulation = Modulation(self.hidden_size, double=False, **shared)

    # -- positions and patches -------------------------------------------------------------------

    def process_img(
        self,
        x: Tensor,
        index: float = 0,
        h_offset: int = 0,
        w_offset: int = 0,
        transformer_options: Options | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Patches ``[B, L, C * p * p]`` of a latent, and their positions ``[B, L, axes]``.

        Args:
            index: Position along the first axis (0 for the picture, others for references).
            h_offset, w_offset: Where it begins, in latent cells.
            transformer_options: May hold ``rope_options``: scale_x/y and shift_x/y/t of positions.
        """
        patch = self.patch_size
        padded = pad_to_patch_size(x, (patch, patch))
        tokens = rearrange(padded, "b c (h p) (w q) -> b (h w) (c p q)", p=patch, q=patch)
        rows, columns = ((size + patch // 2) // patch for size in x.shape[-2:])
        top, left = ((offset + patch // 2) // patch for offset in (h_offset, w_offset))
        changes = (transformer_options or {}).get("rope_options") or {}
        last_row = (rows - 1.0) * changes.get("scale_y", 1.0)
        last_column = (columns - 1.0) * changes.get("scale_x", 1.0)
        top += changes.get("shift_y", 0.0)
        left += changes.get("shift_x", 0.0)
        ids = torch.zeros(
            rows, columns, len(self.params.axes_dim), device=x.device, dtype=torch.float32
        )
        ids[..., 0] = index + changes.get("shift_t", 0.0)
        lines = torch.linspace(top, last_row + top, rows, device=x.device, dtype=torch.float32)
        ids[..., 1] = lines[:, None]
        ids[..., 2] = torch.linspace(
            left, last_column + left, columns, device=x.device, dtype=torch.float32
        )
        return tokens, repeat(ids, "h w c -> b (h w) c", b=x.shape[0])

    def _text_ids(self, context: Tensor) -> Tensor:
        batch, length = context.shape[:2]
        ids = torch.zeros(
            batch, length, len(self.params.axes_dim), device=context.device, dtype=torch.float32
        )
        for axis in self.params.txt_ids_dims:
            ids[..., axis] = torch.arange(length, device=context.device, dtype=torch.float32)
        return ids

    def _references(
        self, latents: Sequence[Tensor], size: tuple[int, int], method: str
    ) -> list[tuple[Tensor, Tensor]]:
        """Patches and positions of reference latents, placed by a method.

        "index": each at an index of its own; "negative_index": likewise, below 0; "uxo"/"uno":
        beyond the picture's corner; "offset": index 1, beside one another.
        """
        placed = []
        height = width = 0
        index = 0.0
        for latent in latents:
            rows, columns = latent.shape[-2:]
            top = left = 0
            if method in ("index", "index_timestep_zero"):
                index += self.params.ref_index_scale
            elif method == "negative_index":
                index -= self.params.ref_index_scale
            elif method in ("uxo", "uno"):
                top, left = size[0] + height, size[1] + width
                height, width = height + rows, width + columns
            else:
                index = 1.0
                if rows + height > columns + width:
                    left = width
                else:
                    top = height
                height, width = max(height, rows + top), max(width, columns + left)
            placed.append(self.process_img(latent, index, top, left))
        return placed

    # -- forward ---------------------------------------------------------------------------------

    def forward(
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
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, H, W]``.
            timestep: Times ``[B]`` in 0..1.
            context, y: Text tokens ``[B, L, D]`` and pooled text ``[B, V]``.
            guidance: Distilled guidance strength ``[B]``.
            ref_latents: Pictures to look at, ``[B, C, h, w]`` each.
            control: Residuals "input" and "output" for the blocks.
            **kwargs: ``ref_latents_method``, ``attention_mask``.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, timestep, context, y, guidance, ref_latents, control, options, **kwargs,
        )  # fmt: skip

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
        options = {} if transformer_options is None else transformer_options
        height, width = x.shape[-2:]
        patch = self.patch_size
        img, img_ids = self.process_img(x, transformer_options=options)
        count = img.shape[1]
        if ref_latents:
            method = kwargs.get("ref_latents_method") or self.params.default_ref_method
            rows, columns = ((size + patch // 2) // patch for size in (height, width))
            for tokens, ids in self._references(
                ref_latents, (rows * patch, columns * patch), method
            ):
                img = torch.cat([img, tokens], dim=1)
                img_ids = torch.cat([img_ids, ids], dim=1)
        out = self.forward_orig(
            img, img_ids, context, self._text_ids(context), timestep, y, guidance, control,
            options, attn_mask=kwargs.get("attention_mask"),
        )[:, :count]  # fmt: skip
        rows = (height + patch // 2) // patch
        out = rearrange(out, "b (h w) (c p q) -> b c (h p) (w q)", h=rows, p=patch, q=patch)
        return out[..., :height, :width]

    def forward_orig(
        self,
        img: Tensor,
        img_ids: Tensor | None,
        txt: Tensor,
        txt_ids: Tensor,
        timesteps: Tensor,
        y: Tensor | None,
        guidance: Tensor | None = None,
        control: Options | None = None,
        transformer_options: Options | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """The blocks over patches and text tokens; gives patches of the output."""
        options = {} if transformer_options is None else transformer_options
        img = self._tokens_of(img)
        vec = self._vector(timesteps, guidance, y, img)
        txt = self.txt_in(txt if self.txt_norm is None else self.txt_norm(txt))
        for patch in (options.get("patches") or {}).get("post_input", ()):
            facts = {
                "img": img, "txt": txt, "img_ids": img_ids, "txt_ids": txt_ids,
                "transformer_options": options,
            }  # fmt: skip
            facts = patch(facts)
            img, txt, img_ids, txt_ids = (facts[k] for k in ("img", "txt", "img_ids", "txt_ids"))
        pe = None
        if img_ids is not None:
            pe = self.pe_embedder(torch.cat([txt_ids, img_ids], dim=1))
        shared = {"pe": pe, "attn_mask": attn_mask, "transformer_options": options}
        img, txt = self._double_stream(img, txt, vec, control, shared)
        x = self._single_stream(torch.cat([txt, img], dim=1), txt.shape[1], vec, control, shared)
        return self._output_of(x[:, txt.shape[1] :], vec)

    def _tokens_of(self, patches: Tensor) -> Tensor:
        """Tokens of the patches."""
        tokens: Tensor = self.img_in(patches)
        return tokens

    def _output_of(self, tokens: Tensor, vec: Tensor) -> Tensor:
        """What the last layer makes of the tokens."""
        made: Tensor = self.final_layer(tokens, vec)
        return made

    def _vector(
        self, times: Tensor, guidance: Tensor | None, y: Tensor | None, like: Tensor
    ) -> Tensor:
        """What modulates all blocks: time, guidance and pooled text, ``[B, D]``."""
        period = self.max_period
        vec = self.time_in(timestep_embedding(times, TIME_WAVES, period).to(like.dtype))
        if self.params.guidance_embed and guidance is not None:
            waves = timestep_embedding(guidance, TIME_WAVES, period)
            vec = vec + self.guidance_in(waves.to(like.dtype))
        width = self.params.vec_in_dim
        if self.vector_in is not None and width is not None:
            if y is None:
                y = like.new_zeros(like.shape[0], width)
            vec = vec + self.vector_in(y[:, :width])
        return vec

    def double_vectors(self, vec: Tensor) -> list[Any]:
        """What modulates each block of two streams."""
        made: Any = vec
        if self.params.global_modulation:
            made = (self.double_stream_modulation_img(vec), self.double_stream_modulation_txt(vec))
        return [made] * len(self.double_blocks)

    def single_vectors(self, vec: Tensor) -> list[Any]:
        """What modulates each block of one stream."""
        if self.params.global_modulation:
            vec = self.single_stream_modulation(vec)[0]
        return [vec] * len(self.single_blocks)

    def _double_stream(
        self, img: Tensor, txt: Tensor, vec: Any, control: Options | None, shared: Options
    ) -> tuple[Tensor, Tensor]:
        options = shared["transformer_options"]
        options["total_blocks"], options["block_type"] = len(self.double_blocks), "double"
        vectors = self.double_vectors(vec)
        residuals = (control or {}).get("input") or ()
        for number, block in enumerate(self.double_blocks):
            options["block_index"] = number

            def original(args: Options, block: nn.Module = block) -> Options:
                out_img, out_txt = block(**args)
                return {"img": out_img, "txt": out_txt}

            args = {"img": img, "txt": txt, "vec": vectors[number], **shared}
            out = replaceable(options, ("double_block", number), args, original)
            img, txt = out["img"], out["txt"]
            if number < len(residuals) and residuals[number] is not None:
                img = add_at(img, residuals[number], 0, "input")
        return img, txt

    def _single_stream(
        self, x: Tensor, text_length: int, vec: Any, control: Options | None, shared: Options
    ) -> Tensor:
        options = shared["transformer_options"]
        options["total_blocks"], options["block_type"] = len(self.single_blocks), "single"
        options["img_slice"] = [text_length, x.shape[1]]
        vectors = self.single_vectors(vec)
        residuals = (control or {}).get("output") or ()
        for number, block in enumerate(self.single_blocks):
            options["block_index"] = number

            def original(args: Options, block: nn.Module = block) -> Options:
                rest = {name: value for name, value in args.items() if name != "img"}
                return {"img": block(args["img"], **rest)}

            args = {"img": x, "vec": vectors[number], **shared}
            x = replaceable(options, ("single_block", number), args, original)["img"]
            if number < len(residuals) and residuals[number] is not None:
                x = add_at(x, residuals[number], text_length, "output")
        return x


def replaceable(
    options: Options, key: tuple[str, int], args: Options, original: Callable[[Options], Options]
) -> Options:
    """Run a block, or what a custom node put in its place."""
    table = (options.get("patches_replace") or {}).get("dit") or {}
    if key not in table:
        return original(args)
    return table[key](args, {"original_block": original})
