"""Text encoding of Flux: the tokens of T5-XXL, and the pooled state of CLIP ViT-L."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comfy.text_encoders.encoder import Chunk, SDClipModel
from comfy.text_encoders.t5_encoder import T5XXLModel, T5XXLTokenizer
from comfy.text_encoders.tokenizer import SDTokenizer

MIN_LENGTH = 256  # tokens Flux was trained with


class FluxTokenizer:
    """Tokens of both encoders, under the names "l" and "t5xxl"."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        given = {"embedding_directory": embedding_directory, "tokenizer_data": tokenizer_data or {}}
        kind = given["tokenizer_data"].get("clip_l_tokenizer_class", SDTokenizer)
        self.clip_l = kind(**given)
        self.t5xxl = T5XXLTokenizer(**given, min_length=MIN_LENGTH)

    def tokenize_with_weights(
        self, text: str, return_word_ids: bool = False, **kwargs: Any
    ) -> dict[str, list[list[tuple[Any, ...]]]]:
        """Chunks of weighted tokens by encoder name."""
        return {
            "l": self.clip_l.tokenize_with_weights(text, return_word_ids, **kwargs),
            "t5xxl": self.t5xxl.tokenize_with_weights(text, return_word_ids, **kwargs),
        }

    def untokenize(
        self, token_weight_pair: Sequence[tuple[Any, ...]]
    ) -> list[tuple[tuple[Any, ...], str]]:
        """Each weighted token with its word piece."""
        return self.clip_l.untokenize(token_weight_pair)

    def state_dict(self) -> dict[str, Any]:
        """Nothing has to be saved with these encoders."""
        return {}


class FluxClipModel(nn.Module):
    """Both encoders."""

    def __init__(
        self,
        dtype_t5: torch.dtype | None = None,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        options = dict(model_options or {})
        self.clip_l = options.get("clip_l_class", SDClipModel)(
            device=device,
            dtype=dtype,
            return_projected_pooled=False,
            model_options={**options, "model_name": "clip_l"},
        )
        self.t5xxl = T5XXLModel(device=device, dtype=dtype_t5 or dtype, model_options=options)
        self.dtypes = {kind for kind in (dtype, dtype_t5) if kind is not None}

    def set_clip_options(self, options: Mapping[str, Any]) -> None:
        """See SDClipModel; for both."""
        self.clip_l.set_clip_options(options)
        self.t5xxl.set_clip_options(options)

    def reset_clip_options(self) -> None:
        """See SDClipModel; for both."""
        self.clip_l.reset_clip_options()
        self.t5xxl.reset_clip_options()

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Sequence[Chunk]]
    ) -> tuple[Tensor, Tensor]:
        """T5's states ``[1, L, D]`` and CLIP's pooled state."""
        states = self.t5xxl.encode_token_weights(token_weight_pairs["t5xxl"])[0]
        pooled = self.clip_l.encode_token_weights(token_weight_pairs["l"])[1]
        return states, pooled

    def load_sd(self, sd: Mapping[str, Tensor]) -> Any:
        """Load the weights of one encoder, known by its keys."""
        if "text_model.encoder.layers.1.mlp.fc1.weight" in sd:
            return self.clip_l.load_sd(sd)
        return self.t5xxl.load_sd(sd)


def flux_clip(dtype_t5: torch.dtype | None = None) -> Callable[..., FluxClipModel]:
    """A maker of the encoders with the arguments all encoder classes take."""

    def make(
        device: Any = "cpu", dtype: Any = None, model_options: Mapping[str, Any] | None = None
    ) -> FluxClipModel:
        return FluxClipModel(dtype_t5, device, dtype, model_options)

    return make
