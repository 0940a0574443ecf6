"""Wan HuMo: a person of a picture moves with what is heard.

Latents of the picture stand behind the video's. A projection makes a few tokens of what is heard
around each frame, and in every block the patches of a frame attend to its own tokens.
Source: https://arxiv.org/abs/2509.08519, https://github.com/Phantom-video/HuMo.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.wan.layers import WanAttentionBlock, WanRMSNorm
from comfy.ldm.wan.model import WanModel
from comfy.nn import attention

NORM_EPS = 1e-5  # of the layer norm over tokens of sound
Options = dict[str, Any]


def with_silence(heard: Tensor, frames: int) -> Tensor:
    """Sound ``[B, T, ...]`` for a number of frames; it is silent after its end."""
    heard = heard[:, :frames]
    silent = heard.new_zeros(heard.shape[0], frames - heard.shape[1], *heard.shape[2:])
    return torch.cat([heard, silent], dim=1)


class NamedLayer(nn.Module):
    """A layer one name deeper, as files have it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class AudioProjection(nn.Module):
    """What is heard around each frame ``[B, T, ...]`` to tokens ``[B, T, tokens, width]``.

    Args:
        in_width: Numbers that tell of a frame: states of an audio encoder for moments around it,
            of several of its layers.
        hidden: Channels between the layers.
    """

    def __init__(self, in_width: int, hidden: int, width: int, tokens: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        linear, norm = parts["operations"].Linear, parts["operations"].LayerNorm
        self.in_width, self.tokens = in_width, tokens
        self.audio_proj_glob_1 = NamedLayer(linear(in_width, hidden, **place))
        self.audio_proj_glob_2 = NamedLayer(linear(hidden, hidden, **place))
        self.audio_proj_glob_3 = NamedLayer(linear(hidden, tokens * width, **place))
        self.audio_proj_glob_norm = NamedLayer(norm(width, eps=NORM_EPS, **place))

    def forward(self, heard: Tensor) -> Tensor:
        flat = heard.flatten(2)
        if flat.shape[2] != self.in_width:
            raise ValueError(
                f"audio_embed: expected {self.in_width} numbers a frame, as this model has them, "
                f"found {flat.shape[2]}, of the shape {list(heard.shape)}; make them with "
                "WanHuMoImageToVideo and the audio encoder Whisper large v3"
            )
        x = functional.relu(self.audio_proj_glob_1(flat))
        x = functional.relu(self.audio_proj_glob_2(x))
        return self.audio_proj_glob_norm(self.audio_proj_glob_3(x).unflatten(2, (self.tokens, -1)))


class AudioAttention(nn.Module):
    """Attention of the patches of each frame to the tokens of its sound."""

    def __init__(
        self, dim: int, width: int, heads: int, qk_norm: bool, eps: float, parts: Options
    ) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        linear = parts["operations"].Linear
        self.heads = heads
        self.q, self.o = linear(dim, dim, **place), linear(dim, dim, **place)
        self.k, self.v = linear(width, dim, **place), linear(width, dim, **place)
        self.norm_q: nn.Module = WanRMSNorm(dim, eps, **place) if qk_norm else nn.Identity()
        self.norm_k: nn.Module = WanRMSNorm(dim, eps, **place) if qk_norm else nn.Identity()

    def forward(self, x: Tensor, sound: Tensor, options: Options | None = None) -> Tensor:
        """``x [B, T * n, D]`` with ``sound [B, T, m, width]``."""
        batch, frames = sound.shape[:2]
        q = self.norm_q(self.q(x)).reshape(batch * frames, -1, x.shape[2])
        tokens = sound.flatten(0, 1)
        k, v = self.norm_k(self.k(tokens)), self.v(tokens)
        seen = attention.optimized_attention(q, k, v, self.heads, transformer_options=options)
        return self.o(seen.reshape(x.shape))


class AudioLook(nn.Module):
    """A norm, then attention to sound; gives what is added to the patches."""

    def __init__(
        self, dim: int, width: int, heads: int, qk_norm: bool, eps: float, parts: Options
    ) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.audio_cross_attn = AudioAttention(dim, width, heads, qk_norm, eps, parts)
        self.norm1_audio = parts["operations"].LayerNorm(dim, eps=eps, **place)

    def forward(self, x: Tensor, sound: Tensor, options: Options | None = None) -> Tensor:
        return self.audio_cross_attn(self.norm1_audio(x), sound, options)


class HumoAttentionBlock(WanAttentionBlock):
    """A block in which attention to sound follows that to text."""

    def __init__(self, dim: int, ffn_dim: int, num_heads: int, width: int, **options: Any) -> None:
        super().__init__(dim, ffn_dim, num_heads, **options)
        self.audio_cross_attn_wrapper = AudioLook(
            dim, width, num_heads, options["qk_norm"], options["eps"], options
        )

    def see(
        self,
        x: Tensor,
        context: Tensor,
        image_length: int | None,
        options: Options | None,
        sound: Tensor | None = None,
    ) -> Tensor:
        """Patches after they saw text and ``sound [B, T, m, width]``, if there is any."""
        x = super().see(x, context, image_length, options)
        if sound is None:
            return x
        return x + self.audio_cross_attn_wrapper(x, sound, options)


class HumoWanModel(WanModel):
    """Wan that looks at a picture placed after the video, and hears.

    Args:
        audio_in, audio_hidden, audio_width, audio_tokens: Of the projection of sound: numbers that
            tell of a frame, channels within, and width and number of the tokens of a frame.
    """

    def __init__(
        self,
        model_type: str = "humo",
        dim: int = 2048,
        ffn_dim: int = 8192,
        num_heads: int = 16,
        num_layers: int = 32,
        audio_in: int = 51200,
        audio_hidden: int = 512,
        audio_width: int = 1536,
        audio_tokens: int = 16,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **options: Any,
    ) -> None:
        del model_type  # cross-attention is to text alone
        sizes: Options = {"dim": dim, "ffn_dim": ffn_dim, "num_heads": num_heads}
        place = {"dtype": dtype, "device": device}
        super().__init__(
            model_type="t2v", num_layers=0, **sizes, **place, operations=operations, **options
        )
        self.num_layers = num_layers
        self.blocks = nn.ModuleList(
            HumoAttentionBlock(dim, ffn_dim, num_heads, audio_width, **self.block_options)
            for _ in range(num_layers)
        )
        parts = {**place, "operations": operations}
        self.audio_proj = AudioProjection(audio_in, audio_hidden, audio_width, audio_tokens, parts)

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        clip_fea: Tensor | None = None,
        time_dim_concat: Tensor | None = None,
        transformer_options: Options | None = None,
        reference_latent: Tensor | None = None,
        audio_embed: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As `WanModel` does it.

        Args:
            reference_latent: Frames ``[B, C, R, H, W]`` behind those of ``x``, as ``x`` has them.
            audio_embed: What is heard around each frame ``[B, T, ...]``.
        """
        behind = [one for one in (time_dim_concat, reference_latent) if one is not None]
        if reference_latent is not None and _size(reference_latent) != _size(x):
            raise ValueError(
                "reference_latents: expected a picture of the video's size, "
                f"{x.shape[3]} x {x.shape[4]} cells with {x.shape[1]} channels, found "
                f"{reference_latent.shape[3]} x {reference_latent.shape[4]} with "
                f"{reference_latent.shape[1]}; give WanHuMoImageToVideo's own latent"
            )
        if audio_embed is not None:
            heard = with_silence(audio_embed, x.shape[2])
            heard = with_silence(heard, x.shape[2] + sum(one.shape[2] for one in behind))
            kwargs["sound"] = self.audio_proj(heard.to(x.dtype))
        joined = torch.cat(behind, dim=2) if behind else None
        return super()._forward(
            x, timestep, context, clip_fea, joined, transformer_options, **kwargs
        )

    def _run_blocks(
        self,
        x: Tensor,
        context: Tensor,
        shared: Options,
        sound: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        return super()._run_blocks(x, context, {**shared, "sound": sound}, **kwargs)


def _size(video: Tensor) -> tuple[int, ...]:
    return (video.shape[1], *video.shape[3:])
