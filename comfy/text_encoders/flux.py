"""Text encoding of Flux: the tokens of T5-XXL, and the pooled state of CLIP ViT-L."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from comfy.text_encoders.encoder import Chunk
from comfy.text_encoders.several import (
    SeveralEncoders,
    SeveralTokenizers,
    clip_l_encoder,
    clip_l_tokenizer,
)
from comfy.text_encoders.t5_encoder import T5XXLModel, T5XXLTokenizer

MIN_LENGTH = 256  # tokens Flux was trained with


class FluxTokenizer(SeveralTokenizers):
    """Tokens of both encoders, under the names "l" and "t5xxl"."""

    parts: ClassVar[dict[str, str]] = {"l": "clip_l", "t5xxl": "t5xxl"}

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        given = {"embedding_directory": embedding_directory, "tokenizer_data": tokenizer_data or {}}
        self.clip_l = clip_l_tokenizer(**given)
        self.t5xxl = T5XXLTokenizer(**given, min_length=MIN_LENGTH)


class FluxClipModel(SeveralEncoders):
    """Both encoders."""

    parts: ClassVar[tuple[str, ...]] = ("clip_l", "t5xxl")

    def __init__(
        self,
        dtype_t5: torch.dtype | None = None,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(dtype, dtype_t5)
        self.clip_l = clip_l_encoder(device, dtype, model_options, return_projected_pooled=False)
        self.t5xxl = T5XXLModel(device=device, dtype=dtype_t5 or dtype, model_options=model_options)

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Sequence[Chunk]]
    ) -> tuple[Tensor, Tensor]:
        """T5's states ``[1, L, D]`` and CLIP's pooled state."""
        states = self.t5xxl.encode_token_weights(token_weight_pairs["t5xxl"])[0]
        pooled = self.clip_l.encode_token_weights(token_weight_pairs["l"])[1]
        return states, pooled


def flux_clip(dtype_t5: torch.dtype | None = None) -> Callable[..., FluxClipModel]:
    """Maker of the encoders; T5's weights are kept in a given type (None: as asked for)."""
    return partial(FluxClipModel, dtype_t5)
