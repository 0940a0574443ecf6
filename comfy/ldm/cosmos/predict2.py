"""Cosmos Predict 2: a transformer over the cells of a video; each frame may have its own time.

Source: https://research.nvidia.com/labs/dir/cosmos-predict2/;
https://github.com/nvidia-cosmos/cosmos-predict2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from comfy import ops
from comfy.ldm.common_dit import RMSNorm
from comfy.ldm.cosmos.layers import (
    GPT2FeedForward,
    TimestepEmbedding,
    modulation,
    turn,
)
from comfy.ldm.cosmos.transformer import CosmosConfig, CosmosTransformer, Options
from comfy.nn import attention, patches
from comfy.nn.timesteps import timestep_embedding

NORM_EPS = 1e-6


def apply_rotary_pos_emb(t: Tensor, freqs: Tensor) -> Tensor:
    """`turn` of ``t [..., D]`` by rotations ``[..., D / 2, 2, 2]``, as custom nodes make them."""
    pairs = t.float().unflatten(-1, (2, -1)).movedim(-2, -1).unsqueeze(-2)
    turned = freqs[..., 0] * pairs[..., 0] + freqs[..., 1] * pairs[..., 1]
    return turned.movedim(-1, -2).flatten(-2).to(t.dtype)


class Attention(nn.Module):
    """Attention of the video with itself or, given the text's width, with the text."""

    def __init__(
        self, width: int, heads: int, context: int | None, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.heads, self.is_cross = heads, context is not None
        self.q_proj = operations.Linear(width, width, bias=False, **place)
        self.k_proj = operations.Linear(context or width, width, bias=False, **place)
        self.v_proj = operations.Linear(context or width, width, bias=False, **place)
        self.q_norm, self.k_norm = (RMSNorm(width // heads, **place) for _ in range(2))
        self.output_proj = operations.Linear(width, width, bias=False, **place)

    def forward(
        self, x: Tensor, context: Tensor | None, angles: Tensor | None, options: Options
    ) -> Tensor:
        """``x [B, L, D]`` at ``angles [L, D / heads / 2]``."""
        source = x if context is None else context
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q_proj(x), self.k_proj(source), self.v_proj(source))
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = turn(q, angles), turn(k, angles)
        seen = attention.optimized_attention(
            q, k, v, self.heads, skip_reshape=True, transformer_options=options
        )
        name = patches.CROSS_OUTPUT if self.is_cross else patches.OUTPUT
        return self.output_proj(patches.attention_output(seen, options, self.heads, None, name))


class Block(nn.Module):
    """A layer: the video with itself, with the text, and cell by cell."""

    compiles_alone = True

    def __init__(
        self,
        width: int,
        heads: int,
        context: int,
        mlp_ratio: float,
        lora_dim: int | None,
        operations: Any,
        **place: Any,
    ) -> None:
        super().__init__()
        norm = {"elementwise_affine": False, "eps": NORM_EPS, **place}
        self.layer_norm_self_attn = operations.LayerNorm(width, **norm)
        self.self_attn = Attention(width, heads, None, operations, **place)
        self.layer_norm_cross_attn = operations.LayerNorm(width, **norm)
        self.cross_attn = Attention(width, heads, context, operations, **place)
        self.layer_norm_mlp = operations.LayerNorm(width, **norm)
        self.mlp = GPT2FeedForward(width, int(width * mlp_ratio), operations, **place)
        for name in ("self_attn", "cross_attn", "mlp"):
            made = modulation(width, lora_dim, 3, operations, **place)
            setattr(self, f"adaln_modulation_{name}", made)

    def forward(
        self,
        x: Tensor,
        vec: Tensor,
        shared: Tensor | float,
        context: Tensor,
        angles: Tensor,
        transformer_options: Options,
    ) -> Tensor:
        """``x [B, L, D]``; ``vec`` and ``shared`` are the time of each frame ``[B, T, D]`` and what
        all layers add to their changes ``[B, T, 3 D]``."""
        given: dict[str, tuple[Any, ...]] = {
            "self_attn": (None, angles, transformer_options),
            "cross_attn": (context, None, transformer_options),
            "mlp": (),
        }
        frames = vec.shape[1]
        for name, others in given.items():
            changes = getattr(self, f"adaln_modulation_{name}")(vec) + shared
            shift, scale, gate = changes[:, :, None].chunk(3, dim=-1)
            normed = getattr(self, f"layer_norm_{name}")(x).unflatten(1, (frames, -1))
            normed = (normed * (1 + scale) + shift).flatten(1, 2)
            made = getattr(self, name)(normed, *others)
            x = x + (gate * made.unflatten(1, (frames, -1))).flatten(1, 2)
        return x


class FinalLayer(nn.Module):
    """A modulated norm and a projection to cells."""

    def __init__(
        self, width: int, out: int, lora_dim: int | None, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        norm = {"elementwise_affine": False, "eps": NORM_EPS, **place}
        self.layer_norm = operations.LayerNorm(width, **norm)
        self.linear = operations.Linear(width, out, bias=False, **place)
        self.adaln_modulation = modulation(width, lora_dim, 2, operations, **place)

    def forward(self, x: Tensor, vec: Tensor, shared: Tensor | float) -> Tensor:
        part = shared[..., : 2 * x.shape[-1]] if isinstance(shared, Tensor) else shared
        shift, scale = (self.adaln_modulation(vec) + part)[:, :, None].chunk(2, dim=-1)
        normed = self.layer_norm(x).unflatten(1, (vec.shape[1], -1)) * (1 + scale) + shift
        return self.linear(normed.flatten(1, 2))


class MiniTrainDIT(CosmosTransformer):
    """Predicts the flow of a noisy video from times and text tokens; it does not look at the rate.

    Args:
        sizes: As `CosmosConfig` has them.
    """

    def __init__(
        self,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **sizes: Any,
    ) -> None:
        usual = {"model_channels": 2048, "num_heads": 16}
        config = CosmosConfig.from_options({**usual, **sizes})
        width, lora_dim = config.model_channels, config.lora_dim
        parts = {"operations": operations, "dtype": dtype, "device": device}
        super().__init__(config, **parts)
        embedding = TimestepEmbedding(width, config.use_adaln_lora, **parts)
        self.t_embedder = nn.Sequential(nn.Identity(), embedding)
        self.t_embedding_norm = RMSNorm(width, dtype=dtype, device=device)
        text = config.crossattn_emb_channels
        self.blocks = nn.ModuleList(
            Block(width, config.num_heads, text, config.mlp_ratio, lora_dim, **parts)
            for _ in range(config.num_blocks)
        )
        self.final_layer = FinalLayer(width, config.cell * config.out_channels, lora_dim, **parts)

    def embedded_time(self, timesteps: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | float]:
        """Of times ``[B]`` or, of each frame, ``[B, T]``."""
        times = timesteps if timesteps.ndim == 2 else timesteps[:, None]
        waves = timestep_embedding(times.flatten(), tokens.shape[-1]).unflatten(0, times.shape)
        waves = waves.to(tokens.dtype)
        made = self.t_embedder(waves)
        vec, shared = (waves, made) if self.has_lora else (made, 0.0)
        return self.t_embedding_norm(vec), shared

    def layers(self) -> Iterable[nn.Module]:
        """See the base class."""
        return self.blocks
