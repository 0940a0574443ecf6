"""The control network of Hunyuan-DiT: its first half, which sees a hint beside the latent.

Source: Li et al. 2024, https://arxiv.org/abs/2405.08748, appendix.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from comfy import ops
from comfy.ldm.hydit.models import HunYuanDiT, Texts


class HunYuanControlNet(HunYuanDiT):
    """Residuals for the tokens that later layers of the network are given.

    Args:
        depth: Layers, all of the first half but the last.
        kwargs: As the network has them.
    """

    is_whole = False
    reads_patches: frozenset[str] = frozenset()

    def __init__(
        self,
        depth: int = 19,
        hidden_size: int = 1408,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **kwargs: Any,
    ) -> None:
        place = {"dtype": dtype, "device": device}
        super().__init__(
            depth=depth, hidden_size=hidden_size, operations=operations, **place, **kwargs
        )
        del self.final_layer

        def linear() -> nn.Module:
            return operations.Linear(hidden_size, hidden_size, **place)

        self.before_proj = linear()
        self.after_proj_list = nn.ModuleList(linear() for _ in range(depth))

    def forward(  # type: ignore[override] # it is called as control networks are
        self,
        x: Tensor,
        hint: Tensor,
        timesteps: Tensor,
        context: Tensor,
        text_embedding_mask: Tensor | None = None,
        encoder_hidden_states_t5: Tensor | None = None,
        text_embedding_mask_t5: Tensor | None = None,
        image_meta_size: Tensor | None = None,
        style: Tensor | None = None,
        **_: Any,
    ) -> dict[str, list[Tensor]]:
        """``{"output": [...]}``, one residual ``[B, L, D]`` for each layer, from the first on.

        Args:
            hint: Latent of the hint ``[B, C, H, W]``; the others are the network's.
        """
        given = Texts(
            context, text_embedding_mask, encoder_hidden_states_t5, text_embedding_mask_t5
        )
        tokens, angles = self.embed(x)
        vec, text = self.read(timesteps, given, (image_meta_size, style), tokens)
        tokens = tokens + self.before_proj(self.embed(hint)[0])
        residuals = []
        for block, project in zip(self.blocks, self.after_proj_list):
            tokens = block(tokens, vec, text, angles, None, {})
            residuals.append(project(tokens))
        return {"output": residuals}
