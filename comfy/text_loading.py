"""Text encoders from files of their own: one file, or two for SDXL.

Which encoder a file holds is told by its layers; which classes use it also depends on the model
family the person names (`CLIPType`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from comfy.families import openclip
from comfy.families.family import ClipTarget
from comfy.families.text_sizes import text_model_configs
from comfy.loading import Options, StateDict, UnknownArchitectureError, naming, state_dict_in_words
from comfy.text_encoders.clip import CLIP
from comfy.text_encoders.sd1 import SD1ClipModel, SD1Tokenizer
from comfy.text_encoders.sd2 import SD2ClipModel, SD2Tokenizer
from comfy.text_encoders.sdxl import (
    SDXLClipModel,
    SDXLRefinerClipModel,
    SDXLTokenizer,
    StableCascadeClipModel,
    StableCascadeTokenizer,
)
from comfy.weights import state_dict as files
from comfy.weights.header_hints import read_hints


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

# Encoder -> classes that use it alone; a type with classes of its own stands beside it.
SINGLE_TARGETS: dict[str, ClipTarget] = {
    "clip_l": ClipTarget(SD1Tokenizer, SD1ClipModel),
    "clip_h": ClipTarget(SD2Tokenizer, SD2ClipModel),
    "clip_g": ClipTarget(SDXLTokenizer, SDXLRefinerClipModel),
}
SPECIAL_TARGETS: dict[tuple[str, CLIPType], ClipTarget] = {
    ("clip_g", CLIPType.STABLE_CASCADE): ClipTarget(StableCascadeTokenizer, StableCascadeClipModel),
}
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
            raise UnknownArchitectureError(
                path,
                f"no known text encoder: {state_dict_in_words(tensors)}",
                "choose a CLIP text encoder (ViT-L, OpenCLIP ViT-H or ViT-bigG)",
            )
        parts.append(part)
        metadata.update(header or {})
    _target([detect_encoder(part) for part in parts], clip_type)  # raises for a wrong choice
    with naming(", ".join(ckpt_paths)):
        return load_text_encoder_state_dicts(
            parts, embedding_directory, clip_type, model_options, metadata
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
    target = _target(kinds, clip_type)
    whole = {
        f"{kind}.transformer.{key}": value
        for kind, part in zip(kinds, parts)
        for key, value in part.items()
    }
    sizes = text_model_configs(whole, read_hints(metadata, "text_config"))
    return CLIP(
        target,
        embedding_directory=embedding_directory,
        tokenizer_data=whole,
        parameters=files.calculate_parameters(whole),
        state_dict=whole,
        model_options={**sizes, **(model_options or {})},
    )


def _target(kinds: Sequence[str | None], clip_type: CLIPType) -> ClipTarget:
    """The classes that use these encoders for this family."""
    if len(kinds) == 1 and kinds[0] is not None:
        special = SPECIAL_TARGETS.get((kinds[0], clip_type))
        return special or SINGLE_TARGETS[kinds[0]]
    is_sdxl_pair = sorted(str(kind) for kind in kinds) == ["clip_g", "clip_l"]
    if is_sdxl_pair and clip_type not in OWN_ARRANGEMENT:
        return PAIR_TARGET
    found = ", ".join(str(kind) for kind in kinds)
    raise ValueError(
        f"text encoders {found} for type {clip_type.name.lower()} cannot be loaded; known: "
        "one of clip_l, clip_h, clip_g, or clip_l with clip_g for SDXL"
    )


def as_clip_keys(state_dict: StateDict) -> StateDict:
    """Keys as CLIP names them, whether the file has CLIP's or OpenCLIP's layout."""
    if "transformer.resblocks.0.ln_1.weight" in state_dict:
        return openclip.to_clip(state_dict, "", "")
    prefix = "text_model.text_model."  # some tools save the encoder inside another module
    if any(key.startswith(prefix) for key in state_dict):
        return {key.removeprefix("text_model."): value for key, value in state_dict.items()}
    return dict(state_dict)


def detect_encoder(state_dict: Mapping[str, Tensor]) -> str | None:
    """Which encoder a file holds: clip_l, clip_h, clip_g; None for another."""
    return next((name for key, name in ENCODER_MARKS if key in state_dict), None)


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
