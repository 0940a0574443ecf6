"""Text encoding of NewBie: states of Gemma 3 4B, and the pooled state of Jina CLIP v2.

The tokens are named "gemma" and "jina", as are the encoders in whole checkpoints; here each encoder
is held under the name it has alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from comfy.text_encoders.encoder import Chunk
from comfy.text_encoders.jina_clip_2 import MARK as JINA_MARK
from comfy.text_encoders.jina_clip_2 import NAME as JINA
from comfy.text_encoders.jina_clip_2 import JinaClip2TextModel, JinaClip2Tokenizer
from comfy.text_encoders.lumina2 import GEMMA3_4B, Gemma3_4BModel, Gemma3_4BTokenizer
from comfy.text_encoders.several import SeveralEncoders, SeveralTokenizers
from comfy.text_encoders.t5_pieces import DATA_ENTRY, EMBEDDED

IN_CHECKPOINTS = {GEMMA3_4B: "gemma", JINA: "jina"}


def _own_pieces(name: str, tokenizer_data: Mapping[str, Any] | None) -> dict[str, Any]:
    """Tokenizer data with the vocabulary of one encoder only: both may have a `spiece_model`."""
    data = tokenizer_data or {}
    embedded = data.get(f"{name}.{EMBEDDED}")
    own = {DATA_ENTRY: data.get(f"{name}_vocabulary")}
    return own if embedded is None else {EMBEDDED: embedded}


class NewBieTokenizer(SeveralTokenizers):
    """Tokens of both encoders, under the names "gemma" and "jina"."""

    parts: ClassVar[dict[str, str]] = {short: name for name, short in IN_CHECKPOINTS.items()}

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        self.gemma3_4b = Gemma3_4BTokenizer(
            embedding_directory, _own_pieces(GEMMA3_4B, tokenizer_data)
        )
        self.jina_clip_2 = JinaClip2Tokenizer(
            embedding_directory, _own_pieces(JINA, tokenizer_data)
        )

    def state_dict(self) -> dict[str, Any]:
        """The vocabularies that came from the encoders' files, so that saving keeps them."""
        held = {name: getattr(self, name).state_dict() for name in IN_CHECKPOINTS}
        return {f"{name}.{key}": value for name, own in held.items() for key, value in own.items()}


class NewBieTEModel(SeveralEncoders):
    """Both encoders."""

    parts: ClassVar[tuple[str, ...]] = (JINA, GEMMA3_4B)

    def __init__(
        self,
        dtype_gemma: torch.dtype | None = None,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(dtype, dtype_gemma)
        kept = dtype_gemma or dtype
        self.gemma3_4b = Gemma3_4BModel(device, kept, model_options)
        self.jina_clip_2 = JinaClip2TextModel(device, dtype, model_options)

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """States of Gemma ``[1, L, D]`` with their mask, and Jina's pooled state ``[1, P]``."""
        chunks: dict[str, list[Chunk]] = {
            name: token_weight_pairs[short] for name, short in IN_CHECKPOINTS.items()
        }
        states, _, told = self.gemma3_4b.encode_token_weights(chunks[GEMMA3_4B])
        _, pooled, _ = self.jina_clip_2.encode_token_weights(chunks[JINA])
        return states, pooled, told

    def load_sd(self, sd: Mapping[str, Tensor]) -> Any:
        """Load the weights of one encoder, known by its keys."""
        return (self.jina_clip_2 if JINA_MARK in sd else self.gemma3_4b).load_sd(sd)


def newbie_clip(dtype_gemma: torch.dtype | None = None) -> Callable[..., nn.Module]:
    """Maker of both encoders, of which Gemma's weights are kept in a given type (None: as asked
    for).
    """
    return partial(NewBieTEModel, dtype_gemma)
