"""Text encoding of ACE-Step: UMT5-base reads the style, and lyrics are handed on as tokens.

Source: Gong et al. 2025, https://arxiv.org/abs/2506.00045, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from comfy.ldm.t5.model import T5
from comfy.text_encoders.encoder import Chunk, SDClipModel, keeping
from comfy.text_encoders.lyrics import LINE_END, LyricPieces
from comfy.text_encoders.several import SeveralEncoders, SeveralTokenizers
from comfy.text_encoders.t5_pieces import END, PAD
from comfy.text_encoders.tokenizer import UNLIMITED, SDTokenizer
from comfy.text_encoders.umt5 import UMT5Tokenizer

NAME, LYRICS = "umt5base", "lyrics"
CONFIG: dict[str, Any] = {
    "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_heads": 12, "num_layers": 12,
    "vocab_size": 256384, "model_type": "umt5",
}  # fmt: skip
LYRIC_WIDTH = 1024
LYRIC_FOLDERS = "lyric_folders"  # tokenizer data: where the vocabulary of lyrics is looked for


class UMT5BaseTokenizer(UMT5Tokenizer):
    """Tokens of the style, without padding."""

    encoder_name = NAME
    width = CONFIG["d_model"]
    shortest = 1


class LyricTokenizer(SDTokenizer):
    """Tokens of the lyrics in one chunk, which starts and has no end but those of lines."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(
            max_length=UNLIMITED,
            pad_with_end=False,
            embedding_directory=embedding_directory,
            embedding_size=LYRIC_WIDTH,
            embedding_key=LYRICS,
            tokenizer_class=LyricPieces,
            has_end_token=False,
            pad_to_max_length=False,
            min_length=1,
            pad_token=LINE_END,
            tokenizer_data=tokenizer_data,
            tokenizer_args={"folders": (tokenizer_data or {}).get(LYRIC_FOLDERS, ())},
        )


class AceT5Tokenizer(SeveralTokenizers):
    """Tokens of style and lyrics, under the names "umt5base" and "lyrics"."""

    parts: ClassVar[dict[str, str]] = {NAME: NAME, LYRICS: LYRICS}

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        self.umt5base = UMT5BaseTokenizer(embedding_directory, tokenizer_data)
        self.lyrics = LyricTokenizer(embedding_directory, tokenizer_data)

    def tokenize_with_weights(
        self, text: str, return_word_ids: bool = False, lyrics: str = "", **kwargs: Any
    ) -> dict[str, list[list[tuple[Any, ...]]]]:
        """Chunks of weighted tokens by name.

        Args:
            text: The style.
            lyrics: What is sung.
        """
        return {
            NAME: self.umt5base.tokenize_with_weights(text, return_word_ids, **kwargs),
            LYRICS: self.lyrics.tokenize_with_weights(lyrics, return_word_ids, **kwargs),
        }

    def state_dict(self) -> dict[str, Any]:
        """The vocabulary of UMT5, where it came from the encoder's file."""
        return self.umt5base.state_dict()


class AceT5Model(SeveralEncoders):
    """The encoder of the style."""

    parts: ClassVar[tuple[str, ...]] = (NAME,)

    def __init__(
        self,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(dtype)
        self.umt5base = SDClipModel(
            device=device,
            dtype=dtype,
            textmodel_json_config=CONFIG,
            special_tokens={"end": END, "pad": PAD},
            model_class=T5,
            enable_attention_masks=True,
            model_options={**(model_options or {}), "model_name": NAME},
        )

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, list[Chunk]]
    ) -> tuple[Tensor, None, dict[str, Tensor]]:
        """States of the style ``[1, L, 768]``, and the lyrics' tokens ``[1, M]`` as
        ``conditioning_lyrics``.
        """
        states, *_ = self.umt5base.encode_token_weights(token_weight_pairs[NAME])
        tokens = [token for token, *_ in token_weight_pairs[LYRICS][0]]
        return states, None, {"conditioning_lyrics": torch.tensor([tokens])}


def ace_clip(dtype_t5: torch.dtype | None = None) -> Callable[..., nn.Module]:
    """Maker of the encoder whose weights are kept in a given type (None: as asked for)."""
    return keeping(AceT5Model, dtype_t5)
