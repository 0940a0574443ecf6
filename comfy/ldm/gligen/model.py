"""GLIGEN: gated attention layers that let a UNet see boxes and what is to be in them.

One gated layer sits behind the self-attention of each of the UNet's transformers, in their order.
Source: Li et al. 2023, https://arxiv.org/abs/2301.07093.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.unet.transformer import CrossAttention, FeedForward

MAX_OBJECTS = 30  # boxes the networks were trained with; missing ones are told as absent
FREQUENCIES, TEMPERATURE = 8, 100
HIDDEN_WIDTH = 512
SD1_CONTEXT, SD1_HEADS, CHANNELS_PER_HEAD = 768, 8, 64
PARTS = ("input_blocks", "middle_block", "output_blocks")

Box = tuple[Tensor, int, int, int, int]  # pooled text, then height, width, y, x in latent cells


def box_waves(boxes: Tensor) -> Tensor:
    """Sines and cosines of box corners ``[B, N, 4]`` in 0..1: ``[B, N, 4 * 2 * FREQUENCIES]``."""
    waves = []
    for number in range(FREQUENCIES):
        angle = TEMPERATURE ** (number / FREQUENCIES) * boxes
        waves += [angle.sin(), angle.cos()]
    return torch.cat(waves, dim=-1)


class GatedSelfAttentionDense(nn.Module):
    """Attention over visual tokens and objects, and a feed-forward, each through a learned gate."""

    def __init__(
        self,
        query_dim: int,
        context_dim: int,
        n_heads: int,
        d_head: int,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        self.linear = operations.Linear(context_dim, query_dim)
        self.attn = CrossAttention(query_dim, query_dim, n_heads, d_head, operations=operations)
        self.ff = FeedForward(query_dim, glu=True, operations=operations)
        self.norm1 = operations.LayerNorm(query_dim)
        self.norm2 = operations.LayerNorm(query_dim)
        self.alpha_attn = nn.Parameter(torch.tensor(0.0))
        self.alpha_dense = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor, objs: Tensor) -> Tensor:
        """Visual tokens ``x [B, L, D]`` after a look at objects ``objs [B, N, C]``."""
        both = torch.cat([x, self.linear(objs)], dim=1)
        seen = self.attn(self.norm1(both))[:, : x.shape[1]]
        x = x + self.alpha_attn.tanh() * seen
        return x + self.alpha_dense.tanh() * self.ff(self.norm2(x))


class PositionNet(nn.Module):
    """Objects from texts and boxes; absent ones have features of their own."""

    def __init__(
        self, in_dim: int, out_dim: int, operations: Any = ops.disable_weight_init
    ) -> None:
        super().__init__()
        waves = 4 * 2 * FREQUENCIES
        self.linears = nn.Sequential(
            operations.Linear(in_dim + waves, HIDDEN_WIDTH),
            nn.SiLU(),
            operations.Linear(HIDDEN_WIDTH, HIDDEN_WIDTH),
            nn.SiLU(),
            operations.Linear(HIDDEN_WIDTH, out_dim),
        )
        self.null_positive_feature = nn.Parameter(torch.zeros(in_dim))
        self.null_position_feature = nn.Parameter(torch.zeros(waves))

    def forward(self, boxes: Tensor, masks: Tensor, positive_embeddings: Tensor) -> Tensor:
        """Objects ``[B, N, C]`` of boxes ``[B, N, 4]``, masks ``[B, N]`` and texts ``[B, N,
        D]``."""
        present = masks[..., None].bool()
        texts = torch.where(present, positive_embeddings, self.null_positive_feature)
        places = torch.where(present, box_waves(boxes), self.null_position_feature)
        return self.linears(torch.cat([texts, places], dim=-1))


class Gligen(nn.Module):
    """All gated layers of one file, and what turns boxes into objects."""

    def __init__(
        self, modules: Sequence[nn.Module], position_net: PositionNet, key_dim: int
    ) -> None:
        super().__init__()
        self.module_list = nn.ModuleList(modules)
        self.position_net = position_net
        self.key_dim = key_dim
        self.max_objs = MAX_OBJECTS

    def _set_position(
        self, boxes: Tensor, masks: Tensor, positive_embeddings: Tensor
    ) -> Callable[[Tensor, Mapping[str, Any]], Tensor]:
        """The patch for the middle of each transformer layer of the UNet."""
        objs = self.position_net(boxes, masks, positive_embeddings)

        def patch(x: Tensor, extra_options: Mapping[str, Any]) -> Tensor:
            return self._layer_for(x, extra_options["transformer_index"])(x, objs.to(x))

        return patch

    def _layer_for(self, x: Tensor, place: int) -> nn.Module:
        """The gated layer of a transformer of the UNet, by its place among them.

        Raises ValueError when the file was made for another network.
        """
        layers: list[Any] = list(self.module_list)
        widths = [layer.linear.out_features for layer in layers]
        if place >= len(widths) or x.shape[-1] != widths[place]:
            raise ValueError(
                f"transformer {place} of the model has features of width {x.shape[-1]}; the GLIGEN "
                f"file has layers of the widths {widths}: it belongs to another kind of model"
            )
        return layers[place]

    def set_position(
        self, latent_image_shape: Sequence[int], position_params: Sequence[Box], device: Any
    ) -> Callable[[Tensor, Mapping[str, Any]], Tensor]:
        """The patch for boxes in a latent batch ``[B, C, h, w]``.

        Raises ValueError for more boxes than the network takes.
        """
        if len(position_params) > self.max_objs:
            raise ValueError(
                f"{len(position_params)} boxes were given; GLIGEN takes {self.max_objs}"
            )
        batch, _, latent_height, latent_width = latent_image_shape
        boxes = torch.zeros(self.max_objs, 4)
        masks = torch.zeros(self.max_objs)
        texts = torch.zeros(self.max_objs, self.key_dim)
        for number, (text, height, width, y, x) in enumerate(position_params):
            corners = (
                x / latent_width,
                y / latent_height,
                (x + width) / latent_width,
                (y + height) / latent_height,
            )
            if text.numel() != self.key_dim:
                raise ValueError(
                    f"clip: expected texts of width {self.key_dim}, as the GLIGEN model reads "
                    f"them, found {text.numel()}; use the text encoder of the model it is for"
                )
            boxes[number] = torch.tensor(corners)
            masks[number] = 1.0
            texts[number] = text.reshape(-1)
        return self._expanded(batch, boxes, masks, texts, device)

    def set_empty(
        self, latent_image_shape: Sequence[int], device: Any
    ) -> Callable[[Tensor, Mapping[str, Any]], Tensor]:
        """The patch for a batch without boxes."""
        return self.set_position(latent_image_shape, (), device)

    def _expanded(
        self, batch: int, boxes: Tensor, masks: Tensor, texts: Tensor, device: Any
    ) -> Callable[[Tensor, Mapping[str, Any]], Tensor]:
        dtype = self.position_net.null_positive_feature.dtype

        def repeated(values: Tensor) -> Tensor:
            return values.to(device, dtype)[None].expand(batch, *values.shape)

        return self._set_position(repeated(boxes), repeated(masks), repeated(texts))


def build_gligen(sd: Mapping[str, Tensor]) -> Gligen:
    """The network of a file, sizes from shapes.

    Raises ValueError when it holds no gated layers.
    """
    layers, key_dim = [], SD1_CONTEXT
    for weights in _layer_weights(sd):
        query_dim, key_dim = weights["linear.weight"].shape
        heads = SD1_HEADS if key_dim == SD1_CONTEXT else max(1, query_dim // CHANNELS_PER_HEAD)
        layer = GatedSelfAttentionDense(query_dim, key_dim, heads, query_dim // heads)
        layer.load_state_dict(weights)
        layers.append(layer)
    if not layers or "position_net.null_positive_feature" not in sd:
        raise ValueError("no GLIGEN layers were found")
    in_dim = sd["position_net.null_positive_feature"].shape[0]
    out_dim = sd["position_net.linears.4.weight"].shape[0]
    positions = PositionNet(in_dim, out_dim)
    prefix = "position_net."
    positions.load_state_dict(
        {key[len(prefix) :]: value for key, value in sd.items() if key.startswith(prefix)}
    )
    return Gligen(layers, positions, key_dim).requires_grad_(False).eval()


def _layer_weights(sd: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Weights of each gated layer, in the order in which the UNet runs through them."""
    found: dict[tuple[int, int], dict[str, Tensor]] = {}
    for key, value in sd.items():
        before, mark, name = key.partition(".fuser.")
        part = next((p for p in PARTS if f"{p}." in before), None)
        if not mark or part is None:
            continue
        number = int(before.split(f"{part}.")[1].split(".")[0])
        found.setdefault((PARTS.index(part), number), {})[name] = value
    return [found[place] for place in sorted(found)]
