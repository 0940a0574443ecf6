"""DINOv2: an image encoder taught without texts; Hunyuan3D looks at pictures with it.

Keys follow the published files: ``embeddings``, ``encoder.layer.N``, ``layernorm``.
Source: Oquab et al. 2023, https://arxiv.org/abs/2304.07193.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.nn import attention
from comfy.nn.config import NetworkConfig

DINO_KIND = "dinov2"
Parts = dict[str, Any]


@dataclass(frozen=True)
class DinoConfig(NetworkConfig):
    """Sizes of one encoder; defaults are those of ViT-L/14.

    Attributes:
        intermediate_size: Width of the feed-forward; of each half of it with ``use_swiglu_ffn``.
        use_swiglu_ffn: Whether the feed-forward has a gate.
    """

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 518
    patch_size: int = 14
    layer_norm_eps: float = 1e-6
    use_swiglu_ffn: bool = False


class Embeddings(nn.Module):
    """Patches and a token for the whole picture, each with its place."""

    def __init__(self, config: DinoConfig, parts: Parts) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        places = (config.image_size // patch) ** 2 + 1
        self.cls_token = _empty(1, 1, width, **place)
        self.mask_token = _empty(1, width, **place)  # of training; files carry it
        self.position_embeddings = _empty(1, places, width, **place)
        self.patch_embeddings = nn.ModuleDict(
            {
                "projection": parts["operations"].Conv2d(
                    config.num_channels, width, patch, stride=patch, **place
                )
            }
        )

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embeddings["projection"](pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.to(x).expand(x.shape[0], -1, -1), x], dim=1)
        places = self.position_embeddings.shape[1]
        if x.shape[1] != places:
            raise ValueError(f"a picture of {x.shape[1]} tokens; this image encoder takes {places}")
        return x + self.position_embeddings.to(x)


class SelfAttention(nn.ModuleDict):
    """Attention among the tokens; the files keep its projections at ``attention.attention`` and
    ``attention.output``."""

    def __init__(self, config: DinoConfig, parts: Parts) -> None:
        width, place = config.hidden_size, {"dtype": parts["dtype"], "device": parts["device"]}
        linear = parts["operations"].Linear
        inner = {name: linear(width, width, **place) for name in ("query", "key", "value")}
        output = {"dense": linear(width, width, **place)}
        super().__init__({"attention": nn.ModuleDict(inner), "output": nn.ModuleDict(output)})
        self.heads = config.num_attention_heads

    def forward(self, x: Tensor) -> Tensor:
        inner: Any = self["attention"]
        output: Any = self["output"]
        q, k, v = (inner[name](x) for name in ("query", "key", "value"))
        made: Tensor = output["dense"](attention.optimized_attention(q, k, v, self.heads))
        return made


class LayerScale(nn.Module):
    """A factor for each channel."""

    def __init__(self, width: int, parts: Parts) -> None:
        super().__init__()
        self.lambda1 = _empty(width, dtype=parts["dtype"], device=parts["device"])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.lambda1.to(x)


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, config: DinoConfig, parts: Parts) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.fc1 = parts["operations"].Linear(width, inner, **place)
        self.fc2 = parts["operations"].Linear(inner, width, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class GatedFeedForward(nn.Module):
    """``out(silu(a) * b)``, a and b from one layer."""

    def __init__(self, config: DinoConfig, parts: Parts) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.weights_in = parts["operations"].Linear(width, 2 * inner, **place)
        self.weights_out = parts["operations"].Linear(inner, width, **place)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.weights_in(x).chunk(2, dim=-1)
        return self.weights_out(F.silu(gate) * value)


class Layer(nn.Module):
    """Attention and feed-forward, each scaled channel by channel."""

    def __init__(self, config: DinoConfig, parts: Parts) -> None:
        super().__init__()
        width = config.hidden_size
        form = GatedFeedForward if config.use_swiglu_ffn else FeedForward
        self.norm1, self.norm2 = _norm(config, parts), _norm(config, parts)
        self.attention = SelfAttention(config, parts)
        self.layer_scale1, self.layer_scale2 = LayerScale(width, parts), LayerScale(width, parts)
        self.mlp = form(config, parts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer_scale1(self.attention(self.norm1(x)))
        return x + self.layer_scale2(self.mlp(self.norm2(x)))


class Dinov2Model(nn.Module):
    """The encoder, with the answers of the image towers of CLIP."""

    def __init__(
        self,
        config_dict: Mapping[str, Any],
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        parts = {"dtype": dtype, "device": device, "operations": operations}
        config = self.config = DinoConfig.from_options(config_dict)
        self.embeddings = Embeddings(config, parts)
        layers = (Layer(config, parts) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})
        self.layernorm = _norm(config, parts)

    def forward(
        self,
        pixel_values: Tensor,
        attention_mask: Tensor | None = None,
        intermediate_output: int | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, None]:
        """Final state ``[B, L, D]``, that after a layer (negative from the end), the whole
        picture's, and no patches for a language model."""
        del attention_mask  # pictures have no padding
        x = self.embeddings(pixel_values)
        layers: Any = self.encoder["layer"]
        wanted = intermediate_output
        if wanted is not None and wanted < 0:
            wanted += len(layers)
        between = None
        for number, layer in enumerate(layers):
            x = layer(x)
            if number == wanted:
                between = x
        x = self.layernorm(x)
        return x, between, x[:, 0], None


def _empty(*shape: int, **place: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, **place), requires_grad=False)


def _norm(config: DinoConfig, parts: Parts) -> Any:
    place = {"dtype": parts["dtype"], "device": parts["device"]}
    return parts["operations"].LayerNorm(config.hidden_size, eps=config.layer_norm_eps, **place)
