"""LTX-2 and LTX-2.3: text and pictures to a video with its sound, conditioned on Gemma 3 12B."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from comfy import conds, latent_formats, nested_tensor
from comfy.families.dit_layout import Shapes
from comfy.families.family import BrokenModelError, ClipTarget, StateDict
from comfy.families.ltxv import HEADS, LTXV, MARK, LTXVideoModel, times_of_cells
from comfy.families.text_sizes import llm_dtype
from comfy.ldm.lightricks.av_model import LTXAVModel
from comfy.text_encoders import lt

SOUND_MARK = "audio_adaln_single.linear.weight"
# Of LTX-2.3: the time modulates the text, attentions have gates.
TOLD_TEXT = "prompt_adaln_single.linear.weight"
# Without the former, of networks whose text is modulated alike at all times.
TEXT_TABLE = "transformer_blocks.0.audio_prompt_scale_shift_table"
GATES = "transformer_blocks.0.{}.to_gate_logits.weight"
PROJECTION = "caption_projection.linear_1.weight"
NUMBER = (int, float)
USUAL_CAPTION = 3840
USUAL_SIZES = {
    "in_channels": 128,
    "audio_in_channels": 128,
    "caption_channels": USUAL_CAPTION,
    "num_attention_heads": HEADS,
    "audio_num_attention_heads": HEADS,
    "audio_attention_head_dim": 64,
    "audio_cross_attention_dim": 2048,
    "apply_gated_attention": False,
    "cross_attention_adaln": False,
}


def read_ltxav_config(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any] | None:
    """Configuration of the LTX-2 network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing or
            impossible.
    """
    if any(prefix + key not in state_dict for key in (MARK, SOUND_MARK)):
        return None
    modulates_text = prefix + TOLD_TEXT in state_dict
    if prefix + TEXT_TABLE in state_dict and not modulates_text:
        return None
    shapes = Shapes(state_dict, prefix, "LTX-2.3" if modulates_text else "LTX-2")
    (width, text, heads), sound = (_attention(shapes, name) for name in ("attn2", "audio_attn2"))
    # LTX-2 projects texts in the network; those of LTX-2.3 come as wide as they are read.
    projects = not modulates_text or PROJECTION in shapes
    sizes = {
        "in_channels": shapes["patchify_proj.weight"][1],
        "audio_in_channels": shapes["audio_patchify_proj.weight"][1],
        "caption_channels": shapes[PROJECTION][1] if projects else None,
        "num_attention_heads": heads,
        "audio_num_attention_heads": sound[2],
        "audio_attention_head_dim": sound[0] // sound[2],
        "audio_cross_attention_dim": sound[1],
        "apply_gated_attention": GATES.format("attn2") in shapes,
        "cross_attention_adaln": modulates_text,
    }
    return {
        "image_model": "ltxav",
        "num_layers": shapes.count("transformer_blocks."),
        "attention_head_dim": width // heads,
        "cross_attention_dim": text,
        **{name: size for name, size in sizes.items() if size != USUAL_SIZES[name]},
    }


def _attention(shapes: Shapes, name: str) -> tuple[int, int, int]:
    """Width of what a stream's attention to its text computes with, of the text, and heads."""
    key = f"transformer_blocks.0.{name}.to_k.weight"
    gates = GATES.format(name)
    width, text = shapes[key]
    heads = shapes[gates][0] if gates in shapes else HEADS
    if width % heads:
        raise BrokenModelError(
            f"{shapes.prefix}{key} makes {width} channels, which {heads} heads do not divide"
        )
    return width, text, heads


class LTXAVideoModel(LTXVideoModel):
    """As LTX video, with a latent of sound packed after that of the video."""

    network = LTXAVModel

    def conditioning_widths(self) -> dict[str, int]:
        """Width of the text tokens, those for the video and for the sound side by side."""
        sizes = {**USUAL_SIZES, **self.model_config.unet_config}
        width = sizes["caption_channels"]
        if width is None:
            return {
                "c_crossattn": sizes["cross_attention_dim"] + sizes["audio_cross_attention_dim"]
            }
        return {"c_crossattn": 2 * width}

    def parts_wanted(self, shapes: Sequence[Sequence[int]]) -> str:
        """A video and its sound, in this order."""
        channels, width = self.latent_format.latent_channels, self._sound_channels()
        is_pair = [len(shape) for shape in shapes] == [5, 4]
        if is_pair and shapes[0][1] == channels and shapes[1][1] * shapes[1][3] == width:
            return ""
        return (
            f"a video [batch, {channels}, time, rows, columns] and its sound [batch, channels, "
            f"length, bands] of {width} channels x bands"
        )

    def _sound_channels(self) -> int:
        return int({**USUAL_SIZES, **self.model_config.unet_config}["audio_in_channels"])

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """As LTX video; shapes of both latents, and a mask for each."""
        made = super().extra_conds(**kwargs)
        shapes = kwargs.get("latent_shapes")
        if shapes is None or len(shapes) < 2:
            return made
        made["latent_shapes"] = conds.CONDConstant([tuple(shape) for shape in shapes])
        mask = made.pop("denoise_mask", None)
        if mask is not None:
            video, sound = nested_tensor.unpack(mask.cond, shapes)
            made["denoise_mask"] = conds.CONDRegular(video)
            made["audio_denoise_mask"] = conds.CONDRegular(sound)
        return made

    def latent_for_network(self, latent: Tensor, inputs: dict[str, Any]) -> Any:
        """The latents of video and sound; one of a video alone stays as it is."""
        shapes = inputs.pop("latent_shapes", None)
        return latent if shapes is None else nested_tensor.unpack(latent, shapes)

    def output_as_latent(self, output: Any) -> Tensor:
        """Both latents packed."""
        return output if torch.is_tensor(output) else nested_tensor.pack(output)[0]

    def process_timestep(self, timestep: Tensor, **kwargs: Any) -> Any:
        """Times of the cells of video and sound, 0 where they are given."""
        sound = kwargs.get("audio_denoise_mask")
        video = times_of_cells(timestep, kwargs.get("denoise_mask"))
        if sound is None:
            return video, timestep
        return video, sound[:, 0, :, 0] * timestep[:, None]

    def memory_required(
        self,
        input_shape: Iterable[int],
        cond_shapes: Mapping[str, list[Iterable[int]]] | None = None,
    ) -> float:
        """Counts channels as cells, as those of packed latents cannot be told from them."""
        batch, *others = input_shape
        return super().memory_required((batch, 1, math.prod(others)), cond_shapes)


class LTXAV(LTXV):
    """LTX-2 and LTX-2.3."""

    unet_config: dict[str, Any] = {"image_model": "ltxav"}
    read_config = staticmethod(read_ltxav_config)
    latent_format: Any = latent_formats.LTXAV
    base_model = LTXAVideoModel
    told_by_header: ClassVar[dict[str, type | tuple[type, ...]]] = {
        **LTXV.told_by_header,
        "rope_type": str,
        "frequencies_precision": str,
        "use_middle_indices_grid": bool,
        "timestep_scale_multiplier": NUMBER,
        "av_ca_timestep_scale_multiplier": NUMBER,
    }

    def __init__(self, unet_config: dict[str, Any]) -> None:
        super().__init__(unet_config)
        self.memory_usage_factor = 0.055  # for each value of the packed latent

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """Gemma 3 12B with the connectors, where a checkpoint holds both."""
        return ClipTarget(lt.LTXAVGemmaTokenizer, lt.ltxav_te(llm_dtype(state_dict)))
