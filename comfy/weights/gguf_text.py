"""Text encoders in GGUF files: names of llama.cpp -> those the weights were published with.

Besides names, three things differ. Queries and keys of Llama and Mistral have the rows of each head
in another order (places turn neighbours there, halves here). Norms of Gemma count from 0, not from
1. The vocabulary is in the header: it becomes a tensor of bytes named `VOCABULARY`.
Source: https://github.com/ggml-org/llama.cpp, gguf-py/gguf/tensor_mapping.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from comfy.weights import gguf_vocabulary
from comfy.weights.errors import UnknownWeightFormatError, WeightFileError

VOCABULARY = "vocabulary_of_header"
"""Key of a vocabulary: bytes of a tokenizer.json or of a SentencePiece model."""

T5_NAMES: dict[str, str] = {
    "token_embd": "shared",
    "enc.output_norm": "encoder.final_layer_norm",
    "enc.blk.N.attn_norm": "encoder.block.N.layer.0.layer_norm",
    "enc.blk.N.attn_q": "encoder.block.N.layer.0.SelfAttention.q",
    "enc.blk.N.attn_k": "encoder.block.N.layer.0.SelfAttention.k",
    "enc.blk.N.attn_v": "encoder.block.N.layer.0.SelfAttention.v",
    "enc.blk.N.attn_o": "encoder.block.N.layer.0.SelfAttention.o",
    "enc.blk.N.attn_rel_b": "encoder.block.N.layer.0.SelfAttention.relative_attention_bias",
    "enc.blk.N.ffn_norm": "encoder.block.N.layer.1.layer_norm",
    "enc.blk.N.ffn_gate": "encoder.block.N.layer.1.DenseReluDense.wi_0",
    "enc.blk.N.ffn_up": "encoder.block.N.layer.1.DenseReluDense.wi_1",
    "enc.blk.N.ffn_down": "encoder.block.N.layer.1.DenseReluDense.wo",
}
LLM_NAMES: dict[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.N.attn_norm": "model.layers.N.input_layernorm",
    "blk.N.attn_q": "model.layers.N.self_attn.q_proj",
    "blk.N.attn_k": "model.layers.N.self_attn.k_proj",
    "blk.N.attn_v": "model.layers.N.self_attn.v_proj",
    "blk.N.attn_output": "model.layers.N.self_attn.o_proj",
    "blk.N.attn_q_norm": "model.layers.N.self_attn.q_norm",
    "blk.N.attn_k_norm": "model.layers.N.self_attn.k_norm",
    "blk.N.ffn_norm": "model.layers.N.post_attention_layernorm",
    "blk.N.ffn_gate": "model.layers.N.mlp.gate_proj",
    "blk.N.ffn_up": "model.layers.N.mlp.up_proj",
    "blk.N.ffn_down": "model.layers.N.mlp.down_proj",
}
GEMMA_NAMES: dict[str, str] = {
    **LLM_NAMES,
    "blk.N.post_attention_norm": "model.layers.N.post_attention_layernorm",
    "blk.N.ffn_norm": "model.layers.N.pre_feedforward_layernorm",
    "blk.N.post_ffw_norm": "model.layers.N.post_feedforward_layernorm",
}
TOWER_NAMES: dict[str, str] = {
    "v.patch_embd": "visual.patch_embed.proj",
    "v.post_ln": "visual.merger.ln_q",
    "mm.0": "visual.merger.mlp.0",
    "mm.2": "visual.merger.mlp.2",
    "v.blk.N.ln1": "visual.blocks.N.norm1",
    "v.blk.N.ln2": "visual.blocks.N.norm2",
    "v.blk.N.attn_qkv": "visual.blocks.N.attn.qkv",
    "v.blk.N.attn_out": "visual.blocks.N.attn.proj",
    "v.blk.N.ffn_gate": "visual.blocks.N.mlp.gate_proj",
    "v.blk.N.ffn_up": "visual.blocks.N.mlp.up_proj",
    "v.blk.N.ffn_down": "visual.blocks.N.mlp.down_proj",
}
"""Of the picture tower of Qwen 2.5 VL, which has a file of its own (mmproj)."""

# Architectures, as headers name them -> names of their weights.
ARCHITECTURES: dict[str, dict[str, str]] = {
    **dict.fromkeys(("t5", "t5encoder", "umt5"), T5_NAMES),
    **dict.fromkeys(("llama", "mistral3", "qwen2", "qwen2vl", "qwen3"), LLM_NAMES),
    **dict.fromkeys(("gemma2", "gemma3"), GEMMA_NAMES),
    "clip": TOWER_NAMES,
}
TURNING_NEIGHBOURS = ("llama", "mistral3")  # whose queries and keys have another order
COUNTING_FROM_ZERO = ("gemma2", "gemma3")
# Tensors that no text encoder needs: T5's way back to words, and tables that follow from sizes.
UNUSED = re.compile(r"^(dec\.|rope_freqs|rope_factors)")
OF_LLAMA_CPP = re.compile(r"^(enc\.|v\.)?blk\.\d+\.attn_")


def published(
    tensors: dict[str, Tensor], facts: Mapping[str, Any], path: str | os.PathLike[str]
) -> dict[str, Tensor]:
    """The tensors of a file by the names they were published with.

    Args:
        tensors: By the names of the file. Those of a file that has published names stay.
        facts: Of the header.
        path: For messages.
    Raises:
        UnknownWeightFormatError: Names are llama.cpp's, but the architecture has no text encoder.
        WeightFileError: Tensors or lists of the header do not belong together.
    """
    if not any(OF_LLAMA_CPP.match(name) for name in tensors):
        return tensors
    kind = str(facts.get("general.architecture"))
    names = ARCHITECTURES.get(kind)
    if names is None:
        raise UnknownWeightFormatError(
            path,
            f"this is a language model of the architecture {kind!r}",
            f"choose one that is used as a text encoder ({', '.join(ARCHITECTURES)})",
        )
    if names is TOWER_NAMES:
        tensors = _joined_tower(tensors, path)
    if kind in TURNING_NEIGHBOURS:
        tensors = {**tensors, **dict(_with_turning_halves(tensors, facts, kind, path))}
    if kind in COUNTING_FROM_ZERO:
        norms = {k: v.float() - 1 for k, v in tensors.items() if k.endswith("norm.weight")}
        tensors = {**tensors, **norms}
    renamed = {_name(key, names): value for key, value in tensors.items() if not UNUSED.match(key)}
    renamed = _without_gate(renamed)
    try:
        vocabulary = gguf_vocabulary.of_header(facts)
    except gguf_vocabulary.BrokenVocabularyError as error:
        raise WeightFileError(path, f"its vocabulary is broken: {error}") from error
    if vocabulary is not None:
        renamed[VOCABULARY] = torch.frombuffer(bytearray(vocabulary), dtype=torch.uint8)
    return renamed


def _name(key: str, names: Mapping[str, str]) -> str:
    layer, _, last = key.rpartition(".")
    number = re.search(r"(?<=\.)\d+(?=\.)", layer)
    generic = layer if number is None else layer.replace(f".{number[0]}.", ".N.", 1)
    found = names.get(generic)
    if found is None:
        return key  # reported with the other keys that have no place
    return f"{found if number is None else found.replace('.N.', f'.{number[0]}.')}.{last}"


def _joined_tower(tensors: Mapping[str, Tensor], path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """A tower with queries, keys and values in one layer, and both pictures of a patch in one."""
    joined = dict(tensors)
    for key in tensors:
        if ".attn_q." in key:
            names = [key.replace(".attn_q.", f".attn_{part}.") for part in "qkv"]
            joined[key.replace(".attn_q.", ".attn_qkv.")] = torch.cat(
                _taken(joined, names, path, 1)
            )
    first, second = "v.patch_embd.weight", "v.patch_embd.weight.1"
    if second in joined:
        joined[first] = torch.stack(_taken(joined, [first, second], path), dim=2)
    return joined


def _taken(
    tensors: dict[str, Tensor], names: list[str], path: str | os.PathLike[str], axis: int = 0
) -> list[Tensor]:
    """Tensors that are to be joined, taken out.

    Raises:
        WeightFileError: One is missing, or has another shape from an axis on.
    """
    found = [tensors.pop(name, None) for name in names]
    shapes = [None if tensor is None else tuple(tensor.shape) for tensor in found]
    if None in shapes or len({shape[axis:] for shape in shapes if shape is not None}) > 1:
        raise WeightFileError(path, f"{', '.join(names)} do not fit together, found {shapes}")
    return [tensor for tensor in found if tensor is not None]


def _without_gate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A T5 of the first version has one factor where later ones have two."""
    if any(key.endswith("wi_0.weight") for key in tensors):
        return tensors
    return {key.replace(".wi_1.", ".wi."): value for key, value in tensors.items()}


def _with_turning_halves(
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    kind: str,
    path: str | os.PathLike[str],
) -> Iterator[tuple[str, Tensor]]:
    """Queries and keys with the rows of each head in the order in which halves turn together."""
    heads = facts.get(f"{kind}.attention.head_count")
    groups = facts.get(f"{kind}.attention.head_count_kv", heads)
    if not isinstance(heads, int) or not isinstance(groups, int):
        raise UnknownWeightFormatError(
            path,
            f"its header has no number '{kind}.attention.head_count', on which rows depend",
            "take a file that current tools of llama.cpp wrote",
        )
    counts = {"attn_q": heads, "attn_k": groups}
    for key, value in tensors.items():
        count = counts.get(key.rpartition(".")[0].rpartition(".")[2])
        if count is not None:
            if count < 1 or len(value) % (2 * count):
                raise WeightFileError(
                    path, f"'{key}' has {len(value)} rows, which are not those of {count} heads"
                )
            rows = torch.arange(len(value)).reshape(count, -1, 2)
            yield key, value[rows.transpose(1, 2).flatten()]
