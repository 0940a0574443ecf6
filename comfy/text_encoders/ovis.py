"""Qwen 3 2B (Ovis 2.5) as the text encoder of Ovis-Image: 256 states from the person's words on,
those of padding zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from comfy.text_encoders.encoder import Chunk, keeping
from comfy.text_encoders.language_model import LanguageModel, LanguageModelAlone
from comfy.text_encoders.qwen import PAD, QwenTokenizer
from comfy.text_encoders.tokenizer import ConversationTokenizer

NAME = "qwen3_2b"
WIDTH = 2048
MIN_LENGTH = 284  # the conversation's 28 tokens before the words, and 256
BACKGROUND, COLON = 4004, 25  # the last tokens before the words
TEMPLATE = (
    "<|im_start|>user\nDescribe the image by detailing the color, quantity, text, shape, size, "
    "texture, spatial relationships of the objects and background: {}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
CONFIG: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8,
}  # fmt: skip


class Qwen3Tokenizer(QwenTokenizer):
    """Qwen's tokens, at least 284."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(embedding_directory, tokenizer_data, WIDTH, NAME)
        self.min_length = MIN_LENGTH


class OvisTokenizer(ConversationTokenizer):
    """Puts the text into a conversation; weights in parentheses have no meaning there."""

    encoder_name = NAME
    pieces = Qwen3Tokenizer
    template = TEMPLATE


class Ovis25_2BModel(LanguageModel):
    """Qwen 3 2B: its last states, zero where the text is over."""

    encoder_name = NAME
    sizes = CONFIG
    ids: ClassVar[dict[str, int]] = {"pad": PAD}
    tells_mask = False
    zeroes_padding = True


class OvisTEModel(LanguageModelAlone):
    """The encoder under its name."""

    encoder = Ovis25_2BModel

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Sequence[Chunk]]
    ) -> tuple[Any, ...]:
        """States from the colon before the person's words on."""
        states, pooled = super().encode_token_weights(token_weight_pairs)[:2]
        start = words_start([pair[0] for pair in token_weight_pairs[NAME][0]])
        return states[:, start:], pooled, {}


def words_start(tokens: Sequence[Any]) -> int:
    """Where the conversation's description of the task ends; 0 without one."""
    plain = [token if isinstance(token, int) else None for token in tokens]
    if BACKGROUND not in plain:
        return 0
    start = plain.index(BACKGROUND)
    return start + (plain[start + 1 : start + 2] == [COLON])


def te(dtype_llama: torch.dtype | None = None) -> Callable[..., nn.Module]:
    """Maker of the encoder whose weights are kept in a given type (None: as asked for)."""
    return keeping(OvisTEModel, dtype_llama)
