"""Gemma 2 2B and Gemma 3 4B as text encoders: of Lumina-Image 2.0 and its relatives.

The vocabulary is usually part of the encoder's file (a tensor `spiece_model`).
Source: https://arxiv.org/abs/2408.00118, https://arxiv.org/abs/2503.19786.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from comfy.ldm.llm.gemma_vl import Gemma3VL
from comfy.text_encoders.conversations import GEMMA2, GEMMA3
from comfy.text_encoders.encoder import SD1ClipModel, SDClipModel, keeping
from comfy.text_encoders.pieces import read_pieces
from comfy.text_encoders.sentencepiece_file import read_piece_file, tokenizer_of
from comfy.text_encoders.t5_pieces import EMBEDDED, pieces_source
from comfy.text_encoders.tokenizer import UNLIMITED, SDTokenizer, TokenizerAlone

GEMMA2_2B, GEMMA3_4B = "gemma2_2b", "gemma3_4b"
PAD, START = 0, 2
HIDDEN_LAYER = -2
FILE_NAMES = ("gemma_tokenizer.json", "gemma_tokenizer.model", "tokenizer.model", "tokenizer.json")
MARK = b"<start_of_turn>"  # in every vocabulary of Gemma
WANTED = (
    "take a file of Gemma that holds them (a tensor spiece_model), or put tokenizer.json or "
    "tokenizer.model of the same Gemma beside it or in models/text_encoders, as "
    "gemma_tokenizer.json or gemma_tokenizer.model"
)
GEMMA2_CONFIG: dict[str, Any] = {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "rope_theta": 10000.0, "qk_norm": False, "transformer_type": "gemma2",
    "score_cap": 50.0, "word_cap": 30.0,
}  # fmt: skip
GEMMA3_CONFIG: dict[str, Any] = {
    "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
    "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "transformer_type": "gemma3",
    "rope_theta": (1000000.0, 10000.0), "rope_scale": (8.0, 1.0),
    "sliding_attention": (1024, 1024, 1024, 1024, 1024, False),
}  # fmt: skip


class GemmaPieces:
    """Called with text, it gives the start's id and those of the text."""

    def __init__(self, pieces: Tokenizer) -> None:
        self.pieces = pieces

    @classmethod
    def from_pretrained(cls, source: str | bytes | None = None) -> GemmaPieces:
        """From the path of a `tokenizer.json` or `tokenizer.model`, or the latter's bytes.

        Raises:
            FileNotFoundError: There is none; the text says what is needed.
            ValueError: It is no tokenizer.
        """
        if isinstance(source, str) and source.endswith(".model") and Path(source).is_file():
            source = Path(source).read_bytes()
        if not isinstance(source, bytes):
            return cls(read_pieces(source, "Gemma", WANTED))
        try:
            return cls(tokenizer_of(read_piece_file(source)))
        except ValueError as error:
            raise ValueError(f"these are no word pieces of Gemma ({error}); {WANTED}") from error

    def __call__(self, text: str) -> dict[str, list[int]]:
        """``{"input_ids": [start, ...]}``."""
        return {"input_ids": [START, *self.pieces.encode(text, add_special_tokens=False).ids]}

    def get_vocab(self) -> dict[str, int]:
        """Word piece -> id."""
        return self.pieces.get_vocab()


def find_gemma_pieces(folders: Iterable[str]) -> str | None:
    """Path of the first vocabulary of Gemma in some folders; None if there is none."""
    for folder in folders:
        for name in FILE_NAMES:
            path = Path(folder) / name
            if path.is_file() and MARK in path.read_bytes():
                return str(path)
    return None


class GemmaTokenizer(SDTokenizer):
    """Gemma's tokens in one chunk of any length."""

    conversation = GEMMA3
    saved_as = EMBEDDED

    def __init__(
        self,
        width: int,
        name: str,
        embedding_directory: Any = None,
        tokenizer_data: Mapping[str, Any] | None = None,
        disable_weights: bool = False,
    ) -> None:
        self.source = pieces_source(tokenizer_data)
        super().__init__(
            self.source,  # may be its bytes
            max_length=UNLIMITED,
            pad_with_end=False,
            embedding_directory=embedding_directory,
            embedding_size=width,
            embedding_key=name,
            tokenizer_class=GemmaPieces,
            has_end_token=False,
            pad_to_max_length=False,
            min_length=1,
            start_token=START,
            pad_token=PAD,
            disable_weights=disable_weights,
            tokenizer_data=tokenizer_data,
        )


class Gemma2BTokenizer(GemmaTokenizer):
    """Gemma 2's."""

    conversation = GEMMA2

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(2304, GEMMA2_2B, embedding_directory, tokenizer_data)


class Gemma3_4BTokenizer(GemmaTokenizer):
    """Gemma 3's; weights in parentheses have no meaning for it."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(2560, GEMMA3_4B, embedding_directory, tokenizer_data, True)


class LuminaTokenizer(TokenizerAlone):
    """Gemma 2's tokens under the encoder's name."""

    encoder_name = GEMMA2_2B
    pieces = Gemma2BTokenizer


class NTokenizer(TokenizerAlone):
    """Gemma 3's tokens under the encoder's name."""

    encoder_name = GEMMA3_4B
    pieces = Gemma3_4BTokenizer


class GemmaModel(SDClipModel):
    """A Gemma: the states of its last layer but one, and where they are of text."""

    def __init__(
        self,
        config: Mapping[str, Any],
        device: Any = "cpu",
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            device=device,
            layer="hidden",
            layer_idx=HIDDEN_LAYER,
            textmodel_json_config=config,
            dtype=dtype,
            special_tokens={"start": START, "pad": PAD},
            layer_norm_hidden_state=False,
            model_class=Gemma3VL,
            enable_attention_masks=True,
            return_attention_masks=True,
            model_options=model_options,
        )


class Gemma2_2BModel(GemmaModel):
    """Gemma 2 2B."""

    def __init__(
        self, device: Any = "cpu", dtype: Any = None, model_options: Any = None, **_: Any
    ) -> None:
        options = {**(model_options or {}), "model_name": GEMMA2_2B}
        super().__init__(GEMMA2_CONFIG, device, dtype, options)


class Gemma3_4BModel(GemmaModel):
    """Gemma 3 4B."""

    def __init__(
        self, device: Any = "cpu", dtype: Any = None, model_options: Any = None, **_: Any
    ) -> None:
        options = {**(model_options or {}), "model_name": GEMMA3_4B}
        super().__init__(GEMMA3_CONFIG, device, dtype, options)


class LuminaModel(SD1ClipModel):
    """A Gemma under its name."""

    def __init__(
        self,
        device: Any = "cpu",
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
        name: str = GEMMA2_2B,
        clip_model: Any = Gemma2_2BModel,
    ) -> None:
        super().__init__(
            device, dtype, model_options, clip_name=name, clip_model=clip_model, name=name
        )


class NModel(LuminaModel):
    """Gemma 3 4B under its name."""

    def __init__(
        self,
        device: Any = "cpu",
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(device, dtype, model_options, GEMMA3_4B, Gemma3_4BModel)


def te(
    dtype_llama: torch.dtype | None = None, model_type: str = GEMMA2_2B
) -> Callable[..., nn.Module]:
    """Maker of the encoder whose weights are kept in a given type (None: as asked for)."""
    return keeping(NModel if model_type == GEMMA3_4B else LuminaModel, dtype_llama)
