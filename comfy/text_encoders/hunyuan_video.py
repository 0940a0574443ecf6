"""Text encoding of HunyuanVideo: states of Llama 3 (LLaVA, which sees pictures among its tokens),
and the pooled state of CLIP ViT-L.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from comfy.text_encoders.conversations import LLAMA3
from comfy.text_encoders.encoder import Chunk
from comfy.text_encoders.language_model import LanguageModel
from comfy.text_encoders.pieces import read_pieces
from comfy.text_encoders.several import (
    SeveralEncoders,
    SeveralTokenizers,
    clip_l_encoder,
    clip_l_tokenizer,
)
from comfy.text_encoders.t5_pieces import DATA_ENTRY
from comfy.text_encoders.tokenizer import UNLIMITED, SDTokenizer

NAME = "llama"
START, PAD = 128000, 128258
HEADER, HEADER_END, TURN_END, USER, NEW_LINES = 128006, 128007, 128009, 882, 271
PICTURE, PICTURE_MARK = 128257, "<image>"  # of LLaVA; Llama's own word pieces lack it
MARK = "<|start_header_id|>"
MIN_LENGTH = 256
HIDDEN_LAYER = -3
FILE_NAMES = ("llama_tokenizer.json", "tokenizer.json")
WANTED = (
    "put tokenizer.json of a Llama 3 model beside the text encoder or in models/text_encoders, as "
    "llama_tokenizer.json"
)
TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following "
    "aspects: 1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the "
    "objects.4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)
CONFIG: dict[str, Any] = {
    "vocab_size": 128320, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "qk_norm": False, "ties_words": False,
}  # fmt: skip


class LlamaPieces:
    """Called with text, it gives the start's id and those of the text."""

    def __init__(self, pieces: Tokenizer) -> None:
        self.pieces = pieces

    @classmethod
    def from_pretrained(cls, source: str | bytes | None = None) -> LlamaPieces:
        """From the path of a `tokenizer.json`.

        Raises:
            FileNotFoundError: There is none; the text says what is needed.
            ValueError: The file is no tokenizer.
        """
        return cls(read_pieces(source, "Llama 3", WANTED))

    def __call__(self, text: str) -> dict[str, list[int]]:
        """``{"input_ids": [start, ...]}``; marks for pictures have ids of their own."""
        ids = [START]
        for number, part in enumerate(text.split(PICTURE_MARK)):
            ids += [PICTURE] if number else []
            ids += self.pieces.encode(part, add_special_tokens=False).ids
        return {"input_ids": ids}

    def get_vocab(self) -> dict[str, int]:
        """Word piece -> id."""
        return self.pieces.get_vocab()


def find_llama_pieces(folders: Iterable[str]) -> str | None:
    """Path of the first vocabulary of Llama 3 in some folders; None if there is none."""
    for folder in folders:
        for name in FILE_NAMES:
            path = Path(folder) / name
            if path.is_file() and MARK.encode() in path.read_bytes():
                return str(path)
    return None


class LlamaTokenizer(SDTokenizer):
    """Llama's tokens in one chunk of any length, and of a least one."""

    conversation = LLAMA3
    fewest: ClassVar[int] = MIN_LENGTH
    pad: ClassVar[int] = PAD

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(
            (tokenizer_data or {}).get(DATA_ENTRY),
            max_length=UNLIMITED,
            pad_with_end=False,
            embedding_directory=embedding_directory,
            embedding_size=4096,
            embedding_key=NAME,
            tokenizer_class=LlamaPieces,
            has_end_token=False,
            pad_to_max_length=False,
            min_length=self.fewest,
            start_token=START,
            pad_token=self.pad,
            tokenizer_data=tokenizer_data,
        )


class HunyuanVideoTokenizer(SeveralTokenizers):
    """Tokens of both encoders, under the names "l" and "llama"; the latter in a conversation."""

    parts: ClassVar[dict[str, str]] = {"l": "clip_l", NAME: "llama"}

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        given = {"embedding_directory": embedding_directory, "tokenizer_data": tokenizer_data or {}}
        self.clip_l = clip_l_tokenizer(**given)
        self.llama = LlamaTokenizer(**given)

    def tokenize_with_weights(
        self,
        text: str,
        return_word_ids: bool = False,
        llama_template: str | None = None,
        image_embeds: Tensor | None = None,
        image_interleave: int = 1,
        **kwargs: Any,
    ) -> dict[str, list[list[tuple[Any, ...]]]]:
        """Chunks of weighted tokens by encoder name.

        Args:
            image_embeds: Rows of pictures in the space of the language model ``[B, N, D]``. The
                first stands where the conversation has its first mark for one, and so on.
            image_interleave: Of a picture's states one in so many is given to the model.
        """
        whole = (llama_template or TEMPLATE).replace("{}", text)
        chunks = self.llama.tokenize_with_weights(
            whole, return_word_ids, **{**kwargs, "disable_weights": True}
        )
        if image_embeds is not None:
            _put_pictures(chunks, image_embeds, image_interleave)
        return {
            "l": self.clip_l.tokenize_with_weights(text, return_word_ids, **kwargs),
            NAME: chunks,
        }


def _put_pictures(chunks: list[list[tuple[Any, ...]]], rows: Tensor, interleave: int) -> None:
    """Pictures in the places of their marks."""
    left = list(rows)[::-1]
    for chunk in chunks:
        for place, (token, *facts) in enumerate(chunk):
            if left and isinstance(token, int) and token == PICTURE:
                told = {"original_type": "image", "image_interleave": interleave}
                chunk[place] = ({"type": "embedding", "data": left.pop(), **told}, *facts)


class LlamaModel(LanguageModel):
    """Llama 3 8B: the states of its last layer but two."""

    encoder_name = NAME
    sizes = CONFIG
    reads = ("hidden", HIDDEN_LAYER)
    ids: ClassVar[dict[str, int]] = {"start": START, "pad": PAD}


class HunyuanVideoClipModel(SeveralEncoders):
    """Both encoders."""

    parts: ClassVar[tuple[str, ...]] = ("clip_l", NAME)
    without_layer: ClassVar[tuple[str, ...]] = (NAME,)

    def __init__(
        self,
        dtype_llama: torch.dtype | None = None,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(dtype, dtype_llama)
        self.clip_l = clip_l_encoder(device, dtype, model_options, return_projected_pooled=False)
        self.llama = LlamaModel(device, dtype_llama or dtype, model_options)

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Sequence[Chunk]]
    ) -> tuple[Any, ...]:
        """Some of the states of pictures, those of the person's words, CLIP's pooled state, and a
        mask where it hides something.

        Raises:
            ValueError: A picture's rows are not as wide as the language model.
        """
        tokens = [pair[0] for pair in token_weight_pairs[NAME][0]]
        self._check_pictures(tokens)
        states, _, extra = self.llama.encode_token_weights(token_weight_pairs[NAME])
        taken = taken_states(tokens)
        pooled = self.clip_l.encode_token_weights(token_weight_pairs["l"])[1]
        mask = torch.cat([extra["attention_mask"][:, part] for part in taken], dim=1)
        told = {} if bool(mask.all()) else {"attention_mask": mask}
        return torch.cat([states[:, part] for part in taken], dim=1), pooled, told

    def _check_pictures(self, tokens: Sequence[Any]) -> None:
        width = self.llama.transformer.get_input_embeddings().embedding_dim
        for token in tokens:
            if isinstance(token, Mapping) and token["data"].shape[-1] != width:
                raise ValueError(
                    f"clip_vision_output: expected {width} channels, as this language model has "
                    f"them, found {token['data'].shape[-1]}; load the image encoder that belongs "
                    "to it (llava_llama3_vision)"
                )


def taken_states(tokens: Sequence[Any]) -> list[slice]:
    """Which states of a conversation are the conditioning: some of each picture before the person's
    words, then those of the words, up to the end of the person's turn.

    Args:
        tokens: Ids, and dicts of pictures, each of which has as many states as rows.
    """
    pictures: list[slice] = []
    plain = [token if isinstance(token, int) else None for token in tokens]
    words, end = 0, None
    place = 0
    for number, token in enumerate(tokens):
        size = 1
        if isinstance(token, Mapping):
            size = len(token["data"])
            if not words and token.get("original_type") == "image":
                pictures.append(slice(place, place + size, token["image_interleave"]))
        elif isinstance(token, Tensor):
            size = 1 if token.ndim == 1 else len(token)
        elif not words and plain[number : number + 3] == [HEADER, USER, HEADER_END]:
            has_lines = plain[number + 3 : number + 4] == [NEW_LINES]
            words = place + (4 if has_lines else 2)
        elif token == TURN_END and words and end is None:
            end = place + 1
        place += size
    return [*pictures, slice(words, end)]


def hunyuan_video_clip(dtype_llama: torch.dtype | None = None) -> Callable[..., nn.Module]:
    """Maker of the encoders; Llama's weights are kept in a given type (None: as asked for)."""
    return partial(HunyuanVideoClipModel, dtype_llama)
