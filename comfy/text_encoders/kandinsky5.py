"""Text encoding of Kandinsky 5: states of Qwen 2.5 VL, and the pooled state of CLIP ViT-L.

How Qwen is asked is what the model was trained with: https://github.com/kandinskylab/kandinsky-5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from comfy.text_encoders.encoder import Chunk
from comfy.text_encoders.qwen import (
    QWEN25_7B,
    Qwen25Model,
    QwenImageTokenizer,
    from_words_on,
)
from comfy.text_encoders.several import (
    SeveralEncoders,
    SeveralTokenizers,
    clip_l_encoder,
    clip_l_tokenizer,
)

CONVERSATION = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>"
VIDEO_TEMPLATE = CONVERSATION.format(
    system="You are a prompt engineer. Describe the video in detail.\n"
    "Describe how the camera moves or shakes, describe the zoom and view angle, whether it follows "
    "the objects.\n"
    "Describe the location of the video, main characters or objects and their action.\n"
    "Describe the dynamism of the video and presented actions.\n"
    "Name the visual style of the video: whether it is a professional footage, user generated "
    "content, some kind of animation, video game or screen content.\n"
    "Describe the visual effects, postprocessing and transitions if they are presented in the "
    "video.\n"
    "Pay attention to the order of key actions shown in the scene."
)
IMAGE_TEMPLATE = CONVERSATION.format(
    system="You are a promt engineer. Describe the image by detailing the color, shape, size, "
    "texture, quantity, text, spatial relationships of the objects and background:"
)


class _QwenVideoTokenizer(QwenImageTokenizer):
    template = VIDEO_TEMPLATE


class _QwenImageTokenizer(QwenImageTokenizer):
    template = IMAGE_TEMPLATE


class Kandinsky5Tokenizer(SeveralTokenizers):
    """Tokens of both encoders, under the names "l" and "qwen25_7b"; the latter in a
    conversation on a video.
    """

    parts: ClassVar[dict[str, str]] = {"l": "clip_l", QWEN25_7B: "qwen"}
    conversation: ClassVar[type[QwenImageTokenizer]] = _QwenVideoTokenizer

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        given = {"embedding_directory": embedding_directory, "tokenizer_data": tokenizer_data or {}}
        self.clip_l = clip_l_tokenizer(**given)
        self.qwen = self.conversation(**given)

    def tokenize_with_weights(
        self, text: str, return_word_ids: bool = False, **kwargs: Any
    ) -> dict[str, list[list[tuple[Any, ...]]]]:
        """Chunks of weighted tokens by encoder name."""
        return {
            **self.qwen.tokenize_with_weights(text, return_word_ids, **kwargs),
            "l": self.clip_l.tokenize_with_weights(text, return_word_ids),
        }


class Kandinsky5TokenizerImage(Kandinsky5Tokenizer):
    """The same, in a conversation on a picture."""

    conversation = _QwenImageTokenizer


class Kandinsky5TEModel(SeveralEncoders):
    """Both encoders."""

    parts: ClassVar[tuple[str, ...]] = ("clip_l", QWEN25_7B)
    without_layer: ClassVar[tuple[str, ...]] = (QWEN25_7B,)

    def __init__(
        self,
        dtype_llm: torch.dtype | None = None,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(dtype, dtype_llm)
        self.clip_l = clip_l_encoder(device, dtype, model_options, return_projected_pooled=False)
        kind = (model_options or {}).get(f"{QWEN25_7B}_class", Qwen25Model)
        self.qwen25_7b = kind(device=device, dtype=dtype_llm or dtype, model_options=model_options)

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Sequence[Chunk]]
    ) -> tuple[Any, ...]:
        """Qwen's states from the person's words on, CLIP's pooled state, and a mask where it hides
        something."""
        told = self.qwen25_7b.encode_token_weights(token_weight_pairs[QWEN25_7B])
        states, extra = from_words_on(told, token_weight_pairs[QWEN25_7B])
        pooled: Tensor = self.clip_l.encode_token_weights(token_weight_pairs["l"])[1]
        return states, pooled, extra


def kandinsky5_clip(dtype_llm: torch.dtype | None = None) -> Callable[..., Kandinsky5TEModel]:
    """Maker of the encoders; Qwen's weights are kept in a given type (None: as asked for)."""
    return partial(Kandinsky5TEModel, dtype_llm)
