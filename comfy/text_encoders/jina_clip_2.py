"""The text tower of Jina CLIP v2 as an encoder: states of tokens, and their mean.

The vocabulary is that of XLM-RoBERTa. It is part of the encoder's file (a tensor `spiece_model`),
or a file beside it.
Source: https://arxiv.org/abs/2412.08802.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from comfy.ldm.jina.model import JinaTextModel
from comfy.text_encoders.encoder import SD1ClipModel, SDClipModel
from comfy.text_encoders.pieces import read_pieces
from comfy.text_encoders.sentencepiece_file import PieceFile, read_piece_file, tokenizer_of
from comfy.text_encoders.t5_pieces import EMBEDDED, first_pieces, pieces_source
from comfy.text_encoders.tokenizer import SDTokenizer, TokenizerAlone

NAME = "jina_clip_2"
MARK = "model.encoder.layers.0.mixer.Wqkv.weight"
WIDTH, LONGEST = 1024, 8192
START, PAD, END, UNKNOWN = 0, 1, 2, 3
TRAINED_MARKS = ["<unk>", "<s>", "</s>"]  # first pieces of the file that came out of training
USED_MARKS = ["<s>", "<pad>", "</s>", "<unk>"]  # those that the encoder's ids count
FILE_NAMES = (
    "jina_tokenizer.json", "jina_spiece.model", "sentencepiece.bpe.model", "tokenizer.json",
)  # fmt: skip
WANTED = (
    "take a file of Jina CLIP v2 that holds them (a tensor spiece_model), or put tokenizer.json of "
    "jinaai/jina-clip-v2 or sentencepiece.bpe.model of XLM-RoBERTa beside it or in "
    "models/text_encoders, as jina_tokenizer.json or jina_spiece.model"
)


def find_jina_pieces(folders: Iterable[str]) -> str | None:
    """Path of the first vocabulary in some folders; None if there is none."""
    return first_pieces(folders, FILE_NAMES)


def in_order_of_ids(file: PieceFile) -> PieceFile:
    """A vocabulary as the encoder counts it; one that came out of training counts other marks.

    Raises:
        ValueError: It begins otherwise, and so belongs to another encoder.
    """
    first = [text for text, _ in file.pieces[: len(USED_MARKS)]]
    if first == USED_MARKS:
        return file
    if first[: len(TRAINED_MARKS)] != TRAINED_MARKS:
        raise ValueError(f"the pieces begin with {first}, not with {TRAINED_MARKS} or {USED_MARKS}")
    added = len(USED_MARKS) - len(TRAINED_MARKS)
    pieces = [(mark, 0.0) for mark in USED_MARKS] + file.pieces[len(TRAINED_MARKS) :]
    typed, plain = ([number + added for number in ids] for ids in (file.typed, file.plain))
    marks = [START, PAD, END, UNKNOWN]
    return replace(file, pieces=pieces, unknown=UNKNOWN, marks=marks, typed=typed, plain=plain)


class JinaPieces:
    """Called with text, it gives ids between those of start and end."""

    def __init__(self, pieces: Tokenizer) -> None:
        self.pieces = pieces

    @classmethod
    def from_pretrained(cls, source: str | bytes | None = None) -> JinaPieces:
        """From the path of a `tokenizer.json` or of a file of SentencePiece, or the latter's bytes.

        Raises:
            FileNotFoundError: There is none; the text says what is needed.
            ValueError: It is no tokenizer of this encoder.
        """
        if isinstance(source, str) and source.endswith(".model") and Path(source).is_file():
            source = Path(source).read_bytes()
        if not isinstance(source, bytes):
            pieces = read_pieces(source, "Jina CLIP v2", WANTED)
            first = [pieces.id_to_token(number) for number in range(len(USED_MARKS))]
            if first != USED_MARKS:
                raise ValueError(
                    f"{source} holds no word pieces of Jina CLIP v2: they begin with {first}, not "
                    f"with {USED_MARKS}; {WANTED}"
                )
            return cls(pieces)
        try:
            return cls(tokenizer_of(in_order_of_ids(read_piece_file(source))))
        except ValueError as error:
            raise ValueError(
                f"these are no word pieces of Jina CLIP v2 ({error}); {WANTED}"
            ) from error

    def __call__(self, text: str) -> dict[str, list[int]]:
        """``{"input_ids": [start, ..., end]}``."""
        ids = self.pieces.encode(text, add_special_tokens=False).ids
        return {"input_ids": [START, *ids, END]}

    def get_vocab(self) -> dict[str, int]:
        """Word piece -> id."""
        return dict(self.pieces.get_vocab())


class JinaClip2Tokenizer(SDTokenizer):
    """Tokens in one chunk of at most 8192, without padding."""

    saved_as = EMBEDDED

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        self.source = pieces_source(tokenizer_data)
        super().__init__(
            self.source,  # may be its bytes
            max_length=LONGEST,
            pad_with_end=False,
            embedding_directory=embedding_directory,
            embedding_size=WIDTH,
            embedding_key=NAME,
            tokenizer_class=JinaPieces,
            pad_to_max_length=False,
            min_length=1,
            pad_token=PAD,
            end_token=END,
            tokenizer_data=tokenizer_data,
        )


class JinaClip2TokenizerWrapper(TokenizerAlone):
    """The tokens under the encoder's name."""

    encoder_name = NAME
    pieces = JinaClip2Tokenizer


class JinaClip2TextModel(SDClipModel):
    """The encoder: states of all layers' end, and their mean as the pooled state."""

    def __init__(
        self,
        device: Any = "cpu",
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            device=device,
            dtype=dtype,
            special_tokens={"start": START, "end": END, "pad": PAD},
            model_class=JinaTextModel,
            enable_attention_masks=True,
            return_attention_masks=True,
            model_options={**(model_options or {}), "model_name": NAME},
        )


class JinaClip2TextModelWrapper(SD1ClipModel):
    """The encoder under its name."""

    def __init__(
        self,
        device: Any = "cpu",
        dtype: Any = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            device, dtype, model_options, clip_name=NAME, clip_model=JinaClip2TextModel, name=NAME
        )
