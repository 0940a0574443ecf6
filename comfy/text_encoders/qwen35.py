"""Qwen 3.5 as a text encoder: all last states of a question in its conversation, pictures in it.

No family has an arrangement of its own for it yet; what it is loaded for is writing. Its vocabulary
is larger than that of Qwen 2.5 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from comfy.ldm.llm.qwen35 import Qwen35
from comfy.text_encoders import conversations
from comfy.text_encoders.encoder import keeping
from comfy.text_encoders.language_model import LanguageModel, LanguageModelAlone
from comfy.text_encoders.qwen import (
    PICTURE,
    Z_IMAGE_TEMPLATE,
    QwenPieces,
    SizedQwenTokenizer,
    TemplateTokenizer,
    is_large,
)

NAME = "qwen35"
MARK = "model.layers.0.linear_attn.A_log"
PAD = 248044
OWN_FILE, SHARED_FILE = "qwen35_tokenizer.json", "tokenizer.json"
WANTED = (
    "put tokenizer.json of a Qwen 3.5 model beside the text encoder or in models/text_encoders, as "
    f"{OWN_FILE}; that of Qwen 2.5 or 3 is another one"
)


class Qwen35Pieces(QwenPieces):
    """See `QwenPieces`."""

    name = "Qwen 3.5"
    wanted = WANTED


def find_pieces(folders: Iterable[str]) -> str | None:
    """Path of the first vocabulary of Qwen 3.5 in some folders; None if there is none."""
    for folder in folders:
        own, shared = Path(folder) / OWN_FILE, Path(folder) / SHARED_FILE
        if own.is_file():
            return str(own)
        if shared.is_file() and is_large(shared.read_bytes()):
            return str(shared)
    return None


class _Tokenizer(SizedQwenTokenizer):
    encoder_name = NAME
    conversation = conversations.QWEN35
    pieces_class = Qwen35Pieces
    pad = PAD


class Qwen35Tokenizer(TemplateTokenizer):
    """Qwen's tokens of the text, behind its picture."""

    encoder_name = NAME
    pieces = _Tokenizer
    template = Z_IMAGE_TEMPLATE
    picture_template = Z_IMAGE_TEMPLATE.replace("{}", f"{PICTURE}{{}}")


class Qwen35Model(LanguageModel):
    """Qwen 3.5: its last states, and where they are of text."""

    encoder_name = NAME
    network = Qwen35
    ids: ClassVar[dict[str, int]] = {"pad": PAD}


class Qwen35TEModel(LanguageModelAlone):
    """The encoder under its name."""

    encoder = Qwen35Model


def te(dtype_llm: torch.dtype | None = None) -> Callable[..., nn.Module]:
    """Maker of the encoder whose weights are kept in a given type (None: as asked for)."""
    return keeping(Qwen35TEModel, dtype_llm)
