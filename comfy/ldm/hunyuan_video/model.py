"""HunyuanVideo and HunyuanImage 2.1: the blocks of FLUX over patches of a video or picture, the
text's tokens behind them.

Custom nodes reach in as into FLUX. Source: Kong et al. 2024, https://arxiv.org/abs/2412.03603.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.ldm.flux.layers import (
    DoubleStreamBlock,
    EmbedND,
    LastLayer,
    MLPEmbedder,
    SingleStreamBlock,
    timestep_embedding,
)
from comfy.ldm.flux.model import replaceable
from comfy.ldm.hunyuan_video.inputs import ByT5Mapper, VisionProjection
from comfy.ldm.hunyuan_video.token_refiner import TokenRefiner
from comfy.nn import patches
from comfy.nn.layout import tokens_of_patches
from comfy.nn.residuals import add_at
from comfy.nn.wrappers import run_wrapped

TIME_WAVES = 256
REFINER_LAYERS = 2
TEXT, BYT5, PICTURE, KINDS = 0, 1, 2, 3  # what tokens are of
LARGEST_TIME = 1000.0
Options = dict[str, Any]


class PatchEmbed(nn.Module):
    """Patches of a picture or video to tokens."""

    def __init__(self, patch: Sequence[int], channels: int, width: int, parts: Options) -> None:
        super().__init__()
        kind = parts["operations"].Conv3d if len(patch) == 3 else parts["operations"].Conv2d
        size = tuple(patch)
        self.proj = kind(
            channels, width, size, stride=size, dtype=parts["dtype"], device=parts["device"]
        )

    def forward(self, x: Tensor) -> Tensor:
        return tokens_of_patches(self.proj(x))


class HunyuanVideo(nn.Module):
    """Predicts the flow of a noisy video from a time 0..1000, text tokens and pooled text.

    Args:
        patch_size: Frames, rows and columns of a patch; rows and columns for pictures.
        vec_in_dim: Width of the pooled text y; None for networks without.
        axes_dim: Channels of a head for each axis of positions.
        byt5: Whether it takes states of ByT5 of the texts to be written.
        meanflow: Whether it is told the time it goes to, too; meanflow_sum: whether both times add
            up, or their mean counts.
        use_cond_type_embedding: Whether tokens say what they are of: text, ByT5, a picture.
        vision_in_dim: Width of an image encoder's states; None for networks without.
        The others: as of FLUX.
    """

    reads_patches = frozenset({"dit", patches.OUTPUT})
    reads_control = frozenset({"input", "output"})

    def __init__(
        self,
        in_channels: int = 16,
        out_channels: int = 16,
        patch_size: Sequence[int] = (1, 2, 2),
        vec_in_dim: int | None = 768,
        context_in_dim: int = 4096,
        hidden_size: int = 3072,
        mlp_ratio: float = 4.0,
        num_heads: int = 24,
        depth: int = 20,
        depth_single_blocks: int = 40,
        axes_dim: Sequence[int] = (16, 56, 56),
        theta: float = 256,
        qkv_bias: bool = True,
        guidance_embed: bool = True,
        byt5: bool = False,
        meanflow: bool = False,
        use_cond_type_embedding: bool = False,
        vision_in_dim: int | None = None,
        meanflow_sum: bool = False,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        del kwargs  # what else a configuration says
        if sum(axes_dim) * num_heads != hidden_size:
            raise ValueError(
                f"axes_dim {list(axes_dim)} of {num_heads} heads do not add up to {hidden_size} "
                "channels"
            )
        parts = {"dtype": dtype, "device": device, "operations": operations}
        self.dtype, self.patch_size = dtype, list(patch_size)
        self.out_channels, self.vec_in_dim = out_channels, vec_in_dim
        self.pe_embedder = EmbedND(hidden_size // num_heads, theta, axes_dim)
        self.img_in = PatchEmbed(patch_size, in_channels, hidden_size, parts)
        self.time_in = MLPEmbedder(TIME_WAVES, hidden_size, **parts)
        self.vector_in: MLPEmbedder | None = None
        if vec_in_dim is not None:
            self.vector_in = MLPEmbedder(vec_in_dim, hidden_size, **parts)
        self.guidance_in: MLPEmbedder | None = None
        if guidance_embed:
            self.guidance_in = MLPEmbedder(TIME_WAVES, hidden_size, **parts)
        self.meanflow_sum = meanflow_sum
        self.time_r_in = MLPEmbedder(TIME_WAVES, hidden_size, **parts) if meanflow else None
        self.byt5_in = ByT5Mapper(hidden_size, parts) if byt5 else None
        self.vision_in: VisionProjection | None = None
        if vision_in_dim is not None:
            self.vision_in = VisionProjection(vision_in_dim, hidden_size, parts)
        self.cond_type_embedding: nn.Module | None = None
        if use_cond_type_embedding:
            place = {"dtype": dtype, "device": device}
            self.cond_type_embedding = operations.Embedding(KINDS, hidden_size, **place)
        self.txt_in = TokenRefiner(context_in_dim, hidden_size, num_heads, REFINER_LAYERS, parts)
        sizes = (hidden_size, num_heads, mlp_ratio)
        self.double_blocks = nn.ModuleList(
            DoubleStreamBlock(*sizes, qkv_bias, flipped_img_txt=True, **parts) for _ in range(depth)
        )
        self.single_blocks = nn.ModuleList(
            SingleStreamBlock(*sizes, **parts) for _ in range(depth_single_blocks)
        )
        self.final_layer = LastLayer(hidden_size, 1, math.prod(patch_size) * out_channels, **parts)

    # -- positions and patches -------------------------------------------------------------------

    def positions(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Frame, row and column of each patch ``[B, L, axes]`` of a latent of a shape."""
        counts = [size // patch for size, patch in zip(shape[2:], self.patch_size)]
        lines = [torch.arange(n, device=like.device, dtype=torch.float32) for n in counts]
        places = torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1)
        return places.reshape(1, -1, len(counts)).repeat(shape[0], 1, 1)

    def unpatched(self, tokens: Tensor, shape: Sequence[int]) -> Tensor:
        """A latent of patches ``[B, L, C * p]``."""
        counts = [size // patch for size, patch in zip(shape[2:], self.patch_size)]
        axes = len(counts)
        x = tokens.reshape(tokens.shape[0], *counts, self.out_channels, *self.patch_size)
        order = [0, axes + 1]
        for axis in range(axes):
            order += [1 + axis, axes + 2 + axis]
        sizes = [n * p for n, p in zip(counts, self.patch_size)]
        return x.permute(order).reshape(tokens.shape[0], self.out_channels, *sizes)

    # -- forward ---------------------------------------------------------------------------------

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        txt_byt5: Tensor | None = None,
        clip_fea: Tensor | None = None,
        guidance: Tensor | None = None,
        attention_mask: Tensor | None = None,
        guiding_frame_index: Tensor | None = None,
        ref_latent: Tensor | None = None,
        disable_time_r: bool = False,
        control: Options | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, T, H, W]``, for pictures ``[B, C, H, W]``.
            timestep: Times ``[B]`` in 0..1000.
            context, y: Text tokens ``[B, L, D]`` and pooled text ``[B, V]``.
            txt_byt5, clip_fea: States of ByT5 and of an image encoder ``[B, L, D]``.
            guidance: Distilled guidance strength ``[B]``.
            attention_mask: 1 for tokens, 0 for padding ``[B, L]``.
            guiding_frame_index: Time of the first frame, where it is given.
            ref_latent: A picture to look at ``[B, C, 1, H, W]``.
            disable_time_r: Whether the time it goes to is not told.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, timestep, context, y, txt_byt5, clip_fea, guidance, attention_mask,
            guiding_frame_index, ref_latent, disable_time_r, control, options, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        txt_byt5: Tensor | None = None,
        clip_fea: Tensor | None = None,
        guidance: Tensor | None = None,
        attention_mask: Tensor | None = None,
        guiding_frame_index: Tensor | None = None,
        ref_latent: Tensor | None = None,
        disable_time_r: bool = False,
        control: Options | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        del kwargs
        options = {} if transformer_options is None else transformer_options
        whole = pad_to_patch_size(x, tuple(self.patch_size))
        img, ids = self.img_in(whole), self.positions(whole.shape, x)
        before = 0
        if ref_latent is not None:
            reference = pad_to_patch_size(ref_latent, tuple(self.patch_size))
            seen, places = self.img_in(reference), self.positions(reference.shape, x)
            places[..., 0] = -1  # before the first frame, and beside the picture
            places[..., 2] += whole.shape[-1] // self.patch_size[-1]
            img, ids = torch.cat([seen, img], dim=1), torch.cat([places, ids], dim=1)
            before = seen.shape[1]
        goal = None if disable_time_r else self._goal(timestep, options)
        vec = self._vector(timestep, goal, guidance, y, guiding_frame_index, img)
        shared: Options = {"transformer_options": options}
        dims = None
        if guiding_frame_index is not None:  # the given frame has a time of its own
            frame = before + math.prod(whole.shape[-2:]) // math.prod(self.patch_size[-2:])
            dims = [(0, frame, 0), (frame, None, 1)]
        txt = self.txt_in(context, timestep, attention_mask)
        txt, attention_mask = self._with_others(txt, attention_mask, txt_byt5, clip_fea)
        text_ids = ids.new_zeros(ids.shape[0], txt.shape[1], ids.shape[2])
        shared["pe"] = self.pe_embedder(torch.cat([ids, text_ids], dim=1))
        shared["attn_mask"] = _mask(attention_mask, img)
        img, txt = self._double_stream(img, txt, vec, control, dims, shared)
        both = self._single_stream(torch.cat([img, txt], dim=1), img.shape[1], vec, control, dims,
                                   shared)  # fmt: skip
        out = self.final_layer(both[:, : img.shape[1]], vec, modulation_dims=dims)
        out = self.unpatched(out[:, before:], whole.shape)
        return out[tuple(slice(size) for size in (*out.shape[:2], *x.shape[2:]))]

    def _with_others(
        self,
        txt: Tensor,
        mask: Tensor | None,
        txt_byt5: Tensor | None,
        clip_fea: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Text tokens with those of ByT5 and of a picture, none of which is hidden, and the mask.

        Where tokens say what they are of, the picture's come first and the text's last.
        """
        kinds = self.cond_type_embedding
        front: list[Tensor] = []
        back: list[Tensor] = []
        if kinds is not None:
            txt = self._of_kind(txt, TEXT)
        if self.byt5_in is not None and txt_byt5 is not None:
            (back if kinds is None else front).append(self._of_kind(self.byt5_in(txt_byt5), BYT5))
        if self.vision_in is not None and clip_fea is not None:
            front.insert(0, self._of_kind(self.vision_in(clip_fea), PICTURE))
        if mask is not None:
            before, behind = (
                mask.new_ones(mask.shape[0], sum(part.shape[1] for part in parts))
                for parts in (front, back)
            )
            mask = torch.cat([before, mask, behind], dim=1)
        return torch.cat([*front, txt, *back], dim=1), mask

    def _of_kind(self, tokens: Tensor, kind: int) -> Tensor:
        if self.cond_type_embedding is None:
            return tokens
        numbers = torch.full(tokens.shape[:2], kind, dtype=torch.long, device=tokens.device)
        return tokens + self.cond_type_embedding(numbers).to(tokens.dtype)

    def _goal(self, times: Tensor, options: Options) -> Tensor | None:
        """The time ``[1]`` that a step goes to, for networks that are told; None outside a run."""
        sigmas, steps = options.get("sigmas"), options.get("sample_sigmas")
        if self.time_r_in is None or sigmas is None or steps is None:
            return None
        here = torch.nonzero(steps == sigmas[0].to(steps)).flatten()
        if not len(here) or int(here[0]) + 1 >= len(steps):
            return None
        return steps[int(here[0]) + 1].reshape(1).to(times) * LARGEST_TIME

    def _vector(
        self,
        times: Tensor,
        goal: Tensor | None,
        guidance: Tensor | None,
        y: Tensor | None,
        first_time: Tensor | None,
        like: Tensor,
    ) -> Tensor:
        """What modulates all blocks ``[B, D]``; with a time of the first frame ``[B, 2, D]``."""

        def embedded(given: Tensor, embedder: nn.Module) -> Tensor:
            waves = timestep_embedding(given, TIME_WAVES, time_factor=1.0)
            made: Tensor = embedder(waves.to(like.dtype))
            return made

        vec = embedded(times, self.time_in)
        if self.time_r_in is not None and goal is not None:
            both = vec + embedded(goal, self.time_r_in)
            vec = both if self.meanflow_sum else both / 2
        if first_time is not None:
            vec = torch.stack([embedded(first_time, self.time_in).expand_as(vec), vec], dim=1)
        added = []
        if self.vector_in is not None and self.vec_in_dim is not None:
            pooled = like.new_zeros(like.shape[0], self.vec_in_dim) if y is None else y
            added.append(self.vector_in(pooled[:, : self.vec_in_dim]))
        if self.guidance_in is not None and guidance is not None:
            waves = timestep_embedding(guidance, TIME_WAVES)
            added.append(self.guidance_in(waves.to(like.dtype)))
        for one in added:
            vec = vec + (one[:, None] if vec.ndim == 3 else one)
        return vec

    def _double_stream(
        self,
        img: Tensor,
        txt: Tensor,
        vec: Tensor,
        control: Options | None,
        dims: Any,
        shared: Options,
    ) -> tuple[Tensor, Tensor]:
        options = shared["transformer_options"]
        options["total_blocks"], options["block_type"] = len(self.double_blocks), "double"
        text_dims = None if dims is None else [(0, None, 1)]
        own = {"modulation_dims_img": dims, "modulation_dims_txt": text_dims}
        residuals = (control or {}).get("input") or ()
        for number, block in enumerate(self.double_blocks):
            options["block_index"] = number

            def original(args: Options, block: nn.Module = block) -> Options:
                out_img, out_txt = block(**args, **own)
                return {"img": out_img, "txt": out_txt}

            args = {"img": img, "txt": txt, "vec": vec, **shared}
            out = replaceable(options, ("double_block", number), args, original)
            img, txt = out["img"], out["txt"]
            if number < len(residuals) and residuals[number] is not None:
                img = add_at(img, residuals[number], 0, "input")
        return img, txt

    def _single_stream(
        self,
        x: Tensor,
        picture: int,
        vec: Tensor,
        control: Options | None,
        dims: Any,
        shared: Options,
    ) -> Tensor:
        options = shared["transformer_options"]
        options["total_blocks"], options["block_type"] = len(self.single_blocks), "single"
        options["img_slice"] = [0, picture]
        residuals = (control or {}).get("output") or ()
        for number, block in enumerate(self.single_blocks):
            options["block_index"] = number

            def original(args: Options, block: nn.Module = block) -> Options:
                rest = {name: value for name, value in args.items() if name != "img"}
                return {"img": block(args["img"], **rest, modulation_dims=dims)}

            args = {"img": x, "vec": vec, **shared}
            x = replaceable(options, ("single_block", number), args, original)["img"]
            if number < len(residuals) and residuals[number] is not None:
                x = add_at(x, residuals[number], 0, "output")
        return x


def _mask(attention_mask: Tensor | None, img: Tensor) -> Tensor | None:
    """What is added to the scores of picture and text ``[B, 1, 1, L]``: padding is not seen."""
    if attention_mask is None:
        return None
    hidden = (attention_mask == 0).to(img.device)
    added = torch.zeros(hidden.shape, dtype=img.dtype, device=img.device)
    added.masked_fill_(hidden, torch.finfo(img.dtype).min)
    plain = added.new_zeros(added.shape[0], img.shape[1])
    return torch.cat([plain, added], dim=1)[:, None, None]
