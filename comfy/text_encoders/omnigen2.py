"""Qwen 2.5 3B as the text encoder of OmniGen 2: all states of a short conversation.

Weights in parentheses count, unlike with the other models that ask Qwen.
Source: https://github.com/VectorSpaceLab/OmniGen2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from comfy.text_encoders.conversations import QWEN25
from comfy.text_encoders.encoder import keeping
from comfy.text_encoders.language_model import LanguageModel, LanguageModelAlone
from comfy.text_encoders.qwen import PAD, QwenTokenizer
from comfy.text_encoders.tokenizer import ConversationTokenizer

NAME = "qwen25_3b"
WIDTH = 2048
TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant that generates high-quality images based on "
    "user instructions.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
)
CONFIG: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": WIDTH, "intermediate_size": 11008,
    "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
    "qkv_bias": True, "qk_norm": False,
}  # fmt: skip


class _Tokenizer(QwenTokenizer):
    conversation = QWEN25

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(embedding_directory, tokenizer_data, WIDTH, NAME)


class Omnigen2Tokenizer(ConversationTokenizer):
    """Qwen's tokens of the text in its conversation."""

    encoder_name = NAME
    pieces = _Tokenizer
    template = TEMPLATE
    weighs = True


class Qwen25_3BModel(LanguageModel):
    """Qwen 2.5 3B: its last states, and where they are of text."""

    encoder_name = NAME
    sizes = CONFIG
    ids: ClassVar[dict[str, int]] = {"pad": PAD}


class Omnigen2TEModel(LanguageModelAlone):
    """The encoder under its name."""

    encoder = Qwen25_3BModel


def omnigen2_clip(dtype_llm: torch.dtype | None = None) -> Callable[..., nn.Module]:
    """Maker of the encoder whose weights are kept in a given type (None: as asked for)."""
    return keeping(Omnigen2TEModel, dtype_llm)
