"""Qwen 2.5 3B as the text encoder of OmniGen 2: all states of a short conversation.

Weights in parentheses count, unlike with the other models that ask Qwen.
Source: https://github.com/VectorSpaceLab/OmniGen2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from comfy.ldm.llm.model import DecoderLLM
from comfy.text_encoders.encoder import SD1ClipModel, SDClipModel, keeping
from comfy.text_encoders.qwen import PAD, QwenTokenizer
from comfy.text_encoders.tokenizer import SD1Tokenizer

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
    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(embedding_directory, tokenizer_data, WIDTH, NAME)


class Omnigen2Tokenizer(SD1Tokenizer):
    """Qwen's tokens of the text in its conversation."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(embedding_directory, tokenizer_data, NAME, _Tokenizer, name=NAME)

    def tokenize_with_weights(
        self,
        text: str,
        return_word_ids: bool = False,
        llama_template: str | None = None,
        **kwargs: Any,
    ) -> dict[str, list[list[tuple[Any, ...]]]]:
        """Chunks of tokens by encoder name.

        Args:
            llama_template: A conversation with ``{}`` for the text, in place of the usual one.
        """
        whole = (llama_template or TEMPLATE).replace("{}", text)
        return super().tokenize_with_weights(whole, return_word_ids, **kwargs)


class Qwen25_3BModel(SDClipModel):
    """Qwen 2.5 3B: its last states, and where they are of text."""

    def __init__(
        self, device: Any = "cpu", dtype: Any = None, model_options: Any = None, **_: Any
    ) -> None:
        super().__init__(
            device=device,
            layer="last",
            textmodel_json_config=CONFIG,
            dtype=dtype,
            special_tokens={"pad": PAD},
            layer_norm_hidden_state=False,
            model_class=DecoderLLM,
            enable_attention_masks=True,
            return_attention_masks=True,
            model_options={**(model_options or {}), "model_name": NAME},
        )


class Omnigen2TEModel(SD1ClipModel):
    """The encoder under its name."""

    def __init__(self, device: Any = "cpu", dtype: Any = None, model_options: Any = None) -> None:
        super().__init__(
            device, dtype, model_options, clip_name=NAME, clip_model=Qwen25_3BModel, name=NAME
        )


def omnigen2_clip(dtype_llm: torch.dtype | None = None) -> Callable[..., nn.Module]:
    """Maker of the encoder whose weights are kept in a given type (None: as asked for)."""
    return keeping(Omnigen2TEModel, dtype_llm)
