"""The ControlNets of Stable Diffusion 3.5 large: a stream of the picture alone, without text.

Two forms were trained. In one, blocks follow each other, over positions in waves; it embeds latents
as the controlled network does. In the other ("8b") all blocks see the same input, and the pooled
text is embedded by the controlled network first.
Source: https://github.com/Stability-AI/sd3.5.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from comfy import ops
from comfy.ldm.mmdit.layers import (
    HEAD_SIZE,
    TIME_WAVES,
    DismantledBlock,
    Embedder,
    Parts,
    PatchEmbed,
)
from comfy.ldm.mmdit.model import MMDiT
from comfy.nn import attention
from comfy.nn.timesteps import timestep_embedding
from comfy.ops.encoded import decoded_tensor

POOLED_TEXT = 2048
POSITION_CENTRE, POSITION_REACH = 7.5, 7.5  # of the shorter side; the longer reaches further
WAVE_PERIOD = 10000.0


def position_waves(width: int, rows: int, columns: int, device: Any = None) -> Tensor:
    """Sine and cosine of column, then of row, of every patch: ``[rows * columns, width]``."""
    shorter = min(rows, columns)

    def places(count: int) -> Tensor:
        reach = count / shorter * POSITION_REACH
        start, end = POSITION_CENTRE - reach, POSITION_CENTRE + reach
        return torch.linspace(start, end, count, device=device)

    quarter = width // 4
    powers = torch.arange(quarter, device=device, dtype=torch.float32) / quarter
    frequencies = WAVE_PERIOD**-powers

    def waves(position: Tensor) -> Tensor:
        angles = position.flatten()[:, None] * frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    row, column = torch.meshgrid(places(rows), places(columns), indexing="ij")
    return torch.cat([waves(column), waves(row)], dim=1)


class StreamBlock(DismantledBlock):
    """A layer over the one stream."""

    compiles_alone = True

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        mods, (q, k, v), normed = self.before(x, c)
        attended = attention.optimized_attention(q, k, v, self.attn.heads)
        return self.after(x, attended, mods, normed)


class ControlNetEmbedder(nn.Module):
    """Residuals for the joint blocks.

    Args:
        in_channels: Channels of latent and hint.
        hidden_size: Width; a head has 64 channels.
        num_layers: Blocks of this network; `main_model_double` is those of the controlled one.
        double_y_emb: The form in which all blocks see the same input.
        pooled_size: Channels of the pooled text.
    """

    gives = frozenset({"output"})

    def __init__(
        self,
        hidden_size: int,
        num_layers: int,
        main_model_double: int,
        double_y_emb: bool = False,
        in_channels: int = 16,
        patch_size: int = 2,
        pooled_size: int = POOLED_TEXT,
        mlp_ratio: float = 4.0,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        parts = Parts(operations, dtype, device)
        self.dtype, self.hidden_size, self.patch_size = dtype, hidden_size, patch_size
        self.main_model_double, self.double_y_emb = main_model_double, double_y_emb
        self.taken: dict[str, Tensor] = {}
        self.x_embedder = PatchEmbed(patch_size, in_channels, hidden_size, parts)
        self.t_embedder = Embedder(TIME_WAVES, hidden_size, parts)
        text_size = hidden_size if double_y_emb else pooled_size
        self.y_embedder = Embedder(text_size, hidden_size, parts)
        if double_y_emb:
            self.orig_y_embedder = Embedder(pooled_size, hidden_size, parts)
        heads = hidden_size // HEAD_SIZE
        self.transformer_blocks = nn.ModuleList(
            StreamBlock(hidden_size, heads, mlp_ratio, None, parts) for _ in range(num_layers)
        )
        self.controlnet_blocks = nn.ModuleList(
            parts.linear(hidden_size, hidden_size) for _ in range(num_layers)
        )
        self.pos_embed_input = PatchEmbed(patch_size, in_channels, hidden_size, parts)

    def borrowed(self) -> str:
        """Name of the embedder whose weights are those of the controlled network."""
        return "y_embedder" if self.double_y_emb else "x_embedder"

    def borrow(self, model: MMDiT) -> None:
        """Take that embedder's weights from the controlled network, until `give_back`.

        Raises:
            ValueError: It is a network of another size or kind.
        """
        theirs = getattr(model, self.borrowed(), None)
        ours = self.orig_y_embedder if self.double_y_emb else self.x_embedder
        taken = {}
        for key, weight in ours.state_dict().items():
            given = None if theirs is None else decoded_tensor(theirs, key)
            if given is None or given.shape != weight.shape:
                found = "none" if given is None else tuple(given.shape)
                raise ValueError(
                    f"this ControlNet belongs to Stable Diffusion 3.5 large: it needs "
                    f"{self.borrowed()}.{key} of shape {tuple(weight.shape)} in the model, found "
                    f"{found}; use it with that model"
                )
            taken[key] = given.to(weight, copy=True)
        self.taken = taken

    def give_back(self) -> None:
        """Forget what was borrowed."""
        self.taken = {}

    def _borrowing(self, embedder: nn.Module, x: Tensor) -> Tensor:
        """An embedder's answer with the borrowed weights, if there are any."""
        return functional_call(embedder, self.taken, (x,)) if self.taken else embedder(x)

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        y: Tensor | None = None,
        context: Tensor | None = None,
        hint: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, list[Tensor]]:
        """Residuals "output", one for each block of the controlled network.

        Args:
            x: Noisy latent [B, C, H, W]; timesteps [B] in 0..1000.
            y: Pooled text [B, V].
            context: Not used; there is no text stream.
            hint: Latent [B, C, H, W].
        """
        del context, kwargs
        if hint is None:
            raise ValueError("a Stable Diffusion 3.5 ControlNet needs a hint")
        rows, columns = ((size + 1) // self.patch_size for size in x.shape[-2:])
        tokens = self.x_embedder(x) if self.double_y_emb else self._borrowing(self.x_embedder, x)
        if not self.double_y_emb:
            positions = position_waves(self.hidden_size, rows, columns, tokens.device)
            tokens = tokens + positions.to(tokens)
        c = self.t_embedder(timestep_embedding(timesteps, TIME_WAVES).to(x.dtype))
        if y is not None:
            seen = self._borrowing(self.orig_y_embedder, y) if self.double_y_emb else y
            c = c + self.y_embedder(seen)
        tokens = tokens + self.pos_embed_input(hint)
        repeats = math.ceil(self.main_model_double / len(self.transformer_blocks))
        residuals: list[Tensor] = []
        for block, output in zip(self.transformer_blocks, self.controlnet_blocks):
            out = block(tokens, c)
            if not self.double_y_emb:
                tokens = out
            residuals += [output(out)] * repeats
        return {"output": residuals}
