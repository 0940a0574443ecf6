"""T5-XXL as the text encoder of SD3, Flux and others: its tokenizer and its encoder class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy.ldm.t5.model import T5
from comfy.text_encoders.encoder import SDClipModel
from comfy.text_encoders.t5_pieces import END, PAD, T5Pieces, pieces_source
from comfy.text_encoders.tokenizer import UNLIMITED, SDTokenizer

NAME = "t5xxl"


class T5XXLModel(SDClipModel):
    """T5 v1.1 XXL: no start token, no pooled state; padding is token 0."""

    def __init__(
        self,
        device: Any = "cpu",
        layer: str = "last",
        layer_idx: int | None = None,
        dtype: Any = None,
        attention_mask: bool = False,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            device=device,
            layer=layer,
            layer_idx=layer_idx,
            dtype=dtype,
            special_tokens={"end": END, "pad": PAD},
            model_class=T5,
            enable_attention_masks=attention_mask,
            return_attention_masks=attention_mask,
            model_options={**(model_options or {}), "model_name": NAME},
        )


class T5XXLTokenizer(SDTokenizer):
    """T5's tokens, in one chunk of any length and at least ``min_length``."""

    def __init__(
        self,
        embedding_directory: Any = None,
        tokenizer_data: Mapping[str, Any] | None = None,
        min_length: int = 77,
        max_length: int = UNLIMITED,
    ) -> None:
        super().__init__(
            pieces_source(tokenizer_data),  # type: ignore[arg-type] # may be its bytes
            max_length=max_length,
            pad_with_end=False,
            embedding_directory=embedding_directory,
            embedding_size=4096,
            embedding_key=NAME,
            tokenizer_class=T5Pieces,
            has_start_token=False,
            pad_to_max_length=False,
            min_length=min_length,
            tokenizer_data=tokenizer_data,
        )
