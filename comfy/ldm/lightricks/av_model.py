"""LTX-2 and LTX-2.3: two streams of tokens, of a video and of its sound, which look at each other.

Both streams have the same layers, that of the sound half as wide. In each block a stream attends to
itself and to its text, then each attends to the other by the time at which tokens happen, then each
has its feed-forward. In LTX-2.3 attentions have gates, texts come in the streams' own widths, and
the time of a step also changes how they are read.
Source: HaCohen et al. 2026, https://arxiv.org/abs/2601.03233.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.lightricks.av_layers import AVBlock, Stream, StreamSizes, modulated
from comfy.ldm.lightricks.layers import (
    NORM_EPS,
    AdaLayerNormSingle,
    CaptionProjection,
    Options,
)
from comfy.ldm.lightricks.model import CELL, LARGEST_PLACE, USUAL_FRAME_RATE, text_mask
from comfy.ldm.lightricks.rotations import LTXRopeType, Turn, angles, halves, neighbours
from comfy.ldm.lightricks.symmetric_patchifier import SymmetricPatchifier, latent_to_pixel_coords
from comfy.nn import patches
from comfy.nn.wrappers import run_wrapped

HOP, RATE, SPECTRA_A_CELL = 160, 16000, 4  # samples, hertz; of the sound's latent
Times = tuple[Tensor, Tensor]


class LTXAVModel(nn.Module):
    """Predicts the flow of a noisy video and its sound from a time 0..1 and two texts.

    Args:
        in_channels, audio_in_channels: Channels of a cell of the video, and of the sound (latent
            channels times bins).
        cross_attention_dim, audio_cross_attention_dim: Widths of the projected texts.
        caption_channels: Width of the text tokens of each stream, which are projected; None where
            they come as wide as they are read.
        apply_gated_attention: Whether attentions have gates for their heads.
        cross_attention_adaln: Whether times change how texts are read; then each stream also looks
            at the other by the time of the other.
        timestep_scale_multiplier, av_ca_timestep_scale_multiplier: What times 0..1 are multiplied
            by, in general and for the gates between the streams.
        rope_type: Which channels turn together: the halves of each head ("split") or neighbours
            ("interleaved").
        frequencies_precision: Type in which lengths of waves are computed.
        use_middle_indices_grid: Whether a cell's place is its middle, or its beginning.
        causal_temporal_positioning: Whether the first cell stands for one frame in places.
    Raises:
        ValueError: There is no such kind of turn.
    """

    reads_patches = frozenset({patches.OUTPUT, "dit"})

    def __init__(
        self,
        in_channels: int = 128,
        audio_in_channels: int = 128,
        cross_attention_dim: int = 4096,
        audio_cross_attention_dim: int = 2048,
        attention_head_dim: int = 128,
        audio_attention_head_dim: int = 64,
        num_attention_heads: int = 32,
        audio_num_attention_heads: int = 32,
        caption_channels: int | None = 3840,
        num_layers: int = 48,
        timestep_scale_multiplier: float = 1000.0,
        av_ca_timestep_scale_multiplier: float = 1000.0,
        rope_type: str = "split",
        frequencies_precision: str = "float64",
        use_middle_indices_grid: bool = True,
        causal_temporal_positioning: bool = True,
        apply_gated_attention: bool = False,
        cross_attention_adaln: bool = False,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        del kwargs  # facts of other members of the family
        known = [kind.value for kind in LTXRopeType]
        if rope_type not in known:
            raise ValueError(f"unknown rope_type {rope_type!r}; known: {', '.join(known)}")
        self.dtype = dtype
        kind = {"is_gated": apply_gated_attention, "modulates_text": cross_attention_adaln}
        self.video = StreamSizes(
            attention_head_dim * num_attention_heads,
            cross_attention_dim,
            num_attention_heads,
            **kind,
        )
        self.sound = StreamSizes(
            audio_attention_head_dim * audio_num_attention_heads,
            audio_cross_attention_dim,
            audio_num_attention_heads,
            **kind,
        )
        self.is_told_by_other = cross_attention_adaln
        self.projects_texts = caption_channels is not None
        self.inner_dim, self.audio_inner_dim = self.video.width, self.sound.width
        self.out_channels, self.audio_channels = in_channels, audio_in_channels
        self.time_factor = timestep_scale_multiplier
        self.gate_factor = av_ca_timestep_scale_multiplier / timestep_scale_multiplier
        self.rope_type, self.use_middle_indices_grid = rope_type, use_middle_indices_grid
        self.powers = torch.float64 if frequencies_precision == "float64" else torch.float32
        self.causal_temporal_positioning = causal_temporal_positioning
        self.patchifier = SymmetricPatchifier(1, start_end=True)
        parts = {"dtype": dtype, "device": device, "operations": operations}
        for prefix, sizes, channels in (
            ("", self.video, in_channels), ("audio_", self.sound, audio_in_channels),
        ):  # fmt: skip
            self._add_ends(prefix, sizes, channels, caption_channels, parts)
        self.av_ca_video_scale_shift_adaln_single = AdaLayerNormSingle(self.inner_dim, parts, 4)
        self.av_ca_a2v_gate_adaln_single = AdaLayerNormSingle(self.inner_dim, parts, 1)
        self.av_ca_audio_scale_shift_adaln_single = AdaLayerNormSingle(
            self.audio_inner_dim, parts, 4
        )
        self.av_ca_v2a_gate_adaln_single = AdaLayerNormSingle(self.audio_inner_dim, parts, 1)
        self.transformer_blocks = nn.ModuleList(
            AVBlock(self.video, self.sound, parts) for _ in range(num_layers)
        )

    def _add_ends(
        self,
        prefix: str,
        sizes: StreamSizes,
        channels: int,
        caption_channels: int | None,
        parts: Options,
    ) -> None:
        """What a stream has before and after the blocks."""
        place, width = {"dtype": parts["dtype"], "device": parts["device"]}, sizes.width
        linear, norm = parts["operations"].Linear, parts["operations"].LayerNorm
        made: dict[str, nn.Module] = {
            "patchify_proj": linear(channels, width, **place),
            "adaln_single": AdaLayerNormSingle(width, parts, sizes.rows),
        }
        if caption_channels is not None:
            made["caption_projection"] = CaptionProjection(caption_channels, width, parts)
        if sizes.modulates_text:
            made["prompt_adaln_single"] = AdaLayerNormSingle(width, parts, 2)
        made["norm_out"] = norm(width, eps=NORM_EPS, elementwise_affine=False, **place)
        made["proj_out"] = linear(width, channels, **place)
        for name, module in made.items():
            self.add_module(prefix + name, module)
        table = nn.Parameter(torch.empty(2, width, **place))
        self.register_parameter(f"{prefix}scale_shift_table", table)

    def forward(
        self,
        x: Tensor | Sequence[Tensor],
        timestep: Tensor | Times,
        context: Tensor,
        attention_mask: Tensor | None = None,
        frame_rate: float = USUAL_FRAME_RATE,
        transformer_options: Options | None = None,
        keyframe_idxs: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | list[Tensor]:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latents of a video ``[B, C, T, H, W]`` and its sound ``[B, C, L, bins]``, or of
                a video alone.
            timestep: Times ``[B]`` in 0..1, or of each cell of both, ``[B, N, 1]`` and ``[B, L]``.
            context: Text tokens ``[B, L, D of video + D of sound]``, those for the video first.
            attention_mask: 1 for tokens, 0 for padding ``[B, L]``.
            frame_rate: Frames per second.
            keyframe_idxs: Places ``[B, 3, n]`` in frames and pixels of the video's last n cells, or
                both ends of them ``[B, 3, n, 2]``.
        Returns:
            What `x` is: a latent, or a list of both.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, timestep, context, attention_mask, frame_rate, options, keyframe_idxs, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor | Sequence[Tensor],
        timestep: Tensor | Times,
        context: Tensor,
        attention_mask: Tensor | None = None,
        frame_rate: float = USUAL_FRAME_RATE,
        transformer_options: Options | None = None,
        keyframe_idxs: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | list[Tensor]:
        del kwargs
        options = {} if transformer_options is None else transformer_options
        latents = [x] if torch.is_tensor(x) else list(x)
        video = latents[0]
        silence = video.new_zeros(video.shape[0], self.audio_channels, 0, 1)
        sound = latents[1] if len(latents) > 1 else silence
        times = (timestep, timestep) if torch.is_tensor(timestep) else timestep
        texts = self._texts(context)
        tokens, cells = self.patchifier.patchify(video)
        places = self._video_places(cells, frame_rate, keyframe_idxs)
        latest = [one.reshape(video.shape[0], -1).amax(dim=1, keepdim=True) for one in times]
        seen = self._stream("", tokens, texts[0], (times[0], latest[1]), places)
        spectra = rearrange(sound, "b c t f -> b t (c f)")
        heard = self._stream(
            "audio_", spectra, texts[1], (times[1], latest[0]), _sound_places(sound)
        )
        mask = text_mask(attention_mask, seen.x)
        seen, heard = self._blocks(seen, heard, mask, options)
        shape = video.shape
        made = [
            self.patchifier.unpatchify(
                self._out("", seen), shape[3], shape[4], shape[2], self.out_channels
            )
        ]
        if len(latents) > 1:
            told = self._out("audio_", heard)
            made.append(rearrange(told, "b t (c f) -> b c t f", f=sound.shape[3]))
        return made[0] if torch.is_tensor(x) else made

    def _texts(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens for the video, and for the sound, as wide as they are read."""
        if not self.projects_texts:
            video, sound = context.split([self.video.text_width, self.sound.text_width], dim=-1)
            return video, sound
        names = ("caption_projection", "audio_caption_projection")
        video, sound = (getattr(self, n)(c) for n, c in zip(names, context.chunk(2, dim=-1)))
        return video, sound

    def _video_places(
        self, cells: Tensor, frame_rate: float, keyframe_idxs: Tensor | None
    ) -> Tensor:
        """Both ends ``[B, 3, N, 2]`` of cells, in seconds and pixels."""
        places = latent_to_pixel_coords(cells, CELL, self.causal_temporal_positioning).float()
        if keyframe_idxs is not None:
            given = keyframe_idxs if keyframe_idxs.ndim == 4 else keyframe_idxs[..., None]
            places[:, :, places.shape[2] - given.shape[2] :] = given.to(places)
        places[:, 0] /= frame_rate
        return places

    def _stream(
        self, prefix: str, tokens: Tensor, text: Tensor, times: Times, places: Tensor
    ) -> Stream:
        """What the blocks are told of a stream.

        Args:
            times: Of its cells, and the latest of the other stream ``[B, 1]``.
        """
        is_video = not prefix
        sizes = self.video if is_video else self.sound
        x = getattr(self, f"{prefix}patchify_proj")(tokens)
        own, other = (one.reshape(x.shape[0], -1) * self.time_factor for one in times)
        between = other if self.is_told_by_other else own
        mods, embedded = self._at(f"{prefix}adaln_single", own, x)
        side, gate = ("video", "a2v") if is_video else ("audio", "v2a")
        look, _ = self._at(f"av_ca_{side}_scale_shift_adaln_single", between, x)
        taken, _ = self._at(f"av_ca_{gate}_gate_adaln_single", between * self.gate_factor, x)
        middle = places.mean(dim=-1) if self.use_middle_indices_grid else places[..., 0]
        largest = LARGEST_PLACE[: middle.shape[1]]
        turn = self._turn(middle, largest, sizes.width, sizes.heads, x.dtype)
        time = self._turn(
            middle[:, :1], LARGEST_PLACE[:1], self.sound.width, self.sound.heads, x.dtype
        )
        told = None
        if sizes.modulates_text:
            told, _ = self._at(f"{prefix}prompt_adaln_single", own.amax(dim=1, keepdim=True), x)
        return Stream(x, text, mods, look, taken, turn, time, embedded, told)

    def _at(self, name: str, times: Tensor, like: Tensor) -> Times:
        """What a layer makes of times ``[B, N]``: ``[B, N, ...]``."""
        made = getattr(self, name)(times.flatten(), like.dtype)
        first, second = (one.unflatten(0, times.shape) for one in made)
        return first, second

    def _turn(
        self, places: Tensor, largest: Sequence[float], dim: int, heads: int, dtype: torch.dtype
    ) -> Turn:
        turned = angles(places, largest, dim, self.powers)
        if self.rope_type == LTXRopeType.SPLIT:
            return halves(turned, heads, dtype)
        return neighbours(turned, dtype)

    def _out(self, prefix: str, stream: Stream) -> Tensor:
        """Tokens as channels of cells."""
        table = getattr(self, f"{prefix}scale_shift_table").to(stream.x)
        shift, scale = (table + stream.embedded[:, :, None]).unbind(2)
        h = getattr(self, f"{prefix}norm_out")(stream.x)
        made: Tensor = getattr(self, f"{prefix}proj_out")(modulated(h, scale, shift))
        return made

    def _blocks(
        self, video: Stream, sound: Stream, mask: Tensor | None, options: Options
    ) -> tuple[Stream, Stream]:
        replaced = (options.get("patches_replace") or {}).get("dit") or {}
        options["total_blocks"], options["block_type"] = len(self.transformer_blocks), "double"
        for number, block in enumerate(self.transformer_blocks):
            options["block_index"] = number

            def original(
                args: Options,
                block: nn.Module = block,
                video: Stream = video,
                sound: Stream = sound,
            ) -> Options:
                seen = replace(video, x=args["img"][0], text=args["v_context"])
                heard = replace(sound, x=args["img"][1], text=args["a_context"])
                made = block(seen, heard, args["attention_mask"], args["transformer_options"])
                return {"img": made}

            args = {"img": (video.x, sound.x), "v_context": video.text, "a_context": sound.text,
                    "attention_mask": mask, "v_timestep": video.mods, "a_timestep": sound.mods,
                    "v_pe": video.turn, "a_pe": sound.turn,
                    "transformer_options": options}  # fmt: skip
            key = ("double_block", number)
            if key in replaced:
                made = replaced[key](args, {"original_block": original})["img"]
            else:
                made = original(args)["img"]
            video, sound = replace(video, x=made[0]), replace(sound, x=made[1])
        return video, sound


def _sound_places(sound: Tensor) -> Tensor:
    """Both ends ``[B, 1, L, 2]`` in seconds of the cells of a sound's latent, of which the first
    stands for one spectrum."""
    cells = torch.arange(sound.shape[2], device=sound.device)
    ends = torch.stack([cells, cells + 1], dim=-1) * SPECTRA_A_CELL
    ends = (ends + 1 - SPECTRA_A_CELL).clamp(min=0).float() * HOP / RATE
    return ends.expand(sound.shape[0], 1, -1, -1)
