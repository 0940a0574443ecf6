"""Qwen-Image: a transformer with two streams, text and patches, over 16-channel latents.

Custom nodes reach in through ``transformer_options``: ``patches_replace["dit"]`` with keys
``("double_block", i)``, ``patches["double_block"]``, ``patches["post_input"]`` and ``control``
residuals; ``patches["attn1_output_patch"]`` sees every attention's result and finds the picture's
tokens at ``extra_options["img_slice"]``.
Source: https://github.com/QwenLM/Qwen-Image, https://arxiv.org/abs/2508.02324.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.common_dit import RMSNorm, pad_to_patch_size
from comfy.ldm.flux.layers import EmbedND
from comfy.ldm.qwen_image.layers import (  # noqa: F401 - packs look here for the layers
    GELU,
    FeedForward,
    JointAttention,
    LastLayer,
    Options,
    QwenTimestepProjEmbeddings,
    TransformerBlock,
    apply_rotary_emb,
)
from comfy.nn import patches
from comfy.nn.residuals import add_at
from comfy.nn.wrappers import run_wrapped

THETA = 10000


class QwenImageTransformer2DModel(nn.Module):
    """Predicts the flow of a noisy latent from a time 0..1 and text tokens.

    Args:
        in_channels, out_channels: Channels of a patch that enters, and of a latent that leaves.
        joint_attention_dim: Width of the text tokens.
        axes_dims_rope: Channels of a head for index, row and column.
        default_ref_method: How reference latents are placed when nobody says.
        use_additional_t_cond: Whether the network is told kinds of picture (layered).
        final_layer: Whether there is an output (control networks have none).
    """

    reads_patches = frozenset({"post_input", "double_block", "dit", patches.OUTPUT})
    reads_control = frozenset({"input"})

    def __init__(
        self,
        patch_size: int = 2,
        in_channels: int = 64,
        out_channels: int = 16,
        num_layers: int = 60,
        attention_head_dim: int = 128,
        num_attention_heads: int = 24,
        joint_attention_dim: int = 3584,
        axes_dims_rope: Sequence[int] = (16, 56, 56),
        default_ref_method: str = "index",
        use_additional_t_cond: bool = False,
        final_layer: bool = True,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        if sum(axes_dims_rope) != attention_head_dim:
            raise ValueError(
                f"axes_dims_rope {list(axes_dims_rope)} does not add up to the head size "
                f"{attention_head_dim}"
            )
        place = {"dtype": dtype, "device": device}
        parts = {"operations": operations, **place}
        dim = num_attention_heads * attention_head_dim
        self.dtype, self.patch_size, self.inner_dim = dtype, patch_size, dim
        self.in_channels, self.out_channels = in_channels, out_channels
        self.default_ref_method = default_ref_method
        self.pe_embedder = EmbedND(attention_head_dim, THETA, list(axes_dims_rope))
        self.time_text_embed = QwenTimestepProjEmbeddings(
            dim, use_additional_t_cond=use_additional_t_cond, **parts
        )
        self.txt_norm = RMSNorm(joint_attention_dim, **place)
        self.img_in = operations.Linear(in_channels, dim, **place)
        self.txt_in = operations.Linear(joint_attention_dim, dim, **place)
        self.transformer_blocks = nn.ModuleList(
            TransformerBlock(dim, num_attention_heads, attention_head_dim, **parts)
            for _ in range(num_layers)
        )
        if final_layer:
            self.norm_out = LastLayer(dim, dim, **parts)
            self.proj_out = operations.Linear(dim, patch_size**2 * out_channels, **place)

    # -- positions and patches -------------------------------------------------------------------

    def process_img(
        self, x: Tensor, index: float = 0, h_offset: int = 0, w_offset: int = 0
    ) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Patches ``[B, L, C * p * p]`` of a latent ``[B, C, T, H, W]``, their positions and the
        padded shape.

        Rows and columns are counted from the middle.
        """
        p = self.patch_size
        padded = pad_to_patch_size(x, (1, p, p))
        tokens = rearrange(padded, "b c t (h p) (w q) -> b (t h w) (c p q)", p=p, q=p)
        rows, columns = ((size + p // 2) // p for size in x.shape[-2:])
        top, left = ((offset + p // 2) // p for offset in (h_offset, w_offset))
        frames = x.shape[2]
        ids = torch.zeros(frames, rows, columns, 3, device=x.device)
        steps = torch.arange(frames, device=x.device, dtype=torch.float32)
        ids[..., 0] = (steps if frames > 1 else 0 * steps)[:, None, None] + index
        ids[..., 1] = (torch.arange(rows, device=x.device) + top - rows // 2)[:, None].float()
        ids[..., 2] = (torch.arange(columns, device=x.device) + left - columns // 2).float()
        return tokens, repeat(ids, "t h w c -> b (t h w) c", b=x.shape[0]), tuple(padded.shape)

    def _references(
        self, latents: Sequence[Tensor], x: Tensor, method: str
    ) -> list[tuple[Tensor, Tensor]]:
        """Patches and positions of reference latents, placed by a method.

        "index": each at an index of its own; "negative_index": likewise, below 0; otherwise beside
        one another at index 1.
        """
        placed = []
        height = width = 0
        index = 0.0
        for latent in latents:
            rows, columns = latent.shape[-2:]
            top = left = 0
            if method in ("index", "index_timestep_zero"):
                index += 1
            elif method == "negative_index":
                index -= 1
            else:
                index = 1
                if rows + height > columns + width:
                    left = width
                else:
                    top = height
                height, width = max(height, rows + top), max(width, columns + left)
            seen = latent if latent.ndim == 5 else latent[:, :, None]
            tokens, ids, _ = self.process_img(seen, index, top, left)
            placed.append((tokens.expand(x.shape[0], -1, -1), ids.expand(x.shape[0], -1, -1)))
        return placed

    def _text_ids(self, context: Tensor, rows: int, columns: int) -> Tensor:
        """Text comes after the picture on all axes."""
        p = self.patch_size
        start = round(max((rows + p // 2) // p // 2, (columns + p // 2) // p // 2))
        length = context.shape[1]
        places = torch.arange(start, start + length, device=context.device, dtype=torch.float32)
        return places.reshape(1, -1, 1).expand(context.shape[0], -1, 3)

    # -- forward ---------------------------------------------------------------------------------

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        attention_mask: Tensor | None = None,
        ref_latents: Sequence[Tensor] | None = None,
        additional_t_cond: Tensor | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, T, H, W]``.
            timestep: Times ``[B]`` in 0..1.
            context: Text tokens ``[B, L, D]``.
            attention_mask: Has no effect: texts come without padding, as the incumbent has it.
            ref_latents: Pictures to look at, ``[B, C, 1, h, w]`` each.
            additional_t_cond: Kind of picture ``[B]``.
            **kwargs: ``ref_latents_method``, ``control`` residuals "input".
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, timestep, context, attention_mask, ref_latents, additional_t_cond, options,
            **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        attention_mask: Tensor | None = None,
        ref_latents: Sequence[Tensor] | None = None,
        additional_t_cond: Tensor | None = None,
        transformer_options: Options | None = None,
        control: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        del attention_mask
        options = {} if transformer_options is None else transformer_options
        img, ids, shape = self.process_img(x)
        count, zero_index = img.shape[1], None
        if ref_latents:
            method = kwargs.get("ref_latents_method") or self.default_ref_method
            for tokens, places in self._references(ref_latents, x, method):
                img, ids = torch.cat([img, tokens], dim=1), torch.cat([ids, places], dim=1)
            if method == "index_timestep_zero":  # references are pictures without noise
                timestep, zero_index = torch.cat([timestep, timestep * 0]), count
        text_ids = self._text_ids(context, x.shape[-2], x.shape[-1])
        img, txt = self.img_in(img), self.txt_in(self.txt_norm(context))
        for patch in (options.get("patches") or {}).get("post_input", ()):
            facts = {"img": img, "txt": txt, "img_ids": ids, "txt_ids": text_ids}
            facts = patch({**facts, "transformer_options": options})
            img, txt, ids, text_ids = (facts[k] for k in ("img", "txt", "img_ids", "txt_ids"))
        freqs = self.pe_embedder(torch.cat([text_ids, ids], dim=1))
        temb = self.time_text_embed(timestep, img, additional_t_cond)
        shared = {
            "temb": temb,
            "freqs": freqs,
            "mask": None,
            "timestep_zero_index": zero_index,
            "transformer_options": options,
        }
        img = self._run_blocks(img, txt, x, shared, control)
        temb = temb if zero_index is None else temb.chunk(2)[0]
        out = self.proj_out(self.norm_out(img[:, :count], temb))
        p = self.patch_size
        out = rearrange(
            out, "b (t h w) (c p q) -> b c t (h p) (w q)",
            t=shape[2], h=shape[3] // p, w=shape[4] // p, p=p, q=p,
        )  # fmt: skip
        return out[:, :, :, : x.shape[-2], : x.shape[-1]]

    def _run_blocks(
        self, img: Tensor, txt: Tensor, x: Tensor, shared: Options, control: Options | None
    ) -> Tensor:
        options = shared["transformer_options"]
        options["total_blocks"], options["block_type"] = len(self.transformer_blocks), "double"
        table = (options.get("patches_replace") or {}).get("dit") or {}
        after = (options.get("patches") or {}).get("double_block", ())
        residuals = (control or {}).get("input") or ()
        for number, block in enumerate(self.transformer_blocks):
            options["block_index"] = number
            replacement = table.get(("double_block", number))
            img, txt = _run_block(block, img, txt, shared, replacement)
            for patch in after:
                facts = {"img": img, "txt": txt, "x": x, "block_index": number}
                changed = patch({**facts, "transformer_options": options})
                img, txt = changed["img"], changed["txt"]
            if number < len(residuals) and residuals[number] is not None:
                img = add_at(img, residuals[number], 0, "input")
        return img


def _run_block(
    block: nn.Module, img: Tensor, txt: Tensor, shared: Options, replacement: Any
) -> tuple[Tensor, Tensor]:
    """One block, or what a custom node put in its place."""
    if replacement is None:
        return block(img, txt, **shared)

    def original(args: Options) -> Options:
        changed = {**shared, "temb": args["vec"], "freqs": args["pe"]}
        out_img, out_txt = block(args["img"], args["txt"], **changed)
        return {"img": out_img, "txt": out_txt}

    args = {"img": img, "txt": txt, "vec": shared["temb"], "pe": shared["freqs"]}
    args["transformer_options"] = shared["transformer_options"]
    out = replacement(args, {"original_block": original})
    return out["img"], out["txt"]
