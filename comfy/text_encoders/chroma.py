"""Text encoding of Chroma: the tokens of T5-XXL, without padding, as PixArt has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from comfy.text_encoders.t5_alone import PIXART, T5AloneTokenizer, t5_alone_clip


class ChromaTokenizer(T5AloneTokenizer):
    """The tokens under the encoder's name."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(PIXART, embedding_directory, tokenizer_data)


def chroma_clip(dtype_t5: torch.dtype | None = None) -> Callable[..., nn.Module]:
    """Maker of the encoder whose weights are kept in a given type (None: as asked for)."""
    return t5_alone_clip(PIXART, dtype_t5)
