"""Text encoders from files of their own: one file, two for SDXL and FLUX, up to three for SD3.

Which encoder a file holds is told by its layers; which classes use it also depends on the model
family the person names (`CLIPType`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from comfy.families import openclip
from comfy.families.text_sizes import llm_dtype, t5_dtype, text_model_configs, token_lengths
from comfy.families.text_targets import OLD_XXL, CLIPType, text_target
from comfy.loading import (
    FOLDERS_OPTION,
    Options,
    StateDict,
    UnknownArchitectureError,
    naming,
    state_dict_in_words,
)
from comfy.text_encoders import (
    ace,
    ace15,
    hunyuan_image,
    hunyuan_video,
    hydit,
    jina_clip_2,
    lt,
    lumina2,
    mistral,
    omnigen2,
    ovis,
    pile_t5,
    qwen,
    qwen3_vl,
    qwen35,
    t5_alone,
    tekken,
    umt5,
)
from comfy.text_encoders.clip import CLIP
from comfy.text_encoders.mmproj import with_tower
from comfy.text_encoders.vocabularies import (
    EMBEDDED_NAMES,
    embedded_of,
    vocabularies_of,
    vocabulary_beside,
)
from comfy.weights import state_dict as files
from comfy.weights.encodings import gathered
from comfy.weights.header_hints import read_hints
from comfy.weights.ltx_header import told_of
from comfy.weights.marks import cannot_run

# A key that only this encoder (and larger ones, which stand before it) has -> its name.
ENCODER_MARKS = (
    ("text_model.encoder.layers.30.mlp.fc1.weight", "clip_g"),
    ("text_model.encoder.layers.22.mlp.fc1.weight", "clip_h"),
    ("text_model.encoder.layers.0.mlp.fc1.weight", "clip_l"),
    (hydit.BERT_MARK, hydit.BERT),
    (jina_clip_2.MARK, jina_clip_2.NAME),
)
T5_BLOCK = "encoder.block.0.layer."
GEMMA3_12B_MARK = "model.layers.47.self_attn.q_norm.weight"  # the other has fewer layers
# Encoders that are recognised but cannot be loaded: a key that they have -> name.
EXPERTS = "model.layers.0.mlp.gate.weight"
UNSUPPORTED_MARKS = (
    (f"{T5_BLOCK}1.DenseReluDense.wi.weight", "T5 of the first version"),
    (EXPERTS, "language model with experts"),
)
# Beginnings of keys of Qwen's models that see, in their publisher's files.
QWEN_TOWER, QWEN_WORDS = "model.visual.", "model.language_model."
MISTRAL_WIDTH = 5120  # that of Llama is 4096

OLD_T5 = {1024: OLD_XXL, 768: t5_alone.BASE}  # without a gate, by width


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
        with naming(path):
            part = with_tower(as_clip_keys(tensors), path)
        if detect_encoder(part) is None:
            unsupported = unsupported_encoder(part)
            found = f"no known text encoder: {state_dict_in_words(tensors)}"
            raise UnknownArchitectureError(
                path,
                cannot_run(unsupported) if unsupported else found,
                "choose a CLIP text encoder (ViT-L, OpenCLIP ViT-H or bigG), T5-XXL, UMT5-XXL, "
                "UMT5-base, mT5-XL, the BERT of Hunyuan-DiT, Qwen 2.5 7B, Qwen 3 0.6B, 2B or 4B, "
                "Qwen 3 VL, Qwen 3.5, Llama 3, "
                "Mistral Small 3, Gemma 2 2B, Gemma 3 4B or 12B, Jina CLIP v2, "
                "or (beside Gemma 3 12B) a checkpoint of LTX-2 with the connectors of its text",
            )
        parts.append(part)
        metadata.update(header or {})
    text_target([detect_encoder(part) for part in parts], clip_type)  # raises for a wrong choice
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
    own = vocabularies_of(kinds, parts)
    embedded = embedded_of(kinds, parts)
    held = {name: part.pop(name) for part in parts for name in EMBEDDED_NAMES if name in part}
    everything = {key: value for part in parts for key, value in part.items()}
    target = text_target(kinds, clip_type, llm_dtype(everything) or t5_dtype(everything))
    whole = {
        f"{'t5xxl' if kind == OLD_XXL else kind}.transformer.{key}": value
        for kind, part in zip(kinds, parts)
        for key, value in part.items()
    }
    told = told_of(metadata, "transformer")
    sizes = text_model_configs(whole, read_hints(metadata, "text_config"), told)
    options = dict(model_options or {})
    folders = options.pop(FOLDERS_OPTION, ())
    beside = vocabulary_beside(whole, folders)
    data = {**own, **beside, **held, **embedded, **token_lengths(sizes)}
    return CLIP(
        target,
        embedding_directory=embedding_directory,
        tokenizer_data={**data, **whole},
        parameters=files.calculate_parameters(whole),
        state_dict=whole,
        model_options={**sizes, **options},
    )


def t5xxl_detect(clip_data: Sequence[Mapping[str, Tensor]]) -> dict[str, torch.dtype]:
    """What makers of encoders are told of the T5 XXL among state dicts: ``dtype_t5``, if any."""
    for part in clip_data:
        dtype = t5_dtype(part) if detect_encoder(part) in ("t5xxl", OLD_XXL) else None
        if dtype is not None:
            return {"dtype_t5": dtype}
    return {}


def as_clip_keys(state_dict: StateDict) -> StateDict:
    """Keys as CLIP names them, whether the file has CLIP's or OpenCLIP's layout; of a checkpoint
    of LTX-2, the connectors of its text.
    """
    state_dict = dict(gathered(state_dict))
    connectors = lt.connector_keys(state_dict)
    if connectors is not None:
        return connectors
    if "transformer.resblocks.0.ln_1.weight" in state_dict:
        return openclip.to_clip(state_dict, "", "")
    if hydit.BERT_MARK.removeprefix("bert.") in state_dict:  # BERT without its outer name
        return {f"bert.{key}": value for key, value in state_dict.items()}
    if any(key.startswith(QWEN_TOWER) for key in state_dict):
        return {_without_outer_model(key): value for key, value in state_dict.items()}
    prefix = "text_model.text_model."  # some tools save the encoder inside another module
    if any(key.startswith(prefix) for key in state_dict):
        return {key.removeprefix("text_model."): value for key, value in state_dict.items()}
    return dict(state_dict)


def _without_outer_model(key: str) -> str:
    """A key of a language model that sees, as older files and those for encoders have it."""
    if key.startswith(QWEN_WORDS):
        return key.replace(QWEN_WORDS, "model.", 1)
    return key.removeprefix("model.") if key.startswith(QWEN_TOWER) else key


def detect_encoder(state_dict: Mapping[str, Tensor]) -> str | None:
    """Which encoder a file holds, by the name of its module; None for another."""
    if any(mark in state_dict for mark in lt.MARKS):
        return lt.CONNECTORS
    found = next((name for key, name in ENCODER_MARKS if key in state_dict), None)
    return found or _t5_name(state_dict) or _llm_name(state_dict)


def _llm_name(state_dict: Mapping[str, Tensor]) -> str | None:
    """Gemma, Llama, Mistral, Qwen 2.5, 3, 3 VL or 3.5, told apart by norms, biases and widths."""
    norm = state_dict.get("model.layers.0.post_attention_layernorm.weight")
    has_head_norms = "model.layers.0.self_attn.q_norm.weight" in state_dict
    if "model.layers.0.post_feedforward_layernorm.weight" in state_dict:
        if GEMMA3_12B_MARK in state_dict:
            return lt.GEMMA3_12B
        return lumina2.GEMMA3_4B if has_head_norms else lumina2.GEMMA2_2B
    if norm is None or EXPERTS in state_dict:
        return None
    if qwen35.MARK in state_dict:
        return qwen35.NAME
    is_narrow = norm.shape[0] == ovis.WIDTH
    if has_head_norms:
        if qwen3_vl.MARK in state_dict:
            return qwen3_vl.NAME
        if norm.shape[0] == ace15.WIDTH:
            return ace15.SMALL
        return ovis.NAME if is_narrow else qwen.QWEN3_4B
    if "model.layers.0.self_attn.k_proj.bias" in state_dict:
        return omnigen2.NAME if is_narrow else qwen.QWEN25_7B
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
    if width == hunyuan_image.BYT5_CONFIG["d_model"]:
        return hunyuan_image.BYT5
    bias = "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"
    if width == ace.CONFIG["d_model"]:
        return ace.NAME if bias in state_dict else None
    if width == pile_t5.WIDTH:  # that of mT5-XL too, whose first block alone has biases
        return pile_t5.NAME if bias in state_dict else hydit.MT5
    return umt5.NAME if bias in state_dict else "t5xxl"


def unsupported_encoder(state_dict: Mapping[str, Tensor]) -> str | None:
    """Name of an encoder that is recognised but cannot be loaded."""
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
