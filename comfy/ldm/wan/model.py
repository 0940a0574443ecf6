"""Wan 2.1 and 2.2: a transformer over patches of a video latent, with text and pictures beside it.

Custom nodes reach in through ``transformer_options``: ``patches_replace["dit"]`` with keys
``("double_block", i)``, ``rope_options``, and ``patches["attn1_output_patch"]`` and
``["attn2_output_patch"]``, which see what the attention to the video and to the text gives.
Source: https://github.com/Wan-Video/Wan2.1, https://arxiv.org/abs/2503.20314.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.ldm.flux.layers import EmbedND
from comfy.ldm.wan.layers import (  # noqa: F401 - packs look here for the layers
    CameraAdapter,
    Head,
    MLPProj,
    VaceWanAttentionBlock,
    WanAttentionBlock,
    WanI2VCrossAttention,
    WanSelfAttention,
    WanT2VCrossAttention,
)
from comfy.nn import patches
from comfy.nn.layout import tokens_of_patches
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped

IMAGE_WIDTH = 1280  # of the states of CLIP ViT-H
WITH_IMAGE = ("i2v", "camera")
Options = dict[str, Any]


def sinusoidal_embedding_1d(dim: int, position: Tensor) -> Tensor:
    """Waves ``[N, dim]`` of positions ``[N]``: cosines, then sines."""
    return timestep_embedding(position, dim)


class WanModel(nn.Module):
    """Predicts the flow of a noisy video latent from a time 0..1000 and text tokens.

    Args:
        model_type: "t2v"; "i2v" attends to tokens of a picture, too; "camera" and "camera_2.2"
            follow a camera's rays.
        patch_size: Frames, rows and columns of a patch.
        in_dim, out_dim: Channels of the input (with what stands beside the latent) and output.
        text_dim, image_dim: Widths of the text tokens and of the picture's.
        flf_pos_embed_token_number: Positions of the tokens of two pictures, if there are such.
        in_dim_ref_conv: Channels of a reference latent that is one more frame.
        in_dim_control_adapter: Channels of a camera's rays.
    """

    reads_patches = frozenset({"dit", patches.OUTPUT, patches.CROSS_OUTPUT})

    def __init__(
        self,
        model_type: str = "t2v",
        patch_size: Sequence[int] = (1, 2, 2),
        text_len: int = 512,
        in_dim: int = 16,
        dim: int = 2048,
        ffn_dim: int = 8192,
        freq_dim: int = 256,
        text_dim: int = 4096,
        out_dim: int = 16,
        num_heads: int = 16,
        num_layers: int = 32,
        qk_norm: bool = True,
        cross_attn_norm: bool = True,
        eps: float = 1e-6,
        image_dim: int = IMAGE_WIDTH,
        flf_pos_embed_token_number: int | None = None,
        in_dim_ref_conv: int | None = None,
        in_dim_control_adapter: int | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        del text_len  # a fact about training
        super().__init__()
        if dim % num_heads or dim // num_heads % 2:
            raise ValueError(
                f"{dim} channels are not divisible into {num_heads} heads of even size"
            )
        place = {"dtype": dtype, "device": device}
        self.dtype, self.dim, self.freq_dim, self.out_dim = dtype, dim, freq_dim, out_dim
        self.model_type, self.patch_size = model_type, tuple(patch_size)
        self.num_heads, self.num_layers = num_heads, num_layers
        self.patch_embedding = operations.Conv3d(
            in_dim, dim, self.patch_size, stride=self.patch_size, **place
        )
        self.text_embedding = nn.Sequential(
            operations.Linear(text_dim, dim, **place),
            nn.GELU(approximate="tanh"),
            operations.Linear(dim, dim, **place),
        )
        self.time_embedding = nn.Sequential(
            operations.Linear(freq_dim, dim, **place),
            nn.SiLU(),
            operations.Linear(dim, dim, **place),
        )
        self.time_projection = nn.Sequential(nn.SiLU(), operations.Linear(dim, dim * 6, **place))
        self.block_options = {
            "qk_norm": qk_norm, "cross_attn_norm": cross_attn_norm, "eps": eps,
            "operations": operations, **place,
        }  # fmt: skip
        with_image = model_type in WITH_IMAGE
        self.blocks = nn.ModuleList(
            WanAttentionBlock(dim, ffn_dim, num_heads, with_image=with_image, **self.block_options)
            for _ in range(num_layers)
        )
        self.head = Head(dim, math.prod(self.patch_size) * out_dim, eps, operations, **place)
        side = 2 * (dim // num_heads // 6)
        axes = [dim // num_heads - 2 * side, side, side]
        self.rope_embedder = EmbedND(dim // num_heads, 10000.0, axes)
        self.img_emb: MLPProj | None = None
        if with_image:
            positions = flf_pos_embed_token_number
            self.img_emb = MLPProj(image_dim, dim, positions, operations, **place)
        self.ref_conv: nn.Module | None = None
        space = self.patch_size[1:]
        if in_dim_ref_conv is not None:
            self.ref_conv = operations.Conv2d(in_dim_ref_conv, dim, space, stride=space, **place)
        self.control_adapter: CameraAdapter | None = None
        if in_dim_control_adapter is not None:
            adapter = CameraAdapter(in_dim_control_adapter, dim, space, operations, **place)
            self.control_adapter = adapter

    # -- positions -------------------------------------------------------------------------------

    def rope_encode(
        self, frames: int, height: int, width: int, like: Tensor, options: Options | None = None
    ) -> Tensor:
        """Rotations ``[1, L, 1, D / 2, 2, 2]`` of the patches of a latent's size."""
        changes = (options or {}).get("rope_options") or {}
        sizes = [
            (size + patch // 2) // patch
            for size, patch in zip((frames, height, width), self.patch_size)
        ]
        ids = torch.zeros(*sizes, 3, device=like.device, dtype=torch.float32)
        for axis, (size, name) in enumerate(zip(sizes, ("t", "y", "x"))):
            start = changes.get(f"shift_{name}", 0.0)
            last = (size - 1.0) * changes.get(f"scale_{name}", 1.0) + start
            places = torch.linspace(start, last, size, device=like.device, dtype=torch.float32)
            ids[..., axis] = places.reshape([-1 if other == axis else 1 for other in range(3)])
        return self.rope_embedder(ids.reshape(1, -1, 3)).movedim(1, 2)

    # -- forward ---------------------------------------------------------------------------------

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        clip_fea: Tensor | None = None,
        time_dim_concat: Tensor | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, T, H, W]``, with what stands beside it.
            timestep: Times 0..1000 ``[B]``, or ``[B, T]`` for each frame.
            context: Text tokens ``[B, L, D]``.
            clip_fea: Tokens of a picture ``[B, Li, Di]``.
            time_dim_concat: Frames behind those of ``x``, which are looked at only.
            **kwargs: ``reference_latent [B, C, H, W]``, ``camera_conditions``.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, timestep, context, clip_fea, time_dim_concat, options, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        clip_fea: Tensor | None = None,
        time_dim_concat: Tensor | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        frames, height, width = x.shape[2:]
        x = pad_to_patch_size(x, self.patch_size)
        if time_dim_concat is not None:
            behind = pad_to_patch_size(time_dim_concat, self.patch_size)
            if (behind.shape[1], *behind.shape[3:]) != (x.shape[1], *x.shape[3:]):
                raise ValueError(
                    f"time_dim_concat: expected frames {_each(x)}, as this network takes them, "
                    f"found {_each(behind)}; frames behind the video (WanPhantomSubjectToVideo) "
                    "are for text-to-video models and the size of the latent"
                )
            x = torch.cat([x, behind.expand(x.shape[0], *behind.shape[1:])], dim=2)
        length = x.shape[2]
        if self.ref_conv is not None and kwargs.get("reference_latent") is not None:
            length += 1
        freqs = self.rope_encode(length, height, width, x, transformer_options)
        out = self.forward_orig(
            x, timestep, context, clip_fea, freqs, transformer_options or {}, **kwargs
        )
        return out[:, :, :frames, :height, :width]

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
        """The blocks over a whole number of patches; gives a latent of that size."""
        grid, tokens = self._patches(x, kwargs)
        e = self._time(t, tokens)
        shared = {
            "e": self.time_projection(e).unflatten(2, (6, self.dim)),
            "freqs": freqs,
            "context_img_len": None if clip_fea is None else clip_fea.shape[-2],
            "transformer_options": transformer_options,
        }
        before = 0
        reference = kwargs.get("reference_latent")
        if self.ref_conv is not None and reference is not None:
            seen = tokens_of_patches(self.ref_conv(reference))
            seen = seen.expand(tokens.shape[0], -1, -1)
            tokens, before = torch.cat([seen, tokens], dim=1), seen.shape[1]
        context = self._context(context, clip_fea)
        tokens = self._run_blocks(tokens, context, shared, grid=grid, **kwargs)
        return self.unpatchify(self.head(tokens, e)[:, before:], grid)

    def _patches(self, x: Tensor, given: Options) -> tuple[Sequence[int], Tensor]:
        """How many patches there are along each axis, and their tokens ``[B, L, D]``, with what is
        given beside the latent."""
        patches = self.patch_embedding(x)
        rays = given.get("camera_conditions")
        if self.control_adapter is not None and rays is not None:
            patches = patches + self.control_adapter(rays).to(patches)
        return patches.shape[2:], tokens_of_patches(patches)

    def _time(self, t: Tensor, like: Tensor) -> Tensor:
        """Embedding ``[B, F, D]`` of a time for each of F stretches."""
        waves = sinusoidal_embedding_1d(self.freq_dim, t.flatten()).to(like.dtype)
        return self.time_embedding(waves).reshape(t.shape[0], -1, self.dim)

    def _context(self, context: Tensor, clip_fea: Tensor | None) -> Tensor:
        """Text tokens, with those of a picture before them."""
        text = self.text_embedding(context)
        if clip_fea is None or self.img_emb is None:
            return text
        seen = self.img_emb(clip_fea)
        return torch.cat([seen.expand(text.shape[0], -1, -1), text], dim=1)

    def _run_blocks(self, x: Tensor, context: Tensor, shared: Options, **kwargs: Any) -> Tensor:
        del kwargs  # of sub-classes
        for number, block in enumerate(self.blocks):
            x = self._run_block(number, block, x, context, shared)
        return x

    def _run_block(
        self, number: int, block: nn.Module, x: Tensor, context: Tensor, shared: Options
    ) -> Tensor:
        """One block, or what a custom node put in its place."""
        options = shared["transformer_options"]
        options["total_blocks"], options["block_type"] = len(self.blocks), "double"
        options["block_index"] = number
        table = (options.get("patches_replace") or {}).get("dit") or {}
        if ("double_block", number) not in table:
            return block(x, context=context, **shared)

        def original(args: Options) -> Options:
            changed = {**shared, "e": args["vec"], "freqs": args["pe"]}
            return {"img": block(args["img"], context=args["txt"], **changed)}

        args = {
            "img": x, "txt": context, "vec": shared["e"], "pe": shared["freqs"],
            "transformer_options": options,
        }  # fmt: skip
        out = table[("double_block", number)](args, {"original_block": original})
        return out["img"]

    def unpatchify(self, x: Tensor, grid: Sequence[int]) -> Tensor:
        """Patches ``[B, L, p * C]`` as a latent ``[B, C, T, H, W]``."""
        whole = x.unflatten(-1, (*self.patch_size, self.out_dim)).unflatten(1, tuple(grid))
        # Batch, three axes of patches, three within a patch, channels.
        whole = whole.permute(0, 7, 1, 4, 2, 5, 3, 6)
        return whole.flatten(6, 7).flatten(4, 5).flatten(2, 3)


class VaceWanModel(WanModel):
    """Wan with control videos: blocks of their own, each of which adds to the main stream.

    Args:
        vace_layers: Number of those blocks; they are spread evenly over the main ones.
        vace_in_dim: Channels of a control video with its masks.
    """

    def __init__(
        self,
        model_type: str = "vace",
        dim: int = 2048,
        ffn_dim: int = 8192,
        num_heads: int = 16,
        num_layers: int = 32,
        vace_layers: int | None = None,
        vace_in_dim: int | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **options: Any,
    ) -> None:
        del model_type  # cross-attention is to text alone
        sizes: Options = {
            "dim": dim,
            "ffn_dim": ffn_dim,
            "num_heads": num_heads,
            "num_layers": num_layers,
        }
        place = {"dtype": dtype, "device": device}
        super().__init__(model_type="t2v", **sizes, **place, operations=operations, **options)
        count = num_layers if vace_layers is None else vace_layers
        step = max(1, num_layers // count)
        self.vace_layers_mapping = {
            block: number for number, block in enumerate(range(0, num_layers, step))
        }
        self.vace_blocks = nn.ModuleList(
            VaceWanAttentionBlock(
                dim, ffn_dim, num_heads, is_first=number == 0, **self.block_options
            )
            for number in range(count)
        )
        self.vace_patch_embedding = operations.Conv3d(
            vace_in_dim, dim, self.patch_size, stride=self.patch_size, **place
        )

    def _run_blocks(
        self,
        x: Tensor,
        context: Tensor,
        shared: Options,
        vace_context: Tensor | None = None,
        vace_strength: Sequence[float] = (1.0,),
        **kwargs: Any,
    ) -> Tensor:
        """The blocks, with control videos ``vace_context [B, N, C, T, H, W]`` and strengths."""
        if vace_context is None:
            return super()._run_blocks(x, context, shared, **kwargs)
        controls = [self._control_tokens(video) for video in vace_context.unbind(1)]
        first = x
        for number, block in enumerate(self.blocks):
            x = self._run_block(number, block, x, context, shared)
            own = self.vace_layers_mapping.get(number)
            if own is None or own >= len(self.vace_blocks):
                continue
            for place, strength in zip(range(len(controls)), vace_strength):
                added, controls[place] = self.vace_blocks[own](
                    controls[place], x=first, context=context, **shared
                )
                x = x + added * strength
        return x

    def _control_tokens(self, video: Tensor) -> Tensor:
        padded = pad_to_patch_size(video, self.patch_size)
        return tokens_of_patches(self.vace_patch_embedding(padded))


def _each(video: Tensor) -> str:
    channels, _, height, width = video.shape[1:]
    return f"of {channels} channels and {height} x {width} cells"
