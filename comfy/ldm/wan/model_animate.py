"""Wan Animate: a person moves as one in a video does, led by poses and by pictures of a face.

Poses are added to the patches. A motion encoder gives a few numbers for each picture of the face,
along directions that are learned and made orthogonal; after every fifth block the patches of a
frame attend to those of its four pictures.
Source: https://arxiv.org/abs/2509.14055; the motion encoder: https://arxiv.org/abs/2203.09043.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.common_dit import pad_to_patch_size, rms_norm
from comfy.ldm.wan.model import WanModel
from comfy.nn import attention
from comfy.nn.layout import tokens_of_patches

BETWEEN = 5  # blocks from one look at the face to the next
PICTURES_AT_ONCE = 8  # that the motion encoder reads
SLOPE, GAIN = 0.2, math.sqrt(2.0)  # of its activations
NORM_EPS = 1e-6
SMALLEST_SIDE = 4  # pixels of a picture before the last convolution
PAST = 2  # frames that a convolution over time sees beside its own
Options = dict[str, Any]


class Blur(nn.Module):
    """A small filter over each channel.

    Args:
        padding: Rows and columns that are added on each side.
    """

    def __init__(self, padding: int, **place: Any) -> None:
        super().__init__()
        self.padding = padding
        self.register_buffer("kernel", torch.empty(4, 4, **place))

    kernel: Tensor

    def forward(self, x: Tensor) -> Tensor:
        channels = x.shape[1]
        kernel = self.kernel.to(x).expand(channels, 1, -1, -1)
        return functional.conv2d(x, kernel, padding=self.padding, groups=channels)


class BiasedLeak(nn.Module):
    """A bias, then a leaky rectifier."""

    def __init__(self, width: int, **place: Any) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(1, width, 1, 1, **place))

    def forward(self, x: Tensor) -> Tensor:
        return functional.leaky_relu(x + self.bias.to(x), SLOPE) * GAIN


class ScaledConv(nn.Sequential):
    """A convolution of weights of spread 1, so that what it gets is made smaller first.

    Args:
        halves: Whether it blurs and takes every second row and column.
        is_active: Whether an activation follows.
    """

    def __init__(
        self, width: int, out: int, kernel: int, parts: Options, halves: bool = False,
        is_active: bool = True,
    ) -> None:  # fmt: skip
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        padding = 0 if halves else kernel // 2
        conv = parts["operations"].Conv2d(
            width, out, kernel, stride=1 + halves, padding=padding, bias=False, **place
        )
        blur = [Blur((kernel + 1) // 2, **place)] if halves else []
        leak = [BiasedLeak(out, **place)] if is_active else []
        super().__init__(*blur, conv, *leak)
        self.factor = _factor(conv)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.factor
        for layer in self:
            x = layer(x)
        return x


def _factor(layer: nn.Module) -> float:
    """What scales a layer of weights of spread 1: one over the root of what a value is made of."""
    weight: Any = layer.weight
    return 1 / math.sqrt(math.prod(weight.shape[1:]))


class Residual(nn.Module):
    """Two convolutions, of which the second halves the picture, beside a plain one."""

    def __init__(self, width: int, out: int, parts: Options) -> None:
        super().__init__()
        self.conv1 = ScaledConv(width, width, 3, parts)
        self.conv2 = ScaledConv(width, out, 3, parts, halves=True)
        self.skip = ScaledConv(width, out, 1, parts, halves=True, is_active=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv2(self.conv1(x)) + self.skip(x)) / GAIN


class MotionEncoder(nn.Module):
    """Pictures of a face ``[N, 3, side, side]`` in -1..1 to its motion ``[N, style]``.

    Args:
        widths: Channels at full size and after each halving.
        style_dim: Channels of a whole picture; motion_dim: directions.
    """

    def __init__(
        self, widths: Sequence[int], style_dim: int, motion_dim: int, depth: int, parts: Options
    ) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        operations = parts["operations"]
        self.side = SMALLEST_SIDE << (len(widths) - 1)
        convs: list[nn.Module] = [ScaledConv(3, widths[0], 1, parts)]
        convs += [Residual(*pair, parts) for pair in itertools.pairwise(widths)]
        convs += [operations.Conv2d(widths[-1], style_dim, SMALLEST_SIDE, bias=False, **place)]
        ends = [style_dim] * (depth - 1) + [motion_dim]
        layers = [operations.Linear(style_dim, end, **place) for end in ends]
        net = nn.ModuleDict({"convs": nn.ModuleList(convs)})
        self.enc = nn.ModuleDict({"net_app": net, "fc": nn.ModuleList(layers)})
        self.dec = nn.Module()
        self.dec.direction = nn.Module()
        weight = nn.Parameter(torch.empty(style_dim, motion_dim, **place))
        self.dec.direction.register_parameter("weight", weight)

    def forward(self, pictures: Tensor) -> Tensor:
        enc: Any = self.enc
        *convs, last = enc["net_app"]["convs"]
        x = pictures
        for conv in convs:
            x = conv(x)
        x = last(x * _factor(last)).flatten(1)
        for layer in enc["fc"]:
            x = layer(x * _factor(layer))
        directions = self.dec.get_parameter("direction.weight").to(x.device, torch.float32)
        orthogonal = torch.linalg.qr(directions + 1e-8).Q
        return (x.float() @ orthogonal.T).to(pictures.dtype)


class CausalConv1d(nn.Module):
    """A convolution over time that sees the past only, of which the first stands for what was
    before."""

    def __init__(self, width: int, out: int, stride: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.conv = parts["operations"].Conv1d(width, out, PAST + 1, stride=stride, **place)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, D]``."""
        x = functional.pad(x.transpose(1, 2), (PAST, 0), mode="replicate")
        return self.conv(x).transpose(1, 2)


class FaceEncoder(nn.Module):
    """Motion ``[B, T, D]`` to a few tokens ``[B, T / 4, heads + 1, dim]`` for each latent frame."""

    def __init__(self, width: int, hidden: int, dim: int, heads: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.heads = heads
        self.conv1_local = CausalConv1d(width, hidden * heads, 1, parts)
        self.conv2 = CausalConv1d(hidden, hidden, 2, parts)
        self.conv3 = CausalConv1d(hidden, hidden, 2, parts)
        self.out_proj = parts["operations"].Linear(hidden, dim, **place)
        self.padding_tokens = nn.Parameter(torch.empty(1, 1, 1, dim, **place))

    def forward(self, motion: Tensor) -> Tensor:
        batch = motion.shape[0]
        x = self.conv1_local(motion).unflatten(2, (self.heads, -1))
        x = activated(x.transpose(1, 2).flatten(0, 1))
        x = activated(self.conv3(activated(self.conv2(x))))
        x = self.out_proj(x).unflatten(0, (batch, self.heads)).transpose(1, 2)
        return torch.cat([x, self.padding_tokens.to(x).expand(batch, x.shape[1], 1, -1)], dim=2)


def activated(x: Tensor) -> Tensor:
    return functional.silu(_normed(x))


def _normed(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=NORM_EPS)


class HeadNorm(nn.Module):
    """Division of each head by its root mean square, times a weight."""

    def __init__(self, width: int, **place: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, **place))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x), NORM_EPS)


class FaceBlock(nn.Module):
    """Attention of the patches of each frame to the tokens of its face."""

    def __init__(self, dim: int, heads: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        linear = parts["operations"].Linear
        self.heads = heads
        self.linear1_kv = linear(dim, 2 * dim, **place)
        self.linear1_q = linear(dim, dim, **place)
        self.linear2 = linear(dim, dim, **place)
        self.q_norm, self.k_norm = HeadNorm(dim // heads, **place), HeadNorm(dim // heads, **place)

    def forward(self, x: Tensor, face: Tensor, options: Options | None = None) -> Tensor:
        """What is added to patches ``x [B, T * n, D]``; ``face [B, T, m, D]``."""
        batch, frames = face.shape[:2]
        k, v = self.linear1_kv(_normed(face)).flatten(0, 1).chunk(2, dim=-1)
        q = self.linear1_q(_normed(x)).unflatten(1, (frames, -1)).flatten(0, 1)
        q = self.q_norm(q.unflatten(-1, (self.heads, -1))).flatten(2)
        k = self.k_norm(k.unflatten(-1, (self.heads, -1))).flatten(2)
        out = attention.optimized_attention(q, k, v, self.heads, transformer_options=options)
        return self.linear2(out.unflatten(0, (batch, frames)).flatten(1, 2))


class AnimateWanModel(WanModel):
    """Wan that looks at a picture, at poses and at pictures of a face.

    Args:
        motion_widths, style_dim, motion_dim, motion_depth: Of the motion encoder.
        face_hidden, face_heads: Of the face encoder.
    """

    def __init__(
        self,
        model_type: str = "animate",
        dim: int = 2048,
        num_heads: int = 16,
        num_layers: int = 32,
        patch_size: Sequence[int] = (1, 2, 2),
        motion_widths: Sequence[int] = (32, 64, 128, 256, 512, 512, 512, 512),
        style_dim: int = 512,
        motion_dim: int = 20,
        motion_depth: int = 5,
        face_hidden: int = 1024,
        face_heads: int = 4,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **options: Any,
    ) -> None:
        del model_type  # what it looks at beside is of this class
        place = {"dtype": dtype, "device": device}
        sizes: Options = {"dim": dim, "num_heads": num_heads, "num_layers": num_layers}
        sizes["patch_size"] = patch_size
        super().__init__(model_type="i2v", **sizes, **place, operations=operations, **options)
        parts = {**place, "operations": operations}
        self.pose_patch_embedding = operations.Conv3d(
            self.out_dim, dim, self.patch_size, stride=self.patch_size, **place
        )
        self.motion_encoder = MotionEncoder(
            motion_widths, style_dim, motion_dim, motion_depth, parts
        )
        self.face_encoder = FaceEncoder(style_dim, face_hidden, dim, face_heads, parts)
        count = math.ceil(num_layers / BETWEEN)
        blocks = nn.ModuleList(FaceBlock(dim, num_heads, parts) for _ in range(count))
        self.face_adapter = nn.ModuleDict({"fuser_blocks": blocks})

    def _patches(self, x: Tensor, given: Options) -> tuple[Sequence[int], Tensor]:
        """Patches, with poses ``[B, C, T, H, W]`` added after the first frame, which shows the
        person."""
        grid, tokens = super()._patches(x, given)
        poses = given.get("pose_latents")
        if poses is None:
            return grid, tokens
        led = self.pose_patch_embedding(pad_to_patch_size(poses, self.patch_size))
        if tuple(led.shape[3:]) != tuple(grid[1:]):
            raise ValueError(
                f"pose_video: expected {grid[1]} x {grid[2]} patches a frame, as the latent has, "
                f"found {led.shape[3]} x {led.shape[4]}; give WanAnimateToVideo's own latent"
            )
        led = led[:, :, : grid[0] - 1]
        missing = grid[0] - 1 - led.shape[2]
        led = functional.pad(led, (0, 0, 0, 0, 1, missing))
        return grid, tokens + tokens_of_patches(led)

    def motion(self, pictures: Tensor, frames: int) -> Tensor:
        """Tokens ``[B, frames, m, dim]`` of pictures of a face ``[B, 3, T, side, side]``: none for
        the first frame and those that no picture tells of.

        Raises:
            ValueError: They are of another size.
        """
        side = self.motion_encoder.side
        if tuple(pictures.shape[3:]) != (side, side):
            raise ValueError(
                f"face_video: expected pictures of {side} x {side} pixels, found "
                f"{pictures.shape[3]} x {pictures.shape[4]}; give them to WanAnimateToVideo"
            )
        flat = pictures.transpose(1, 2).flatten(0, 1)
        found = torch.cat([self.motion_encoder(some) for some in flat.split(PICTURES_AT_ONCE)])
        tokens = self.face_encoder(found.unflatten(0, (pictures.shape[0], -1)))
        tokens = tokens[:, : frames - 1]
        return functional.pad(tokens, (0, 0, 0, 0, 1, frames - 1 - tokens.shape[1]))

    def _run_blocks(
        self,
        x: Tensor,
        context: Tensor,
        shared: Options,
        face_pixel_values: Tensor | None = None,
        grid: Sequence[int] = (),
        **kwargs: Any,
    ) -> Tensor:
        if face_pixel_values is None:
            return super()._run_blocks(x, context, shared, grid=grid, **kwargs)
        face = self.motion(face_pixel_values, grid[0])
        looks: Any = self.face_adapter["fuser_blocks"]
        for number, block in enumerate(self.blocks):
            x = self._run_block(number, block, x, context, shared)
            if number % BETWEEN == 0:
                x = x + looks[number // BETWEEN](x, face, shared["transformer_options"])
        return x
