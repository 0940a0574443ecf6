"""A transformer over the cells of a video, as both generations of Cosmos build it.

Custom nodes reach in through ``transformer_options``: ``patches["attn1_output_patch"]`` and
``patches["attn2_output_patch"]`` see the attention of the video with itself and with the text,
``patches_replace["dit"]`` has keys ``("double_block", i)`` with the video's tokens ``[B, L, D]``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from comfy.ldm.common_dit import pad_to_patch_size
from comfy.ldm.cosmos.layers import PatchEmbed, mask_like, position_angles
from comfy.nn import patches
from comfy.nn.config import NetworkConfig
from comfy.nn.wrappers import run_wrapped

Options = dict[str, Any]


@dataclass(frozen=True)
class CosmosConfig(NetworkConfig):
    """Sizes of a network.

    Attributes:
        in_channels: Of a latent, without the mask of padding that the network adds.
        crossattn_emb_channels: Width of the text tokens.
        adaln_lora_dim: Channels between a time and the changes of a layer.
        rope_h_extrapolation_ratio, rope_w_extrapolation_ratio, rope_t_extrapolation_ratio: How far
            positions are spread past those of the first training.
        max_img_h, max_img_w, max_frames: Largest latent there are learned places for.
        extra_per_block_abs_pos_emb: Whether layers add learned places.
    """

    model_channels: int
    num_heads: int
    in_channels: int = 16
    out_channels: int = 16
    patch_spatial: int = 2
    patch_temporal: int = 1
    concat_padding_mask: bool = True
    num_blocks: int = 28
    mlp_ratio: float = 4.0
    crossattn_emb_channels: int = 1024
    use_adaln_lora: bool = True
    adaln_lora_dim: int = 256
    rope_h_extrapolation_ratio: float = 1.0
    rope_w_extrapolation_ratio: float = 1.0
    rope_t_extrapolation_ratio: float = 1.0
    max_img_h: int = 240
    max_img_w: int = 240
    max_frames: int = 128
    extra_per_block_abs_pos_emb: bool = True

    def __post_init__(self) -> None:
        if self.model_channels % self.num_heads or self.model_channels // self.num_heads % 2:
            raise ValueError(
                f"{self.model_channels} channels, which {self.num_heads} heads do not divide into "
                "pairs"
            )

    @property
    def patch(self) -> tuple[int, int, int]:
        """Frames, rows and columns of a cell."""
        return self.patch_temporal, self.patch_spatial, self.patch_spatial

    @property
    def cell(self) -> int:
        """Values of one channel in a cell."""
        return self.patch_spatial**2 * self.patch_temporal

    @property
    def lora_dim(self) -> int | None:
        """Channels between a time and the changes of a layer, None where it leads there at once."""
        return self.adaln_lora_dim if self.use_adaln_lora else None

    @property
    def stretches(self) -> tuple[float, float, float]:
        """How far frames, rows and columns are spread."""
        return (
            self.rope_t_extrapolation_ratio,
            self.rope_h_extrapolation_ratio,
            self.rope_w_extrapolation_ratio,
        )


class CosmosTransformer(nn.Module):
    """Video to cells, layers over the cells, and back; a generation adds layers and times."""

    reads_patches = frozenset({"dit", patches.OUTPUT, patches.CROSS_OUTPUT})
    final_layer: nn.Module

    def __init__(self, config: CosmosConfig, operations: Any, **place: Any) -> None:
        super().__init__()
        self.dtype, self.heads = place["dtype"], config.num_heads
        self.patch, self.stretches = config.patch, config.stretches
        self.concat_padding_mask, self.has_lora = config.concat_padding_mask, config.use_adaln_lora
        channels = (config.in_channels + config.concat_padding_mask) * config.cell
        self.x_embedder = PatchEmbed(channels, config.model_channels, operations, **place)

    @abstractmethod
    def embedded_time(self, timesteps: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | float]:
        """The time of each frame ``[B, T, D]`` (of all: ``[B, 1, D]``), and what all layers add to
        their changes ``[B, T, 3 D]``.
        """

    @abstractmethod
    def layers(self) -> Iterable[nn.Module]:
        """In turn; each takes (tokens, time, shared changes, text, angles, *places, options)."""

    def pace(self, fps: Any) -> float:
        """Time from a frame to the next, in that of the training; here the rate has no effect."""
        del fps
        return 1.0

    def places(self, sizes: Sequence[int], tokens: Tensor) -> tuple[Tensor | None, ...]:
        """What layers are told of places beside the angles; here nothing."""
        del sizes, tokens
        return ()

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        fps: Any = None,
        padding_mask: Tensor | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, T, H, W]``.
            timesteps: Times ``[B]``; Predict 2 also takes one of each frame ``[B, T]``.
            context: Text tokens ``[B, L, D]``, zero where there is padding.
            fps: Frames a second; None stands for those of the training.
            padding_mask: 1 where there is no picture ``[B, 1, H, W]``; nowhere by default.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, timesteps, context, fps, padding_mask, options, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        fps: Any = None,
        padding_mask: Tensor | None = None,
        transformer_options: Options | None = None,
        **_: Any,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        shown = x.shape[2:]
        x = pad_to_patch_size(x, self.patch)
        if self.concat_padding_mask:
            x = torch.cat([x, mask_like(x, padding_mask)], dim=1)
        sizes = [size // patch for size, patch in zip(x.shape[2:], self.patch)]
        r, m, n = self.patch
        cells = rearrange(x, "b c (t r) (h m) (w n) -> b (t h w) (c r m n)", r=r, m=m, n=n)
        tokens = self.x_embedder(cells)
        vec, shared = self.embedded_time(timesteps, tokens)
        head = tokens.shape[-1] // self.heads
        angles = position_angles(sizes, head, self.stretches, x.device, self.pace(fps))
        where = (angles, *self.places(sizes, tokens))
        tokens = self._run_blocks(tokens, vec, shared, context, where, options)
        out = rearrange(
            self.final_layer(tokens, vec, shared),
            "b (t h w) (m n r c) -> b c (t r) (h m) (w n)",
            t=sizes[0], h=sizes[1], r=r, m=m, n=n,
        )  # fmt: skip
        return out[:, :, : shown[0], : shown[1], : shown[2]]

    def _run_blocks(
        self,
        tokens: Tensor,
        vec: Tensor,
        shared: Tensor | float,
        context: Tensor,
        where: tuple[Tensor | None, ...],
        options: Options,
    ) -> Tensor:
        table = (options.get("patches_replace") or {}).get("dit") or {}
        blocks = list(self.layers())
        options["total_blocks"], options["block_type"] = len(blocks), "double"
        angles, *places = where
        for number, block in enumerate(blocks):
            options["block_index"] = number

            def original(args: Mapping[str, Any], block: nn.Module = block) -> Options:
                told = args.get("transformer_options") or {}
                given = (args["vec"], shared, args["txt"], args["pe"], *places, told)
                return {"img": block(args["img"], *given)}

            args = {"img": tokens, "txt": context, "vec": vec, "pe": angles}
            args["transformer_options"] = options  # type: ignore[assignment]
            replacement = table.get(("double_block", number))
            if replacement is None:
                tokens = original(args)["img"]
            else:
                tokens = replacement(args, {"original_block": original})["img"]
        return tokens
