"""Wan S2V: a person of a picture speaks or sings what is heard, and goes on from earlier frames.

The picture and the earlier frames stand behind the video's patches, at a time of 0; the earlier
ones the coarser, the longer ago they were. An encoder makes tokens of what is heard in each frame
of the latent, and after some blocks the patches of a frame attend to its tokens.
Source: https://arxiv.org/abs/2508.18621, https://github.com/Wan-Video/Wan2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.ldm.wan.layers import WanAttentionBlock
from comfy.ldm.wan.model import WanModel
from comfy.ldm.wan.model_animate import CausalConv1d, activated
from comfy.ldm.wan.model_humo import AudioAttention
from comfy.nn.layout import tokens_of_patches

LISTENING = (0, 4, 8, 12, 16, 20, 24, 27, 30, 33, 36, 39)  # blocks after which sound is heard
NORM_EPS = 1e-5  # of the norm before attention to sound
PARTS = 4  # states of sound for a frame of the latent
FRAMES_BEFORE, CELLS_BEFORE = 73, 19  # that the first state stands for before the video
VIDEO, REFERENCE, MOTION = range(3)  # what a patch is of
# Earlier frames from the last one on: how many are seen at a scale of 1, 2 and 4 patches.
FRAMES_AT_SCALE = {1: 1, 2: 2, 4: 16}
REFERENCE_TIME, AWAY = 30, 9  # time of the picture, or how far after the end of a longer video
Options = dict[str, Any]


class SpeechEncoder(nn.Module):
    """States of sound ``[B, 4 T, width]`` to tokens of each of T frames: one of the whole
    ``[B, T, dim]``, several of details ``[B, T, heads + 1, dim]``.
    """

    def __init__(self, width: int, dim: int, heads: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        quarter, half = dim // 4, dim // 2
        self.heads = heads
        self.conv1_local = CausalConv1d(width, quarter * heads, 1, parts)
        self.conv1_global = CausalConv1d(width, quarter, 1, parts)
        self.conv2 = CausalConv1d(quarter, half, 2, parts)
        self.conv3 = CausalConv1d(half, dim, 2, parts)
        self.final_linear = parts["operations"].Linear(dim, dim, **place)
        self.padding_tokens = nn.Parameter(torch.empty(1, 1, 1, dim, **place))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        batch = states.shape[0]
        each = self.conv1_local(states).unflatten(2, (self.heads, -1)).transpose(1, 2)
        details = self._slower(each.flatten(0, 1)).unflatten(0, (batch, self.heads))
        details = details.transpose(1, 2)
        silent = self.padding_tokens.to(details).expand(batch, details.shape[1], 1, -1)
        whole = self.final_linear(self._slower(self.conv1_global(states)))
        return whole, torch.cat([details, silent], dim=2)

    def _slower(self, x: Tensor) -> Tensor:
        return activated(self.conv3(activated(self.conv2(activated(x)))))


class CausalAudioEncoder(nn.Module):
    """A mean of an audio encoder's layers, then tokens for each frame of the latent."""

    def __init__(self, width: int, layers: int, dim: int, heads: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.encoder = SpeechEncoder(width, dim, heads, parts)
        self.width = width
        self.weights = nn.Parameter(torch.empty(1, layers, 1, 1, **place))

    def forward(self, heard: Tensor) -> tuple[Tensor, Tensor]:
        """States ``[B, layers, width, 4 T]``, as `SpeechEncoder` gives their tokens.

        Raises:
            ValueError: They are of another audio encoder.
        """
        layers = self.weights.shape[1]
        if (heard.shape[1], heard.shape[2]) != (layers, self.width):
            raise ValueError(
                f"audio_embed: expected states of {layers} layers of width {self.width}, as this "
                f"model has them, found {heard.shape[1]} of width {heard.shape[2]}; use the audio "
                "encoder wav2vec 2.0 large"
            )
        before = heard[..., :1].expand(-1, -1, -1, FRAMES_BEFORE)
        weights = functional.silu(self.weights.to(heard))
        mean = (torch.cat([before, heard], dim=3) * weights).sum(dim=1) / weights.sum()
        whole, details = self.encoder(mean.transpose(1, 2))
        return whole[:, CELLS_BEFORE:], details[:, CELLS_BEFORE:]


class AdaptiveNorm(nn.Module):
    """A norm of each frame's patches, shifted and scaled by what is heard."""

    def __init__(self, dim: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.linear = parts["operations"].Linear(dim, 2 * dim, **place)

    def forward(self, x: Tensor, whole: Tensor) -> Tensor:
        """``x [B, T * n, D]``, ``whole [B, T, D]``."""
        shift, scale = self.linear(functional.silu(whole))[:, :, None].chunk(2, dim=3)
        frames = x.unflatten(1, (whole.shape[1], -1))
        normed = functional.layer_norm(frames, frames.shape[-1:], eps=NORM_EPS)
        return torch.addcmul(shift, normed, 1 + scale).flatten(1, 2)


class FramePacker(nn.Module):
    """Earlier frames as patches, the larger, the longer ago they were."""

    def __init__(self, channels: int, dim: int, patch: Sequence[int], parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        for scale, name in zip(FRAMES_AT_SCALE, ("proj", "proj_2x", "proj_4x")):
            size = tuple(side * scale for side in patch)
            conv = parts["operations"].Conv3d(channels, dim, size, stride=size, **place)
            self.add_module(name, conv)
        self.patch = tuple(patch)

    def forward(self, latent: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
        """Patches ``[B, L, D]`` of ``latent [B, C, T, H, W]``, of which the last frames count, and
        their places: for each scale those in time, rows and columns.

        Raises:
            ValueError: The frames are smaller than the largest patch.
        """
        least = max(FRAMES_AT_SCALE) * self.patch[1]
        if min(latent.shape[3:]) < least:
            raise ValueError(
                f"reference_motion: expected frames of at least {least} x {least} cells, found "
                f"{latent.shape[3]} x {latent.shape[4]}; make a larger video"
            )
        total = sum(FRAMES_AT_SCALE.values())
        missing = max(0, total - latent.shape[2])
        latent = functional.pad(latent[:, :, -total:], (0, 0, 0, 0, missing, 0))
        sides = [size // side for size, side in zip(latent.shape[3:], self.patch[1:])]
        tokens, places = [], []
        end = total
        for count, conv in zip(FRAMES_AT_SCALE.values(), self.children()):
            patches = conv(latent[:, :, end - count : end])
            tokens.append(tokens_of_patches(patches))
            axes = [_spread(end - count - total, count, patches.shape[2])]
            axes += [_spread(0, size, n) for size, n in zip(sides, patches.shape[3:])]
            places.append(axes)
            end -= count
        return torch.cat(tokens, dim=1), places


def _spread(start: int, length: int, count: int) -> Tensor:
    """Whole places from ``start`` on that are spread over ``length`` others, first and last among
    them if there is more than one.
    """
    return start + torch.arange(count) * (length - 1) // max(1, count - 1)


class S2VAttentionBlock(WanAttentionBlock):
    """A block in which patches that follow the video's have a time of their own."""

    def forward(
        self,
        x: Tensor,
        e: Tensor,
        freqs: Tensor,
        context: Tensor,
        context_img_len: int | None = None,
        transformer_options: Options | None = None,
        **beside: Any,
    ) -> Tensor:
        """As `WanAttentionBlock`; ``e [B, 2, 6, D]`` is for the first ``beside["video"]`` patches
        and for the others.
        """
        length, options = beside["video"], transformer_options
        mods = (self.modulation[:, None].to(e) + e).unbind(2)
        y = _modulated(self.norm1(x), mods[0], mods[1], length)
        x = _added(x, self.self_attn(y, freqs, options), mods[2], length)
        x = self.see(x, context, context_img_len, options)
        y = _modulated(self.norm2(x), mods[3], mods[4], length)
        return _added(x, self.ffn(y), mods[5], length)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor, length: int) -> Tensor:
    video = torch.addcmul(shift[:, :1], x[:, :length], 1 + scale[:, :1])
    return torch.cat([video, torch.addcmul(shift[:, 1:], x[:, length:], 1 + scale[:, 1:])], dim=1)


def _added(x: Tensor, y: Tensor, gate: Tensor, length: int) -> Tensor:
    video = torch.addcmul(x[:, :length], y[:, :length], gate[:, :1])
    return torch.cat([video, torch.addcmul(x[:, length:], y[:, length:], gate[:, 1:])], dim=1)


class S2VWanModel(WanModel):
    """Wan that speaks, with a picture, earlier frames and a video of poses.

    Args:
        audio_dim, audio_layers: Width and number of the audio encoder's layers.
        audio_heads: Tokens of a frame's sound, beside one that says nothing.
        audio_inject_layers: Blocks after which sound is heard; those that there are of `LISTENING`.
    """

    def __init__(
        self,
        model_type: str = "s2v",
        in_dim: int = 16,
        dim: int = 2048,
        ffn_dim: int = 8192,
        num_heads: int = 16,
        num_layers: int = 32,
        audio_dim: int = 1024,
        audio_layers: int = 25,
        audio_heads: int = 4,
        audio_inject_layers: Sequence[int] | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **options: Any,
    ) -> None:
        del model_type  # cross-attention is to text alone
        place = {"dtype": dtype, "device": device}
        sizes: Options = {"in_dim": in_dim, "dim": dim, "ffn_dim": ffn_dim, "num_heads": num_heads}
        super().__init__(
            model_type="t2v", num_layers=0, **sizes, **place, operations=operations, **options
        )
        self.num_layers = num_layers
        self.blocks = nn.ModuleList(
            S2VAttentionBlock(dim, ffn_dim, num_heads, **self.block_options)
            for _ in range(num_layers)
        )
        parts = {**place, "operations": operations}
        self.cond_encoder = operations.Conv3d(
            in_dim, dim, self.patch_size, stride=self.patch_size, **place
        )
        self.trainable_cond_mask = operations.Embedding(MOTION + 1, dim, **place)
        self.casual_audio_encoder = CausalAudioEncoder(  # named so in files
            audio_dim, audio_layers, dim, audio_heads, parts
        )
        listening = LISTENING if audio_inject_layers is None else audio_inject_layers
        self.listening = {
            block: number for number, block in enumerate(b for b in listening if b < num_layers)
        }
        qk_norm, eps = self.block_options["qk_norm"], self.block_options["eps"]
        looks = [AudioAttention(dim, dim, num_heads, qk_norm, eps, parts) for _ in self.listening]
        norms = [AdaptiveNorm(dim, parts) for _ in self.listening]
        self.audio_injector = nn.ModuleDict(
            {"injector": nn.ModuleList(looks), "injector_adain_layers": nn.ModuleList(norms)}
        )
        self.frame_packer = FramePacker(in_dim, dim, self.patch_size, parts)

    def _patches(self, x: Tensor, given: Options) -> tuple[Sequence[int], Tensor]:
        """Patches, with a video of poses ``[B, C, T, H, W]`` added, or with nothing of one."""
        grid, tokens = super()._patches(x, given)
        poses = given.get("control_video")
        led = torch.zeros_like(x) if poses is None else pad_to_patch_size(poses, self.patch_size)
        if led.shape[2:] != x.shape[2:]:
            raise ValueError(
                f"control_video: expected {_size(x)}, as the latent has, found {_size(led)}; give "
                "the latent of the node that gave the conditioning"
            )
        return grid, tokens + tokens_of_patches(self.cond_encoder(led))

    def forward_orig(
        self,
        x: Tensor,
        t: Tensor,
        context: Tensor,
        clip_fea: Tensor | None,
        freqs: Tensor,
        transformer_options: Options,
        **kwargs: Any,
    ) -> Tensor:
        """As `WanModel`, with ``reference_latent [B, C, 1, H, W]``, ``reference_motion
        [B, C, T, H, W]`` and ``audio_embed [B, layers, width, 4 T]``.
        """
        grid, tokens = self._patches(x, kwargs)
        length = tokens.shape[1]
        parts, turns = [tokens + self._kind(VIDEO, tokens)], [freqs]
        for patches, kind, places in self._behind(grid, **kwargs):
            parts.append((patches + self._kind(kind, tokens)).expand(tokens.shape[0], -1, -1))
            turns += [self._rotations(axes, freqs) for axes in places]
        e = self._time(torch.stack([t.flatten(), torch.zeros_like(t.flatten())], dim=1), tokens)
        shared = {
            "e": self.time_projection(e).unflatten(2, (6, self.dim)),
            "freqs": torch.cat(turns, dim=1),
            "transformer_options": transformer_options,
            "video": length,
        }
        text = self._context(context, clip_fea)
        sound = self._sound(kwargs.get("audio_embed"), grid[0], tokens)
        tokens = self._speak(torch.cat(parts, dim=1), text, shared, sound)
        return self.unpatchify(self.head(tokens[:, :length], e[:, :1]), grid)

    def _kind(self, kind: int, like: Tensor) -> Tensor:
        """What is added to patches that are of a kind."""
        return self.trainable_cond_mask(torch.tensor([kind], device=like.device)).to(like)

    def _behind(
        self,
        grid: Sequence[int],
        reference_latent: Tensor | None = None,
        reference_motion: Tensor | None = None,
        **kwargs: Any,
    ) -> list[tuple[Tensor, int, list[list[Tensor]]]]:
        """Patches that follow the video's, what they are of, and their places along each axis."""
        del kwargs
        found = []
        if reference_latent is not None:
            shown = self.patch_embedding(pad_to_patch_size(reference_latent, self.patch_size))
            time = max(REFERENCE_TIME, grid[0] + AWAY)
            axes = [torch.arange(size) for size in shown.shape[2:]]
            places = [[axes[0] + time, *axes[1:]]]
            found.append((tokens_of_patches(shown), REFERENCE, places))
        if reference_motion is not None:
            patches, places = self.frame_packer(reference_motion)
            found.append((patches, MOTION, places))
        return found

    def _rotations(self, axes: Sequence[Tensor], like: Tensor) -> Tensor:
        """Rotations ``[1, L, 1, D / 2, 2, 2]`` of places along each axis."""
        ids = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(1, -1, 3)
        return self.rope_embedder(ids.to(like.device, torch.float32)).movedim(1, 2).to(like)

    def _sound(
        self, heard: Tensor | None, frames: int, like: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens of what is heard, for as many frames as there are; it is silent after its end."""
        if heard is None:
            return None
        heard = heard[..., : frames * PARTS].to(like)
        heard = functional.pad(heard, (0, frames * PARTS - heard.shape[3]))
        return self.casual_audio_encoder(heard)

    def _speak(
        self, x: Tensor, context: Tensor, shared: Options, sound: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """The blocks, after some of which the video's patches hear."""
        looks: Any = self.audio_injector["injector"]
        norms: Any = self.audio_injector["injector_adain_layers"]
        options, length = shared["transformer_options"], shared["video"]
        for number, block in enumerate(self.blocks):
            x = self._run_block(number, block, x, context, shared)
            place = self.listening.get(number)
            if sound is None or place is None:
                continue
            whole, details = sound
            video = x[:, :length]
            video = video + looks[place](norms[place](video, whole), details, options)
            x = torch.cat([video, x[:, length:]], dim=1)
        return x


def _size(video: Tensor) -> str:
    frames, height, width = video.shape[2:]
    return f"{frames} frames of {height} x {width} cells"
