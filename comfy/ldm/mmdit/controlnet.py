"""A ControlNet of Stable Diffusion 3: its first blocks over the latent and a hint latent.

Source: https://huggingface.co/InstantX/SD3-Controlnet-Canny.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.mmdit.layers import TIME_WAVES, Parts, PatchEmbed
from comfy.ldm.mmdit.model import MMDiT
from comfy.nn.timesteps import timestep_embedding


class ControlNet(MMDiT):
    """Residuals for the joint blocks.

    Args:
        num_blocks: Blocks of this network; `depth` is that of the network that is controlled.
        control_latent_channels: Channels of a hint latent, if not those of the latent.
    """

    gives = frozenset({"output"})

    def __init__(
        self,
        num_blocks: int | None = None,
        control_latent_channels: int | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_blocks=num_blocks,
            final_layer=False,
            dtype=dtype,
            device=device,
            operations=operations,
            **kwargs,
        )
        parts = Parts(operations, dtype, device)
        width = self.hidden_size
        self.controlnet_blocks = nn.ModuleList(
            parts.linear(width, width) for _ in range(len(self.joint_blocks))
        )
        channels = control_latent_channels or self.in_channels
        self.pos_embed_input = PatchEmbed(self.patch_size, channels, width, parts)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        timesteps: Tensor,
        y: Tensor | None = None,
        context: Tensor | None = None,
        hint: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, list[Tensor]]:
        """Residuals "output", one for each block of the network that is controlled but the last.

        Args:
            x: Noisy latent [B, C, H, W]; timesteps [B] in 0..1000.
            y: Pooled text; it was all zeros in training.
            context: Text tokens [B, L, D].
            hint: Latent [B, C', H, W].
        """
        del kwargs
        if hint is None:
            raise ValueError("a Stable Diffusion 3 ControlNet needs a hint")
        tokens = self.x_embedder(x)
        tokens = tokens + self.cropped_pos_embed(x.shape[-2:]).to(tokens)
        tokens = tokens + self.pos_embed_input(hint)
        c = self.t_embedder(timestep_embedding(timesteps, TIME_WAVES).to(x.dtype))
        if y is not None and self.y_embedder is not None:
            c = c + self.y_embedder(torch.zeros_like(y))
        text = self.context_embedder(context)
        residuals: list[Tensor] = []
        blocks = len(self.joint_blocks)
        for number, (block, output) in enumerate(zip(self.joint_blocks, self.controlnet_blocks)):
            text, tokens = block(text, tokens, c)
            count = self.depth // blocks - (1 if number == blocks - 1 else 0)
            residuals += [output(tokens)] * count
        return {"output": residuals}
