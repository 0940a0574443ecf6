"""ACE-Step 1.5: text and lyrics to music, told by Qwen 3 and led by codes that another writes."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy import conds, latent_formats
from comfy.families.base import BaseModel
from comfy.families.dit_layout import Shapes
from comfy.families.family import ClipTarget, StateDict, TransformerFamily
from comfy.families.model_type import ModelType
from comfy.families.text_sizes import llm_dtype
from comfy.ldm.ace.conditions15 import CODES
from comfy.ldm.ace.model15 import VOICE_CELLS, AceStep15
from comfy.text_encoders.ace15 import LARGE, ace15_clip, ace15_tokenizer

MARK = "encoder.lyric_encoder.layers.0.input_layernorm.weight"
SILENCE = "silence_latent"
SILENCE_WANTED = (
    "put silence_latent.pt of the repository ACE-Step/Ace-Step1.5 (folder acestep-v15-turbo) into "
    "models/diffusion_models or models/vae"
)


def read_ace_step15_config(
    state_dict: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Any] | None:
    """Configuration of the ACE-Step 1.5 network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing.
    """
    if prefix + MARK not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "ACE-Step 1.5")
    _, inputs, patch = shapes["decoder.proj_in.1.weight"]
    return {
        "audio_model": "ace1.5",
        "in_channels": inputs,
        "out_channels": shapes["decoder.proj_out.1.weight"][1],
        "patch_size": patch,
        "text_dim": shapes["encoder.text_projector.weight"][1],
        "quantized": shapes["tokenizer.quantizer.project_out.weight"][0],
        "cells_of_code": shapes["detokenizer.special_tokens"][1],
        "decoder": _layers(shapes, "decoder.layers."),
        "lyrics": _layers(shapes, "encoder.lyric_encoder.layers."),
        "timbre": _layers(shapes, "encoder.timbre_encoder.layers."),
        "tokenizer": _layers(shapes, "tokenizer.attention_pooler.layers."),
        "detokenizer": _layers(shapes, "detokenizer.layers."),
    }


def _layers(shapes: Shapes, at: str) -> dict[str, int]:
    """Arguments of `LayerSizes` of a stack of layers."""
    first = f"{at}0."
    inner, width = shapes[f"{first}mlp.gate_proj.weight"]
    head = shapes[f"{first}self_attn.q_norm.weight"][0]
    return {
        "width": width,
        "inner": inner,
        "heads": shapes[f"{first}self_attn.q_proj.weight"][0] // head,
        "groups": shapes[f"{first}self_attn.k_proj.weight"][0] // head,
        "head": head,
        "layers": shapes.count(at),
    }


class ACEStep15Model(BaseModel):
    """Text and lyrics, and codes of the music or, where there are none, silence."""

    network = AceStep15
    usual_type = ModelType.FLOW
    text_width = "text_dim"

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Text, lyrics, codes and silence; a text of zeros stands for being told nothing.

        Raises:
            ValueError: The conditioning lacks lyrics or silence, or its codes are none.
        """
        made = super().extra_conds(**kwargs)
        text, lyrics = kwargs.get("cross_attn"), kwargs.get("conditioning_lyrics")
        if text is None or lyrics is None:
            raise ValueError(
                "ACE-Step 1.5 needs a conditioning with lyrics; make it with "
                "TextEncodeAceStepAudio1.5"
            )
        made["c_crossattn"] = conds.CONDRegular(text)
        made["lyric_embed"] = conds.CONDRegular(lyrics)
        made["is_told_nothing"] = conds.CONDConstant(not bool(text.any()))
        made["silence"] = conds.CONDRegular(self._silence(kwargs.get(SILENCE), kwargs["noise"]))
        codes = kwargs.get("audio_codes")
        if codes is not None:
            made["audio_codes"] = conds.CONDRegular(_checked_codes(codes))
        return made

    def _silence(self, latent: Tensor | None, noise: Tensor) -> Tensor:
        """``[1, C, cells]`` as long as the latent and the piece that a voice is taken from."""
        if latent is None:
            raise ValueError(
                "the conditioning tells no latent of silence, which ACE-Step 1.5 needs where "
                "there is no music yet; make it with TextEncodeAceStepAudio1.5"
            )
        if latent.ndim != 3 or latent.shape[1] != noise.shape[1]:
            raise ValueError(
                f"a latent of silence [1, {noise.shape[1]}, cells] was expected, found shape "
                f"{list(latent.shape)}; {SILENCE_WANTED}"
            )
        wanted = max(noise.shape[-1], VOICE_CELLS)
        repeats = -(-wanted // latent.shape[-1])
        return latent[:1].repeat(1, 1, repeats)[..., :wanted]


def _checked_codes(codes: Tensor) -> Tensor:
    low, high = int(codes.min()), int(codes.max())
    if low < 0 or high >= CODES:  # an accelerator would end the process
        raise ValueError(f"codes of music are 0..{CODES - 1}, found {low}..{high}")
    return codes


class ACEStep15(TransformerFamily):
    """ACE-Step 1.5."""

    unet_config: dict[str, Any] = {"audio_model": "ace1.5"}
    read_config = staticmethod(read_ace_step15_config)
    sampling_settings = {"multiplier": 1.0, "shift": 3.0}
    latent_format: Any = latent_formats.ACEAudio15
    memory_usage_factor = 4.7
    supported_inference_dtypes = [torch.bfloat16, torch.float32]
    prediction = ModelType.FLOW
    base_model = ACEStep15Model

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """Qwen 3 0.6B, and the language model that the checkpoint holds, if any."""
        writer = next(
            (
                name
                for name in LARGE
                if any(f"{name}.transformer." in key for key in state_dict or {})
            ),
            None,
        )
        return ClipTarget(ace15_tokenizer(writer), ace15_clip(writer, llm_dtype(state_dict)))
