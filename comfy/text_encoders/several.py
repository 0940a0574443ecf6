"""Text encoding by several encoders: each has its tokens, and a model says how states join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from comfy.devices import formulas
from comfy.text_encoders.encoder import SDClipModel
from comfy.text_encoders.tokenizer import SDTokenizer

# A key that only this encoder has, the larger ones first -> its name.
MARKS = (
    ("text_model.encoder.layers.30.mlp.fc1.weight", "clip_g"),
    ("text_model.encoder.layers.1.mlp.fc1.weight", "clip_l"),
    ("shared.weight", "t5xxl"),
)


class SeveralTokenizers:
    """Tokens of several encoders.

    Attributes:
        parts: Name among tokens -> attribute that holds the tokenizer, or None where the encoder is
            absent.
    """

    parts: ClassVar[dict[str, str]] = {}

    def tokenize_with_weights(
        self, text: str, return_word_ids: bool = False, **kwargs: Any
    ) -> dict[str, list[list[tuple[Any, ...]]]]:
        """Chunks of weighted tokens by encoder name; an absent encoder has none."""
        tokenizers = {name: getattr(self, held) for name, held in self.parts.items()}
        return {
            name: [] if one is None else one.tokenize_with_weights(text, return_word_ids, **kwargs)
            for name, one in tokenizers.items()
        }

    def untokenize(
        self, token_weight_pair: Sequence[tuple[Any, ...]]
    ) -> list[tuple[tuple[Any, ...], str]]:
        """Each weighted token of the first encoder with its word piece."""
        return getattr(self, next(iter(self.parts.values()))).untokenize(token_weight_pair)

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved with the encoders."""
        return {}


class SeveralEncoders(nn.Module):
    """Several encoders, each an attribute, None where it is absent.

    Attributes:
        parts: Names of the attributes. Weights that no mark tells are the last one's.
        without_layer: Encoders that by the model's paper keep their layer whatever a person chooses
            for CLIP; by default the choice is that of every encoder with so many layers.
        dtypes: Types in which weights are kept.
    """

    parts: ClassVar[tuple[str, ...]] = ()
    without_layer: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *dtypes: torch.dtype | None) -> None:
        super().__init__()
        self.dtypes = {dtype for dtype in dtypes if dtype is not None}

    def present(self) -> dict[str, Any]:
        """The encoders that are there, by name."""
        found = {name: getattr(self, name) for name in self.parts}
        return {name: one for name, one in found.items() if one is not None}

    def set_clip_options(self, options: Mapping[str, Any]) -> None:
        """See SDClipModel; for all."""
        others = {name: value for name, value in options.items() if name != "layer"}
        keeping = self.without_layer if formulas.as_published() else ()
        for name, encoder in self.present().items():
            encoder.set_clip_options(others if name in keeping else options)

    def reset_clip_options(self) -> None:
        """See SDClipModel; for all."""
        for encoder in self.present().values():
            encoder.reset_clip_options()

    def load_sd(self, sd: Mapping[str, Tensor]) -> Any:
        """Load the weights of one encoder, known by its keys.

        Raises:
            ValueError: This text encoding was built without it.
        """
        told = (name for key, name in MARKS if key in sd and name in self.parts)
        name = next(told, self.parts[-1])
        encoder = self.present().get(name)
        if encoder is None:
            raise ValueError(
                f"weights of {name} given to a text encoder ({type(self).__name__}) built without "
                "it"
            )
        return encoder.load_sd(sd)


def clip_l_tokenizer(
    embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
) -> Any:
    """Tokenizer of CLIP ViT-L, or the one that the data name in its place."""
    data = tokenizer_data or {}
    kind = data.get("clip_l_tokenizer_class", SDTokenizer)
    return kind(embedding_directory=embedding_directory, tokenizer_data=data)


def clip_l_encoder(
    device: Any, dtype: torch.dtype | None, model_options: Mapping[str, Any] | None, **kwargs: Any
) -> Any:
    """CLIP ViT-L, or the class that the options name in its place.

    Args:
        kwargs: Which state is taken, as `SDClipModel` has it.
    """
    options = dict(model_options or {})
    kind = options.get("clip_l_class", SDClipModel)
    named = {**options, "model_name": "clip_l"}
    return kind(device=device, dtype=dtype, model_options=named, **kwargs)
