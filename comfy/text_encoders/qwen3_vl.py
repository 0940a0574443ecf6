"""Qwen 3 VL as a text encoder: all last states of a question in its conversation, pictures in it.

No family has an arrangement of its own for it yet; what it is loaded for is writing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from comfy.ldm.llm.qwen3_vl import Qwen3VL
from comfy.text_encoders import conversations
from comfy.text_encoders.encoder import keeping
from comfy.text_encoders.language_model import LanguageModel, LanguageModelAlone
from comfy.text_encoders.qwen import (
    PAD,
    PICTURE,
    Z_IMAGE_TEMPLATE,
    SizedQwenTokenizer,
    TemplateTokenizer,
)

NAME = "qwen3vl"
MARK = "visual.deepstack_merger_list.0.norm.weight"


class _Tokenizer(SizedQwenTokenizer):
    encoder_name = NAME
    conversation = conversations.QWEN3_VL


class Qwen3VLTokenizer(TemplateTokenizer):
    """Qwen's tokens of the text, behind its picture."""

    encoder_name = NAME
    pieces = _Tokenizer
    template = Z_IMAGE_TEMPLATE
    picture_template = Z_IMAGE_TEMPLATE.replace("{}", f"{PICTURE}{{}}")


class Qwen3VLModel(LanguageModel):
    """Qwen 3 VL: its last states, and where they are of text."""

    encoder_name = NAME
    network = Qwen3VL
    ids: ClassVar[dict[str, int]] = {"pad": PAD}


class Qwen3VLTEModel(LanguageModelAlone):
    """The encoder under its name."""

    encoder = Qwen3VLModel


def te(dtype_llm: torch.dtype | None = None) -> Callable[..., nn.Module]:
    """Maker of the encoder whose weights are kept in a given type (None: as asked for)."""
    return keeping(Qwen3VLTEModel, dtype_llm)
