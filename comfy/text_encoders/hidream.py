"""Text encoding of HiDream: pooled states of both CLIPs, states of T5 XXL, and those of every layer
of Llama 3.1 8B. Any of the four may be absent and then counts as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from comfy.devices import placement
from comfy.text_encoders.encoder import Chunk
from comfy.text_encoders.hunyuan_video import CONFIG, START, LlamaTokenizer
from comfy.text_encoders.hunyuan_video import NAME as LLAMA
from comfy.text_encoders.language_model import LanguageModel
from comfy.text_encoders.sd3 import G_WIDTH, L_WIDTH, WIDTH
from comfy.text_encoders.sdxl import SDXLClipG, SDXLClipGTokenizer
from comfy.text_encoders.several import (
    SeveralEncoders,
    SeveralTokenizers,
    clip_l_encoder,
    clip_l_tokenizer,
)
from comfy.text_encoders.t5_encoder import T5XXLModel, T5XXLTokenizer
from comfy.text_encoders.t5_pieces import DATA_ENTRY, pieces_source

PARTS = ("clip_l", "clip_g", "t5xxl", LLAMA)
LENGTH = 128  # tokens of T5 and, at least, of Llama
PAD = 128009
LAYERS = 32  # of Llama


def own_vocabulary(data: Mapping[str, Any], encoder: str) -> dict[str, Any]:
    """Tokenizer data of one encoder among several that have vocabularies in files."""
    return {**data, DATA_ENTRY: data.get(f"{encoder}_vocabulary") or data.get(DATA_ENTRY)}


class Llama31Tokenizer(LlamaTokenizer):
    """Llama 3.1's tokens, padded with another one and to fewer."""

    fewest = LENGTH
    pad = PAD


class HiDreamTokenizer(SeveralTokenizers):
    """Tokens of all four encoders, under the names "l", "g", "t5xxl" and "llama"."""

    parts: ClassVar[dict[str, str]] = {"g": "clip_g", "l": "clip_l", "t5xxl": "t5xxl", LLAMA: LLAMA}

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        data = dict(tokenizer_data or {})
        self.clip_l = clip_l_tokenizer(embedding_directory, data)
        self.clip_g = SDXLClipGTokenizer(
            embedding_directory=embedding_directory, tokenizer_data=data
        )
        # An arrangement without an encoder does not need its vocabulary.
        has_t5, has_llama = (
            any(f"{name}." in key for key in data) for name in ("t5xxl.transformer", LLAMA)
        )
        own = own_vocabulary(data, "t5xxl")
        self.t5xxl = None
        if has_t5 or (not has_llama and pieces_source(own) is not None):
            self.t5xxl = T5XXLTokenizer(embedding_directory, own, LENGTH, LENGTH)
        self.llama = None
        if has_llama:
            self.llama = Llama31Tokenizer(embedding_directory, own_vocabulary(data, LLAMA))


class LlamaStates(LanguageModel):
    """Llama 3.1 8B: the states of every layer."""

    encoder_name = LLAMA
    sizes = CONFIG
    reads = ("all", None)
    ids: ClassVar[dict[str, int]] = {"start": START, "pad": PAD}


class HiDreamTEModel(SeveralEncoders):
    """The four encoders; that of all layers takes no choice of one."""

    parts: ClassVar[tuple[str, ...]] = PARTS
    without_layer: ClassVar[tuple[str, ...]] = ("t5xxl", LLAMA)

    def __init__(
        self,
        present: Sequence[str] = PARTS,
        dtype_kept: torch.dtype | None = None,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(dtype, dtype_kept)
        options = dict(model_options or {})
        large = dtype_kept or dtype
        self.clip_l = self.clip_g = self.t5xxl = self.llama = None
        if "clip_l" in present:
            self.clip_l = clip_l_encoder(device, dtype, options, return_projected_pooled=True)
        if "clip_g" in present:
            self.clip_g = SDXLClipG(device=device, dtype=dtype, model_options=options)
        if "t5xxl" in present:
            self.t5xxl = T5XXLModel(device=device, dtype=large, model_options=options)
        if LLAMA in present:
            self.llama = LlamaStates(device, large, options)

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Sequence[Chunk]]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """T5's states ``[1, L, D]``, both pooled states ``[1, Dl + Dg]``, and
        ``conditioning_llama3 [1, layers, M, D]``.
        """
        resting = placement.intermediate_device()
        pooled = []
        for name, held, width in (("l", self.clip_l, L_WIDTH), ("g", self.clip_g, G_WIDTH)):
            if held is None:
                pooled.append(torch.zeros(1, width, device=resting))
            else:
                pooled.append(held.encode_token_weights(token_weight_pairs[name])[1])
        states = torch.zeros(1, LENGTH, WIDTH, device=resting)
        if self.t5xxl is not None:
            states = self.t5xxl.encode_token_weights(token_weight_pairs["t5xxl"])[0]
        layers = torch.zeros(1, LAYERS, 1, WIDTH, device=resting)
        if self.llama is not None:
            made = self.llama.encode_token_weights(token_weight_pairs[LLAMA])[0]
            layers = made[:, 1:]  # the first are the tokens before any layer
        return states, torch.cat(pooled, dim=-1), {"conditioning_llama3": layers}


def hidream_clip(
    present: Sequence[str], dtype_kept: torch.dtype | None = None
) -> Callable[..., HiDreamTEModel]:
    """Maker of the encoders that are there; weights of T5 and Llama are kept in a given type."""
    return partial(HiDreamTEModel, tuple(present), dtype_kept)
