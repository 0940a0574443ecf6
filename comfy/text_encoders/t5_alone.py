"""Models whose only text encoder is a T5: what each wants of it.

PixArt, Chroma: no padding; weights move states away from those of padding alone.
Mochi, LTX video: padding that is hidden, and a mask for the model.
Cosmos, Stable Audio: padding that is hidden and zero afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from comfy.ldm.t5.model import T5
from comfy.text_encoders.encoder import SD1ClipModel, SDClipModel, keeping
from comfy.text_encoders.t5_encoder import NAME as XXL
from comfy.text_encoders.t5_pieces import PAD, T5Pieces, pieces_source
from comfy.text_encoders.tokenizer import UNLIMITED, SD1Tokenizer, SDTokenizer

BASE = "t5base"
# The first T5 XXL: fewer channels, a much wider feed-forward without a gate.
OLD_XXL_CONFIG: dict[str, Any] = {
    "d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_heads": 128, "num_layers": 24,
    "is_gated_act": False, "dense_act_fn": "relu",
}  # fmt: skip
BASE_CONFIG: dict[str, Any] = {
    "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12, "num_layers": 12,
    "is_gated_act": False, "dense_act_fn": "relu",
}  # fmt: skip


@dataclass(frozen=True)
class Arrangement:
    """What a model wants of its T5.

    Attributes:
        min_length: Tokens that a text has at least.
        name: Name of the encoder in tokens and weights.
        config: Sizes that are not T5 v1.1 XXL's.
        is_masked: Whether padding is hidden from the text.
        gives_mask: Whether the model is given the mask.
        zeroes: Whether the states of padding are zero.
        empty_ends: Whether the empty text has an end.
        pieces: Its word pieces, which know the end.
        pad: Token of padding.
    """

    min_length: int
    name: str = XXL
    config: Mapping[str, Any] = field(default_factory=dict)
    is_masked: bool = True
    gives_mask: bool = False
    zeroes: bool = False
    empty_ends: bool = True
    pieces: type[T5Pieces] = T5Pieces
    pad: int = PAD


PIXART = Arrangement(1, is_masked=False, empty_ends=False)
MOCHI = Arrangement(256, gives_mask=True)
LTXV = Arrangement(128, gives_mask=True)
COSMOS = Arrangement(512, config=OLD_XXL_CONFIG, gives_mask=True, zeroes=True)
STABLE_AUDIO = Arrangement(128, name=BASE, config=BASE_CONFIG, zeroes=True)


class _Tokenizer(SDTokenizer):
    """T5's tokens in one chunk of any length."""

    def __init__(
        self,
        arrangement: Arrangement,
        embedding_directory: Any = None,
        tokenizer_data: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            pieces_source(tokenizer_data),  # type: ignore[arg-type] # may be its bytes
            max_length=UNLIMITED,
            pad_with_end=False,
            embedding_directory=embedding_directory,
            embedding_size=arrangement.config.get("d_model", 4096),
            embedding_key=arrangement.name,
            tokenizer_class=arrangement.pieces,
            has_start_token=False,
            pad_to_max_length=False,
            min_length=arrangement.min_length,
            pad_token=arrangement.pad,
            tokenizer_data=tokenizer_data,
        )


class _Encoder(SDClipModel):
    """A T5 of some size."""

    def __init__(
        self,
        arrangement: Arrangement,
        device: Any = "cpu",
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            device=device,
            textmodel_json_config=arrangement.config,
            dtype=dtype,
            special_tokens={"end": arrangement.pieces.end, "pad": arrangement.pad},
            model_class=T5,
            enable_attention_masks=arrangement.is_masked,
            return_attention_masks=arrangement.gives_mask,
            zero_out_masked=arrangement.zeroes,
            model_options=model_options,
        )
        self.arrangement = arrangement

    def gen_empty_tokens(self, special_tokens: Mapping[str, Any], length: int) -> list[Any]:
        if self.arrangement.empty_ends:
            return super().gen_empty_tokens(special_tokens, length)
        return [special_tokens["pad"]] * length


class T5AloneTokenizer(SD1Tokenizer):
    """The tokens under the encoder's name."""

    def __init__(
        self,
        arrangement: Arrangement,
        embedding_directory: Any = None,
        tokenizer_data: Mapping[str, Any] | None = None,
    ) -> None:
        kind = partial(_Tokenizer, arrangement)
        name = arrangement.name
        super().__init__(embedding_directory, tokenizer_data, name, kind, name=name)


class T5AloneModel(SD1ClipModel):
    """The encoder under its name."""

    def __init__(
        self,
        arrangement: Arrangement,
        device: Any = "cpu",
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        kind = partial(_Encoder, arrangement)
        name = arrangement.name
        super().__init__(device, dtype, model_options, name, kind, name=name)


def t5_alone_tokenizer(arrangement: Arrangement) -> Callable[..., T5AloneTokenizer]:
    """Maker of the tokenizer."""
    return partial(T5AloneTokenizer, arrangement)


def t5_alone_clip(
    arrangement: Arrangement, dtype_t5: torch.dtype | None = None
) -> Callable[..., nn.Module]:
    """Maker of the encoder whose weights are kept in a given type (None: as asked for)."""
    return keeping(partial(T5AloneModel, arrangement), dtype_t5)
