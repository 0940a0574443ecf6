"""A ControlNet of FLUX.1: some of its blocks over the latent and a hint.

Its residuals are spread over the blocks of the whole network.
Source: https://github.com/XLabs-AI/x-flux; union networks:
https://huggingface.co/InstantX/FLUX.1-dev-Controlnet-Union.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.ldm.flux.model import Flux

MAIN_DOUBLE, MAIN_SINGLE = 19, 38  # blocks of the network that is controlled
HINT_CHANNELS, HINT_STRIDES = 16, (1, 1, 2, 1, 2, 1, 2)
# Size and stride of the convolutions of MistoLine.
MISTOLINE_LAYERS = ((3, 1), (1, 1), (3, 1), (3, 2), (3, 1), (3, 2), (3, 1), (3, 2), (1, 1), (3, 1))


class MistolineCondition(nn.Module):
    """Convolutions from a picture to as many cells as the latent has, of MistoLine."""

    def __init__(self, operations: Any, place: dict[str, Any]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for size, stride in MISTOLINE_LAYERS:
            layers.append(
                operations.Conv2d(
                    channels, HINT_CHANNELS, size, stride=stride, padding=size // 2, **place
                )
            )
            layers.append(nn.SiLU())
            channels = HINT_CHANNELS
        self.encoder = nn.Sequential(*layers[:-1])

    def forward(self, picture: Tensor) -> Tensor:
        return self.encoder(picture)


class MistolineOutput(nn.Module):
    """A residual of MistoLine: a linear layer and SiLU."""

    def __init__(self, width: int, operations: Any, place: dict[str, Any]) -> None:
        super().__init__()
        self.linear = operations.Linear(width, width, **place)

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.linear(x))


class ControlNetFlux(Flux):
    """Residuals for both kinds of block.

    Args:
        latent_input: The hint is a latent; otherwise it is a picture at eight times its size.
        num_union_modes: Kinds of hint that one network knows; 0 for a network with one kind.
        control_latent_channels: Channels of a hint latent, if not those of the latent.
        mistoline: The form of MistoLine, which takes the picture as it is.
    """

    def __init__(
        self,
        latent_input: bool = False,
        num_union_modes: int = 0,
        control_latent_channels: int | None = None,
        mistoline: bool = False,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            final_layer=False, dtype=dtype, device=device, operations=operations, **kwargs
        )
        place = {"dtype": dtype, "device": device}
        width = self.hidden_size

        def output() -> nn.Module:
            if mistoline:
                return MistolineOutput(width, operations, place)
            return operations.Linear(width, width, **place)

        def outputs(count: int) -> nn.ModuleList:
            return nn.ModuleList(output() for _ in range(count))

        self.controlnet_blocks = outputs(self.params.depth)
        self.controlnet_single_blocks = outputs(self.params.depth_single_blocks)
        self.controlnet_mode_embedder: nn.Module | None = None
        self.hint_channels = 3  # of pictures; of those without a VAE before the network
        self.gives = frozenset({"input", "output"})
        self.union_kinds = num_union_modes
        if num_union_modes > 0:
            self.controlnet_mode_embedder = operations.Embedding(num_union_modes, width, **place)
        self.latent_input = latent_input
        patch = self.patch_size**2
        channels = self.in_channels
        if control_latent_channels is not None:
            channels = control_latent_channels * patch
        self.pos_embed_input = operations.Linear(channels, width, **place)
        self.mistoline = mistoline
        if mistoline:
            self.input_cond_block = MistolineCondition(operations, place)
        elif not latent_input:
            self.input_hint_block = self._hint_block(operations, place)

    @staticmethod
    def _hint_block(operations: Any, place: dict[str, Any]) -> nn.Sequential:
        """Convolutions from a picture to as many cells as the latent has."""
        layers: list[nn.Module] = []
        channels = 3
        for stride in HINT_STRIDES:
            layers.append(
                operations.Conv2d(channels, HINT_CHANNELS, 3, stride=stride, padding=1, **place)
            )
            layers.append(nn.SiLU())
            channels = HINT_CHANNELS
        layers.append(operations.Conv2d(channels, HINT_CHANNELS, 3, padding=1, **place))
        return nn.Sequential(*layers)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        guidance: Tensor | None = None,
        hint: Tensor | None = None,
        control_type: Sequence[int] = (),
        **kwargs: Any,
    ) -> dict[str, tuple[Tensor, ...]]:
        """Residuals "input" and "output" for the double and single blocks.

        Args:
            x: Noisy latent [B, C, H, W]; timesteps [B] in 0..1.
            context, y, guidance: As the network that is controlled takes them.
            hint: A latent [B, C', H, W] or a picture [B, 3, 8 H, 8 W] in 0..1.
            control_type: Numbers of the kinds of hint, for a union network.
        """
        del kwargs
        if hint is None:
            raise ValueError("a FLUX ControlNet needs a hint")
        if self.mistoline:
            hint = self.input_cond_block(hint)
        elif not self.latent_input:
            hint = self.input_hint_block(hint * 2.0 - 1.0)
        p = self.patch_size
        tokens = rearrange(
            pad_to_patch_size(hint, (p, p)), "b c (h p) (w q) -> b (h w) (c p q)", p=p, q=p
        )
        img, img_ids = self.process_img(x)
        img = self.img_in(img) + self.pos_embed_input(tokens)
        vec = self._vector(timesteps, guidance, y, img)
        txt, txt_ids = self._text(context, control_type)
        pe = self.pe_embedder(torch.cat([txt_ids, img_ids], dim=1))
        double: list[Tensor] = []
        for block, output in zip(self.double_blocks, self.controlnet_blocks):
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe)
            double.append(output(img))
        joined, length = torch.cat([txt, img], dim=1), txt.shape[1]
        single: list[Tensor] = []
        for block, output in zip(self.single_blocks, self.controlnet_single_blocks):
            joined = block(joined, vec=vec, pe=pe)
            single.append(output(joined[:, length:]))
        residuals = {"input": self._spread(double, MAIN_DOUBLE)}
        if single:
            residuals["output"] = self._spread(single, MAIN_SINGLE)
        return residuals

    def _text(self, context: Tensor, control_type: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Text tokens and positions; a token for each kind of hint stands before them."""
        txt, ids = self.txt_in(context), self._text_ids(context)
        if self.controlnet_mode_embedder is None or not control_type:
            return txt, ids
        kinds = torch.tensor(list(control_type), device=txt.device)
        told = self.controlnet_mode_embedder(kinds).to(txt.dtype)
        told = told.unsqueeze(0).expand(txt.shape[0], -1, -1)
        return torch.cat([told, txt], dim=1), torch.cat([ids[:, : told.shape[1]], ids], dim=1)

    def _spread(self, residuals: list[Tensor], blocks: int) -> tuple[Tensor, ...]:
        """One residual for each block: neighbours share one, or the few are gone through again."""
        repeats = math.ceil(blocks / len(residuals))
        if self.latent_input:
            spread = [one for one in residuals for _ in range(repeats)]
        else:
            spread = residuals * repeats
        return tuple(spread[:blocks])
