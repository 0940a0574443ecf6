"""Text encoders from files of their own: one file, two for SDXL and FLUX, up to three for SD3.

Which encoder a file holds is told by its layers; which classes use it also depends on the model
family the person names (`CLIPType`).
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from comfy.families import openclip
from comfy.families.family import ClipTarget
from comfy.families.text_sizes import llm_dtype, t5_dtype, text_model_configs
from comfy.loading import (
    EMBEDDED_NAMES,
    FOLDERS_OPTION,
    Options,
    StateDict,
    UnknownArchitectureError,
    naming,
    state_dict_in_words,
    vocabulary_beside,
)
from comfy.text_encoders import hunyuan_video, mistral, pile_t5, qwen, t5_alone, tekken, umt5
from comfy.text_encoders.clip import CLIP
from comfy.text_encoders.flux import FluxTokenizer, flux_clip
from comfy.text_encoders.sd1 import SD1ClipModel, SD1Tokenizer
from comfy.text_encoders.sd2 import SD2ClipModel, SD2Tokenizer
from comfy.text_encoders.sd3 import SD3Tokenizer, sd3_clip
from comfy.text_encoders.sdxl import (
    SDXLClipModel,
    SDXLRefinerClipModel,
    SDXLTokenizer,
    StableCascadeClipModel,
    StableCascadeTokenizer,
)
from comfy.weights import state_dict as files
from comfy.weights.header_hints import read_hints
from comfy.weights.marks import cannot_run


class CLIPType(enum.Enum):
    """What a text encoder is loaded for."""

    STABLE_DIFFUSION = 1
    STABLE_CASCADE = 2
    SD3 = 3
    STABLE_AUDIO = 4
    HUNYUAN_DIT = 5
    FLUX = 6
    MOCHI = 7
    LTXV = 8
    HUNYUAN_VIDEO = 9
    PIXART = 10
    COSMOS = 11
    LUMINA2 = 12
    WAN = 13
    HIDREAM = 14
    CHROMA = 15
    ACE = 16
    OMNIGEN2 = 17
    QWEN_IMAGE = 18
    HUNYUAN_IMAGE = 19
    HUNYUAN_VIDEO_15 = 20
    OVIS = 21
    KANDINSKY5 = 22
    KANDINSKY5_IMAGE = 23
    NEWBIE = 24
    FLUX2 = 25


# A key that only this encoder (and larger ones, which stand before it) has -> its name.
ENCODER_MARKS = (
    ("text_model.encoder.layers.30.mlp.fc1.weight", "clip_g"),
    ("text_model.encoder.layers.22.mlp.fc1.weight", "clip_h"),
    ("text_model.encoder.layers.0.mlp.fc1.weight", "clip_l"),
)
T5_BLOCK = "encoder.block.0.layer."
# Encoders that are recognised but cannot be loaded: a key that they have -> name.
UNSUPPORTED_MARKS = (
    ("model.encoder.layers.0.mixer.Wqkv.weight", "Jina CLIP 2"),
    (f"{T5_BLOCK}1.DenseReluDense.wi.weight", "T5 of the first version"),
    ("model.layers.0.post_feedforward_layernorm.weight", "Gemma"),
    ("model.layers.0.self_attn.q_norm.weight", "Qwen 3 2B (Ovis)"),
    ("model.layers.0.self_attn.k_proj.bias", "Qwen 2.5 3B (OmniGen 2)"),
)
T5_WIDTHS = {768: "T5-base (Stable Audio, ACE-Step)", 1472: "ByT5"}

MISTRAL_WIDTH = 5120  # that of Llama is 4096
OTHER_QWEN_WIDTH = 2048  # Qwen 2.5 3B (OmniGen 2) and Qwen 3 2B (Ovis)

# Encoder -> classes that use it alone; a type with classes of its own stands beside it.
SINGLE_TARGETS: dict[str, ClipTarget] = {
    "clip_l": ClipTarget(SD1Tokenizer, SD1ClipModel),
    "clip_h": ClipTarget(SD2Tokenizer, SD2ClipModel),
    "clip_g": ClipTarget(SDXLTokenizer, SDXLRefinerClipModel),
}

SPECIAL_TARGETS: dict[tuple[str, CLIPType], ClipTarget] = {
    ("clip_g", CLIPType.STABLE_CASCADE): ClipTarget(StableCascadeTokenizer, StableCascadeClipModel),
}
# The encoders that Stable Diffusion 3 uses, in any number, in the order of the arguments.
SD3_PARTS = ("clip_l", "clip_g", "t5xxl")
FLUX_PARTS = {"clip_l", "t5xxl"}
# What a type wants of a T5 XXL that is its only encoder.
T5_ARRANGEMENTS = {
    CLIPType.LTXV: t5_alone.LTXV,
    CLIPType.PIXART: t5_alone.PIXART,
    CLIPType.CHROMA: t5_alone.PIXART,
}
# Types that need another encoder, alone or beside T5.
NEVER_T5_ALONE = frozenset({CLIPType.WAN, CLIPType.HIDREAM})
OLD_XXL = "t5xxl_old"  # its keys and tokens are those of T5 XXL
OLD_T5 = {1024: OLD_XXL, 768: t5_alone.BASE}  # without a gate, by width
HUNYUAN_VIDEO_PARTS = {"clip_l", "llama"}
# Two files are the two encoders of SDXL for every type without an arrangement of its own.
PAIR_TARGET = ClipTarget(SDXLTokenizer, SDXLClipModel)
OWN_ARRANGEMENT = frozenset(
    {
        CLIPType.SD3,
        CLIPType.FLUX,
        CLIPType.HIDREAM,
        CLIPType.HUNYUAN_DIT,
        CLIPType.HUNYUAN_VIDEO,
        CLIPType.HUNYUAN_IMAGE,
        CLIPType.HUNYUAN_VIDEO_15,
        CLIPType.KANDINSKY5,
        CLIPType.KANDINSKY5_IMAGE,
        CLIPType.NEWBIE,
        CLIPType.LTXV,
    }
)


def load_clip(
    ckpt_paths: Sequence[str],
    embedding_directory: Any = None,
    clip_type: CLIPType = CLIPType.STABLE_DIFFUSION,
    model_options: Options | None = None,
) -> CLIP:
    """Loads a text encoder from one or more files.

    Raises:
        WeightFileError: A file cannot be read, or holds no text encoder that can be loaded.
        ValueError: This combination of encoders cannot be loaded for the type.
    """
    parts: list[StateDict] = []
    metadata: dict[str, str] = {}
    for path in ckpt_paths:
        tensors, header = files.load_torch_file(path, return_metadata=True)
        part = as_clip_keys(tensors)
        if detect_encoder(part) is None:
            unsupported = unsupported_encoder(part)
            found = f"no known text encoder: {state_dict_in_words(tensors)}"
            raise UnknownArchitectureError(
                path,
                cannot_run(unsupported) if unsupported else found,
                "choose a CLIP text encoder (ViT-L, OpenCLIP ViT-H or bigG), T5-XXL, UMT5-XXL, "
                "Qwen 2.5 7B, Qwen 3 4B, Llama 3 or Mistral Small 3",
            )
        parts.append(part)
        metadata.update(header or {})
    _target([detect_encoder(part) for part in parts], clip_type)  # raises for a wrong choice
    options = dict(model_options or {})
    folders = [os.path.dirname(path) for path in ckpt_paths]
    options[FOLDERS_OPTION] = [*folders, *options.get(FOLDERS_OPTION, ())]
    with naming(", ".join(ckpt_paths)):
        return load_text_encoder_state_dicts(
            parts, embedding_directory, clip_type, options, metadata
        )


def load_text_encoder_state_dicts(
    state_dicts: Sequence[StateDict],
    embedding_directory: Any = None,
    clip_type: CLIPType = CLIPType.STABLE_DIFFUSION,
    model_options: Options | None = None,
    metadata: Mapping[str, str] | None = None,
) -> CLIP:
    """As `load_clip`, from tensors by the keys of single encoders.

    Raises:
        ValueError: The encoders, or this combination of them, cannot be loaded.
    """
    parts = [as_clip_keys(part) for part in state_dicts]
    kinds = [detect_encoder(part) for part in parts]
    held = {name: part.pop(name) for part in parts for name in EMBEDDED_NAMES if name in part}
    everything = {key: value for part in parts for key, value in part.items()}
    target = _target(kinds, clip_type, t5_dtype(everything) or llm_dtype(everything))
    whole = {
        f"{'t5xxl' if kind == OLD_XXL else kind}.transformer.{key}": value
        for kind, part in zip(kinds, parts)
        for key, value in part.items()
    }
    sizes = text_model_configs(whole, read_hints(metadata, "text_config"))
    options = dict(model_options or {})
    folders = options.pop(FOLDERS_OPTION, ())
    data = held or vocabulary_beside(whole, folders)
    return CLIP(
        target,
        embedding_directory=embedding_directory,
        tokenizer_data={**data, **whole},
        parameters=files.calculate_parameters(whole),
        state_dict=whole,
        model_options={**sizes, **options},
    )


def _target(
    kinds: Sequence[str | None], clip_type: CLIPType, kept: torch.dtype | None = None
) -> ClipTarget:
    """The classes that use these encoders for this family; ``kept`` is the type in which the
    weights of a large one stay.

    Raises:
        ValueError: No family that can be loaded uses them together.
    """
    names = [str(kind) for kind in kinds]
    distinct = len(set(names)) == len(names)
    if clip_type is CLIPType.SD3 and distinct and set(names) <= set(SD3_PARTS):
        clip_l, clip_g, t5 = (name in names for name in SD3_PARTS)
        return ClipTarget(SD3Tokenizer, sd3_clip(clip_l, clip_g, t5, kept))
    if clip_type is CLIPType.FLUX and distinct and set(names) == FLUX_PARTS:
        return ClipTarget(FluxTokenizer, flux_clip(kept))
    alone = _t5_alone(names, clip_type)
    if alone is not None:
        tokenizer = t5_alone.t5_alone_tokenizer(alone)
        return ClipTarget(tokenizer, t5_alone.t5_alone_clip(alone, kept))
    if names == [umt5.NAME]:
        return ClipTarget(umt5.WanT5Tokenizer, umt5.wan_clip(kept))
    if names == [qwen.QWEN25_7B]:
        model = qwen.qwen_clip(qwen.QwenImageTEModel, kept)
        return ClipTarget(qwen.QwenImageTokenizer, model)
    if names == [qwen.QWEN3_4B]:
        return ClipTarget(qwen.ZImageTokenizer, qwen.qwen_clip(qwen.ZImageTEModel, kept))
    if clip_type is CLIPType.HUNYUAN_VIDEO and distinct and set(names) == HUNYUAN_VIDEO_PARTS:
        return ClipTarget(
            hunyuan_video.HunyuanVideoTokenizer, hunyuan_video.hunyuan_video_clip(kept)
        )
    if names == [mistral.NAME]:
        return ClipTarget(mistral.Flux2Tokenizer, mistral.flux2_clip(kept))
    if len(names) == 1 and names[0] in SINGLE_TARGETS:
        special = SPECIAL_TARGETS.get((names[0], clip_type))
        return special or SINGLE_TARGETS[names[0]]
    if sorted(names) == ["clip_g", "clip_l"] and clip_type not in OWN_ARRANGEMENT:
        return PAIR_TARGET
    raise ValueError(
        f"text encoders {', '.join(names)} for type {clip_type.name.lower()} cannot be loaded; "
        "known: one of clip_l, clip_h, clip_g; clip_l with clip_g for SDXL; clip_l with t5xxl for "
        "type flux; t5xxl for types mochi, chroma, ltxv, pixart; clip_l, clip_g, t5xxl or some "
        "for type sd3; umt5xxl for type wan; pile_t5xl for AuraFlow; qwen25_7b for type "
        "qwen_image; qwen3_4b for Z-Image; mistral3_24b for type flux2; clip_l with llama for "
        "type hunyuan_video"
    )


def _t5_alone(names: Sequence[str], clip_type: CLIPType) -> t5_alone.Arrangement | None:
    """What a type wants of its only encoder, if that is a T5."""
    if names == [OLD_XXL]:
        return t5_alone.COSMOS
    if names == [t5_alone.BASE]:
        return t5_alone.STABLE_AUDIO
    if names == [pile_t5.NAME]:
        return pile_t5.AURAFLOW
    if names == ["t5xxl"] and clip_type not in NEVER_T5_ALONE:
        return T5_ARRANGEMENTS.get(clip_type, t5_alone.MOCHI)
    return None


def as_clip_keys(state_dict: StateDict) -> StateDict:
    """Keys as CLIP names them, whether the file has CLIP's or OpenCLIP's layout."""
    if "transformer.resblocks.0.ln_1.weight" in state_dict:
        return openclip.to_clip(state_dict, "", "")
    prefix = "text_model.text_model."  # some tools save the encoder inside another module
    if any(key.startswith(prefix) for key in state_dict):
        return {key.removeprefix("text_model."): value for key, value in state_dict.items()}
    return dict(state_dict)


def detect_encoder(state_dict: Mapping[str, Tensor]) -> str | None:
    """Which encoder a file holds: clip_l, clip_g, clip_h, t5xxl, umt5xxl; None for another."""
    found = next((name for key, name in ENCODER_MARKS if key in state_dict), None)
    return found or _t5_name(state_dict) or _llm_name(state_dict)


def _llm_name(state_dict: Mapping[str, Tensor]) -> str | None:
    """Llama, Mistral, Qwen 2.5 or Qwen 3, but those of the width that other families use."""
    norm = state_dict.get("model.layers.0.post_attention_layernorm.weight")
    is_gemma = "model.layers.0.post_feedforward_layernorm.weight" in state_dict
    if norm is None or is_gemma or norm.shape[0] == OTHER_QWEN_WIDTH:
        return None
    if "model.layers.0.self_attn.q_norm.weight" in state_dict:
        return qwen.QWEN3_4B
    if "model.layers.0.self_attn.k_proj.bias" in state_dict:
        return qwen.QWEN25_7B
    is_mistral = norm.shape[0] == MISTRAL_WIDTH or tekken.EMBEDDED in state_dict
    return mistral.NAME if is_mistral else hunyuan_video.NAME


def _t5_name(state_dict: Mapping[str, Tensor]) -> str | None:
    """A gated T5 of no other model's width; UMT5 if every block has biases. Or one without a
    gate.
    """
    if f"{T5_BLOCK}1.DenseReluDense.wi.weight" in state_dict and "shared.weight" in state_dict:
        return OLD_T5.get(state_dict["shared.weight"].shape[1])
    is_t5 = f"{T5_BLOCK}1.DenseReluDense.wi_1.weight" in state_dict
    if not is_t5 or "shared.weight" not in state_dict:
        return None
    width = state_dict["shared.weight"].shape[1]
    if width in T5_WIDTHS:
        return None
    if width == pile_t5.WIDTH:
        return pile_t5.NAME
    bias = "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"
    return umt5.NAME if bias in state_dict else "t5xxl"


def unsupported_encoder(state_dict: Mapping[str, Tensor]) -> str | None:
    """Name of an encoder that is recognised but cannot be loaded."""
    if f"{T5_BLOCK}1.DenseReluDense.wi_1.weight" in state_dict and "shared.weight" in state_dict:
        return T5_WIDTHS.get(state_dict["shared.weight"].shape[1])
    return next((name for key, name in UNSUPPORTED_MARKS if key in state_dict), None)


def clip_type(name: str) -> CLIPType:
    """The type of a node's menu entry.

    Raises:
        ValueError: There is no such type.
    """
    try:
        return CLIPType[name.upper()]
    except KeyError:
        known = ", ".join(kind.name.lower() for kind in CLIPType)
        raise ValueError(f"unknown text encoder type {name!r}; known: {known}") from None
