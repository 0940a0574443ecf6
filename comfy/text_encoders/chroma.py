"""Text encoding of Chroma: the tokens of T5-XXL, without padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from comfy.text_encoders.encoder import SD1ClipModel
from comfy.text_encoders.t5_encoder import NAME, T5XXLModel, T5XXLTokenizer
from comfy.text_encoders.tokenizer import SD1Tokenizer

MIN_LENGTH = 1


class _Tokenizer(T5XXLTokenizer):
    """T5's tokens, and no more of them than a text has."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(embedding_directory, tokenizer_data, min_length=MIN_LENGTH)


class ChromaTokenizer(SD1Tokenizer):
    """The tokens under the encoder's name."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(embedding_directory, tokenizer_data, NAME, _Tokenizer, name=NAME)


class ChromaTEModel(SD1ClipModel):
    """The encoder under its name."""

    def __init__(
        self,
        device: Any = "cpu",
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            device, dtype, model_options, clip_name=NAME, clip_model=T5XXLModel, name=NAME
        )


def chroma_clip(dtype_t5: torch.dtype | None = None) -> Callable[..., nn.Module]:
    """Maker of the encoder whose weights are kept in a given type (None: as asked for)."""

    def build(
        device: Any = "cpu", dtype: Any = None, model_options: Mapping[str, Any] | None = None
    ) -> ChromaTEModel:
        return ChromaTEModel(device, dtype_t5 or dtype, model_options)

    return build
