"""MMDiT: picture patches and text tokens with weights of their own, attending to each other.

Keys follow the published files: ``x_embedder``, ``pos_embed``, ``joint_blocks.N.x_block`` and
``.context_block``, ``final_layer``.
Source: Esser et al. 2024, https://arxiv.org/abs/2403.03206.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.mmdit.layers import (
    HEAD_SIZE,
    TIME_WAVES,
    Embedder,
    FinalLayer,
    JointBlock,
    Options,
    Parts,
    PatchEmbed,
)
from comfy.nn import patches
from comfy.nn.residuals import check_residual
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped


class MMDiT(nn.Module):
    """Predicts the flow of a noisy latent from a time 0..1000, text tokens and pooled text."""

    reads_patches = frozenset({"dit", patches.OUTPUT})  # those of custom nodes that are looked at
    reads_control = frozenset({"output"})
    pos_embed: Tensor

    def __init__(
        self,
        in_channels: int = 16,
        out_channels: int | None = None,
        depth: int = 24,
        patch_size: int = 2,
        mlp_ratio: float = 4.0,
        num_blocks: int | None = None,
        adm_in_channels: int | None = None,
        context_embedder_config: Mapping[str, Any] | None = None,
        pos_embed_max_size: int | None = None,
        num_patches: int | None = None,
        qk_norm: str | None = None,
        x_block_self_attn_layers: Sequence[int] = (),
        final_layer: bool = True,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        parts = Parts(operations, dtype, device)
        width = HEAD_SIZE * depth
        blocks = depth if num_blocks is None else num_blocks
        self.dtype, self.depth, self.hidden_size, self.num_heads = dtype, depth, width, depth
        self.in_channels, self.out_channels = in_channels, out_channels or in_channels
        self.patch_size, self.pos_embed_max_size = patch_size, pos_embed_max_size
        self.x_embedder = PatchEmbed(patch_size, in_channels, width, parts)
        self.t_embedder = Embedder(TIME_WAVES, width, parts)
        self.y_embedder: Embedder | None = None
        if adm_in_channels is not None:
            self.y_embedder = Embedder(adm_in_channels, width, parts)
        self.context_embedder: nn.Module = nn.Identity()
        if context_embedder_config is not None:
            sizes = context_embedder_config["params"]
            self.context_embedder = parts.linear(sizes["in_features"], sizes["out_features"])
        if num_patches is not None:
            empty = torch.empty(1, num_patches, width, dtype=dtype, device=device)
            self.register_buffer("pos_embed", empty)
        self.joint_blocks = nn.ModuleList(
            JointBlock(
                width,
                self.num_heads,
                mlp_ratio,
                qk_norm,
                parts,
                pre_only=number == blocks - 1 and final_layer,
                x_block_self_attn=number in x_block_self_attn_layers,
            )
            for number in range(blocks)
        )
        if final_layer:
            self.final_layer = FinalLayer(width, patch_size, self.out_channels, parts)

    def cropped_pos_embed(self, hw: Sequence[int]) -> Tensor:
        """Position embeddings of a latent's patches, from the middle of the square there is.

        Raises ValueError for a latent larger than the square.
        """
        rows, columns = ((size + self.patch_size - 1) // self.patch_size for size in hw)
        side = self.pos_embed_max_size or round(self.pos_embed.shape[1] ** 0.5)
        if rows > side or columns > side:
            raise ValueError(f"{rows} x {columns} patches, but this network has {side} x {side}")
        top, left = (side - rows) // 2, (side - columns) // 2
        square = self.pos_embed.unflatten(1, (side, side))
        return square[:, top : top + rows, left : left + columns].flatten(1, 2)

    def unpatchify(self, x: Tensor, hw: Sequence[int]) -> Tensor:
        """Patches ``[B, L, p * p * C]`` as a latent ``[B, C, H, W]``."""
        p = self.patch_size
        rows, columns = ((size + p - 1) // p for size in hw)
        latent = rearrange(x, "b (h w) (p q c) -> b c (h p) (w q)", h=rows, w=columns, p=p, q=p)
        return latent[..., : hw[0], : hw[1]]

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor | None = None,
        context: Tensor | None = None,
        control: Options | None = None,
        transformer_options: Options | None = None,
    ) -> Tensor:
        """Apply to ``x [B, C, H, W]``; ``t [B]``, ``context [B, L, D]``, ``y [B, A]``."""
        options = {} if transformer_options is None else transformer_options
        hw = x.shape[-2:]
        dtype = x.dtype
        x = self.x_embedder(x)
        x = x + self.cropped_pos_embed(hw).to(x)
        c = self.t_embedder(timestep_embedding(t, TIME_WAVES).to(dtype))
        if y is not None and self.y_embedder is not None:
            c = c + self.y_embedder(y)
        tokens = self.context_embedder(context)
        residuals = (control or {}).get("output") or ()
        table = (options.get("patches_replace") or {}).get("dit") or {}
        options["total_blocks"] = len(self.joint_blocks)
        for number, block in enumerate(self.joint_blocks):
            options["block_index"] = number
            tokens, x = _run_block(
                block, tokens, x, c, options, table.get(("double_block", number))
            )
            if number < len(residuals) and residuals[number] is not None:
                check_residual(x, residuals[number], "output")
                x = (x + residuals[number]).to(x.dtype)
        return self.unpatchify(self.final_layer(x, c), hw)


def _run_block(
    block: nn.Module,
    tokens: Tensor,
    x: Tensor,
    c: Tensor,
    options: Options,
    replacement: Callable[..., Options] | None,
) -> tuple[Tensor | None, Tensor]:
    """One block, or what a custom node put in its place."""
    if replacement is None:
        return block(tokens, x, c, transformer_options=options)

    def original(args: Options) -> Options:
        txt, img = block(
            args["txt"], args["img"], args["vec"],
            transformer_options=args.get("transformer_options"),
        )  # fmt: skip
        return {"txt": txt, "img": img}

    args = {"img": x, "txt": tokens, "vec": c, "transformer_options": options}
    out = replacement(args, {"original_block": original})
    return out["txt"], out["img"]


class OpenAISignatureMMDITWrapper(MMDiT):
    """MMDiT with the arguments in the order all diffusion networks take them."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor | None = None,
        y: Tensor | None = None,
        control: Options | None = None,
        transformer_options: Options | None = None,
        **_: Any,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            super().forward, self, "diffusion_model", options,
            x, timesteps, y, context, control, options,
        )  # fmt: skip
