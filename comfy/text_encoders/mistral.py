"""Mistral Small 3 as the text encoder of FLUX.2.

The text is put into a conversation; the conditioning is what three layers say of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from comfy.ldm.llm.model import DecoderLLM, Intermediate
from comfy.text_encoders.conversations import MISTRAL
from comfy.text_encoders.encoder import Chunk, keeping
from comfy.text_encoders.language_model import LanguageModel, LanguageModelAlone
from comfy.text_encoders.t5_pieces import DATA_ENTRY
from comfy.text_encoders.tekken import EMBEDDED, PAD, START, TekkenPieces
from comfy.text_encoders.tokenizer import UNLIMITED, ConversationTokenizer, SDTokenizer

NAME = "mistral3_24b"
TAKEN = (10, 20, 30)  # layers whose inputs are taken
TEMPLATE = (
    "[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give structured "
    "responses focusing on object relationships, object\nattribution and actions without "
    "speculation.[/SYSTEM_PROMPT][INST]{}[/INST]"
)
CONFIG: dict[str, Any] = {
    "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768,
    "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 1e9, "qk_norm": False, "ties_words": False,
}  # fmt: skip


class MistralTokenizer(SDTokenizer):
    """Mistral's tokens in one chunk of any length."""

    conversation = MISTRAL
    saved_as = EMBEDDED

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        self.source = _pieces_source(tokenizer_data or {})
        super().__init__(
            self.source,  # may be its bytes
            max_length=UNLIMITED,
            pad_with_end=False,
            embedding_directory=embedding_directory,
            embedding_size=5120,
            embedding_key=NAME,
            tokenizer_class=TekkenPieces,
            has_end_token=False,
            pad_to_max_length=False,
            min_length=1,
            start_token=START,
            pad_token=PAD,
            pad_left=True,
            tokenizer_data=tokenizer_data,
        )


def _pieces_source(data: Mapping[str, Any]) -> str | bytes | None:
    """The vocabulary that tokenizer data hold or name; what a file holds comes first."""
    held = next((value for key, value in data.items() if key.split(".")[-1] == EMBEDDED), None)
    if isinstance(held, Tensor):
        return held.cpu().numpy().tobytes()
    return held if held is not None else data.get(DATA_ENTRY)


class Flux2Tokenizer(ConversationTokenizer):
    """Puts the text into a conversation; weights in parentheses have no meaning there."""

    encoder_name = NAME
    pieces = MistralTokenizer
    template = TEMPLATE


class ThreeLayers(DecoderLLM):
    """The model, of which the states before three layers are taken."""

    def __init__(
        self, config_dict: Mapping[str, Any], dtype: Any, device: Any, operations: Any
    ) -> None:
        super().__init__(config_dict, dtype, device, operations)
        if self.num_layers < TAKEN[-1]:
            raise ValueError(
                f"a Mistral of {self.num_layers} layers; FLUX.2 takes the states after layer "
                f"{TAKEN[-1]}"
            )

    def forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        embeds: Tensor | None = None,
        num_tokens: Any = None,
        intermediate_output: Intermediate = None,
        final_layer_norm_intermediate: bool = True,
        dtype: torch.dtype = torch.float32,
        embeds_info: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The last states and those before the three layers ``[B, 3, L, D]``."""
        del intermediate_output
        given = (input_ids, attention_mask, embeds, num_tokens, TAKEN)
        return super().forward(*given, final_layer_norm_intermediate, dtype, embeds_info)


class Mistral3Model(LanguageModel):
    """Mistral Small 3 24B."""

    encoder_name = NAME
    sizes = CONFIG
    network = ThreeLayers
    reads = ("all", None)
    ids: ClassVar[dict[str, int]] = {"start": START, "pad": PAD}

    def encode(self, tokens: list[list[Any]]) -> tuple[Any, ...]:
        """States of the layers side by side ``[B, L, 3 * D]``."""
        states, pooled, extra = self(tokens)
        return states.movedim(1, 2).flatten(2), pooled, extra


class Flux2TEModel(LanguageModelAlone):
    """The encoder under its name."""

    encoder = Mistral3Model

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Sequence[Chunk]]
    ) -> tuple[Any, ...]:
        """Conditioning and no pooled state; the mask would hide padding that is not there."""
        states, pooled, _ = super().encode_token_weights(token_weight_pairs)
        return states, pooled, {}


def flux2_clip(dtype_llm: torch.dtype | None = None) -> Callable[..., nn.Module]:
    """Maker of the encoder whose weights are kept in a given type (None: as asked for)."""
    return keeping(Flux2TEModel, dtype_llm)
