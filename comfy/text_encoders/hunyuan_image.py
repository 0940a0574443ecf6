"""Text encoding of HunyuanImage 2.1 and HunyuanVideo 1.5: states of Qwen 2.5 VL, and those of ByT5
for the texts between quotation marks, which the model is to write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from comfy.ldm.t5.model import T5
from comfy.text_encoders.encoder import Chunk, SDClipModel
from comfy.text_encoders.qwen import QWEN_IMAGE_TEMPLATE, QwenImageTEModel, QwenImageTokenizer
from comfy.text_encoders.t5_pieces import END, PAD
from comfy.text_encoders.tokenizer import UNLIMITED, SDTokenizer

BYT5, BYT5_KEY = "byt5_small", "byt5"
BYTES_START = 3  # id of the byte 0; before it stand padding, end and the unknown
WRITTEN = 'Text "{}". '
QUOTED = (r"\"(.*?)\"", r"\u2018(.*?)\u2019", r"\u201c(.*?)\u201d")
BYT5_CONFIG: dict[str, Any] = {
    "d_model": 1472, "d_kv": 64, "d_ff": 3584, "num_heads": 6, "num_layers": 12,
    "vocab_size": 1510,
}  # fmt: skip
IMAGE_TEMPLATE = QWEN_IMAGE_TEMPLATE.removesuffix("\n<|im_start|>assistant\n")
VIDEO_TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant. Describe the video by detailing the "
    "following aspects:\n1. The main content and theme of the video.\n2. The color, shape, size, "
    "texture, quantity, text, and spatial relationships of the objects.\n3. Actions, events, "
    "behaviors temporal relationships, physical movement changes of the objects.\n4. background "
    "environment, light, style and atmosphere.\n5. camera angles, movements, and transitions used "
    "in the video."
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


class BytePieces:
    """Called with text, it gives its bytes in UTF-8 and the end token; it needs no vocabulary."""

    @classmethod
    def from_pretrained(cls, source: str | None = None) -> BytePieces:
        """Nothing is read."""
        del source
        return cls()

    def __call__(self, text: str) -> dict[str, list[int]]:
        """``{"input_ids": [..., end]}``."""
        return {"input_ids": [*(byte + BYTES_START for byte in text.encode("utf-8")), END]}

    def get_vocab(self) -> dict[str, int]:
        """Character of a byte -> id."""
        return {chr(byte): byte + BYTES_START for byte in range(256)}


class ByT5SmallTokenizer(SDTokenizer):
    """Bytes in one chunk of any length."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(
            max_length=UNLIMITED,
            pad_with_end=False,
            embedding_directory=embedding_directory,
            embedding_size=1472,
            embedding_key=BYT5,
            tokenizer_class=BytePieces,
            has_start_token=False,
            pad_to_max_length=False,
            min_length=1,
            tokenizer_data=tokenizer_data,
        )


def quoted(text: str) -> list[str]:
    """What stands between quotation marks: straight ones first, then single and double curved."""
    return [part for pattern in QUOTED for part in re.findall(pattern, text)]


class HunyuanImageTokenizer(QwenImageTokenizer):
    """Qwen's tokens of all, and ByT5's of what stands between quotation marks."""

    template = IMAGE_TEMPLATE

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(embedding_directory, tokenizer_data)
        self.byt5 = ByT5SmallTokenizer(embedding_directory, tokenizer_data)

    def tokenize_with_weights(
        self, text: str, return_word_ids: bool = False, *args: Any, **kwargs: Any
    ) -> dict[str, list[list[tuple[Any, ...]]]]:
        """Chunks of tokens by encoder name; see `TemplateTokenizer`."""
        tokens = super().tokenize_with_weights(text, return_word_ids, *args, **kwargs)
        parts = quoted(text)
        if parts:
            written = "".join(WRITTEN.format(part) for part in parts)
            tokens[BYT5_KEY] = self.byt5.tokenize_with_weights(
                written, return_word_ids, disable_weights=True
            )
        return tokens


class HunyuanVideo15Tokenizer(HunyuanImageTokenizer):
    """Likewise, in the conversation about a video."""

    template = VIDEO_TEMPLATE

    def tokenize_with_weights(
        self, text: str, return_word_ids: bool = False, *args: Any, **kwargs: Any
    ) -> dict[str, list[list[tuple[Any, ...]]]]:
        """Chunks of tokens by encoder name; no text counts as a blank."""
        return super().tokenize_with_weights(text or " ", return_word_ids, *args, **kwargs)


class ByT5SmallModel(SDClipModel):
    """ByT5 small, taught on pictures of letters."""

    def __init__(
        self, device: Any = "cpu", dtype: Any = None, model_options: Any = None, **_: Any
    ) -> None:
        super().__init__(
            device=device,
            textmodel_json_config=BYT5_CONFIG,
            dtype=dtype,
            special_tokens={"end": END, "pad": PAD},
            model_class=T5,
            enable_attention_masks=True,
            zero_out_masked=True,
            model_options={**(model_options or {}), "model_name": BYT5},
        )


class HunyuanImageTEModel(QwenImageTEModel):
    """Qwen 2.5 VL, and ByT5 where it is wanted."""

    def __init__(
        self,
        byt5: bool = True,
        dtype_llm: torch.dtype | None = None,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(device, dtype_llm or dtype, model_options)
        self.byt5_small: ByT5SmallModel | None = None
        if byt5:
            self.byt5_small = ByT5SmallModel(device, dtype, model_options)

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Sequence[Chunk]]
    ) -> tuple[Any, ...]:
        """Qwen's states from the person's words on, and ByT5's as ``conditioning_byt5small``."""
        states, pooled, extra = super().encode_token_weights(token_weight_pairs)
        if self.byt5_small is not None and BYT5_KEY in token_weight_pairs:
            written = self.byt5_small.encode_token_weights(token_weight_pairs[BYT5_KEY])[0]
            extra["conditioning_byt5small"] = written
        return states, pooled, extra

    def set_clip_options(self, options: Mapping[str, Any]) -> None:
        """See SDClipModel; for both."""
        super().set_clip_options(options)
        if self.byt5_small is not None:
            self.byt5_small.set_clip_options(options)

    def reset_clip_options(self) -> None:
        """See SDClipModel; for both."""
        super().reset_clip_options()
        if self.byt5_small is not None:
            self.byt5_small.reset_clip_options()

    def load_sd(self, sd: Mapping[str, torch.Tensor]) -> Any:
        """Load the weights of one encoder, known by its keys."""
        if self.byt5_small is not None and "encoder.block.0.layer.0.SelfAttention.o.weight" in sd:
            return self.byt5_small.load_sd(sd)
        return super().load_sd(sd)


def hunyuan_image_clip(
    byt5: bool = True, dtype_llm: torch.dtype | None = None
) -> Callable[..., HunyuanImageTEModel]:
    """Maker of the encoders; Qwen's weights are kept in a given type (None: as asked for)."""
    return partial(HunyuanImageTEModel, byt5, dtype_llm)
