"""Text encoding of ACE-Step 1.5: Qwen 3 0.6B reads the style, its table of tokens gives the lyrics,
and a larger Qwen 3 writes codes of the music, five a second.

Source: https://github.com/ace-step/ACE-Step-1.5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from comfy.devices import placement
from comfy.text_encoders import codes15, generation
from comfy.text_encoders.codes15 import CODES_A_SECOND, CodeChoice
from comfy.text_encoders.encoder import Chunk, SDClipModel
from comfy.text_encoders.language_model import LanguageModel, LanguageModelAlone
from comfy.text_encoders.ovis import NAME as QWEN3_2B
from comfy.text_encoders.qwen import PAD, QWEN3_4B, Z_IMAGE_TEMPLATE, QwenTokenizer
from comfy.text_encoders.several import SeveralEncoders, SeveralTokenizers
from comfy.text_encoders.t5_pieces import DATA_ENTRY
from comfy.text_encoders.tokenizer import ConversationTokenizer

SMALL, WIDTH = "qwen3_06b", 1024
LARGE = {QWEN3_2B: 2048, QWEN3_4B: 2560}  # language models that write codes -> channels of a token
STYLE, LYRICS, ASKED, ASKED_LESS, CODES = SMALL, "lyrics", "codes_prompt", "codes_negative", "codes"
TO_FILL = "Fill the audio semantic mask based on the given conditions:"
TO_WRITE = "Generate audio semantic tokens based on the given conditions:"
END = "<|endoftext|>"  # in what the model was trained with, and behind it by the vocabulary's rule
NO_WRITER = (
    "clip: this text encoder has no language model that writes codes of the music; load a larger "
    "Qwen 3 of ACE-Step 1.5 beside it (DualCLIPLoader of type ace), or switch "
    "generate_audio_codes off"
)
CONFIG: dict[str, Any] = {
    "vocab_size": 151669, "hidden_size": WIDTH, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Song:
    """What a song is to be.

    Attributes:
        tags: Its style.
        lyrics: What is sung.
        bpm: Beats a minute.
        duration: Seconds.
        timesignature: Beats of a bar.
        language: Code of the lyrics' language.
        keyscale: Key and mode.
    """

    tags: str
    lyrics: str = ""
    bpm: int = 120
    duration: float = 120.0
    timesignature: str = "2"
    language: str = "en"
    keyscale: str = "C major"

    def style_text(self, instruction: str) -> str:
        """What the small encoder reads."""
        facts = (
            f"- bpm: {self.bpm}\n- timesignature: {self.timesignature}\n"
            f"- keyscale: {self.keyscale}\n- duration: {int(self.duration)} seconds\n"
        )
        text = f"# Instruction\n{instruction}\n\n# Caption\n{self.tags}\n\n# Metas\n{facts}"
        return f"{text}{END}\n{END}"

    def lyrics_text(self) -> str:
        """What of the lyrics the table of tokens gives."""
        return f"# Languages\n{self.language}\n\n# Lyric\n{self.lyrics}{END}{END}"

    def codes_text(self, tells_facts: bool) -> str:
        """What the language model goes on with; without facts, what it is led away from."""
        facts = (
            f"bpm: {self.bpm}\nduration: {int(self.duration)}\nkeyscale: {self.keyscale}\n"
            f"timesignature: {self.timesignature}"
        )
        return (
            f"<|im_start|>system\n# Instruction\n{TO_WRITE}\n\n<|im_end|>\n"
            f"<|im_start|>user\n# Caption\n{self.tags}\n\n# Lyric\n{self.lyrics}\n<|im_end|>\n"
            f"<|im_start|>assistant\n<think>\n{facts if tells_facts else ''}\n</think>\n\n"
            "<|im_end|>\n"
        )


class _Pieces(QwenTokenizer):
    """Qwen's tokens of one of the encoders, with its own vocabulary if it has one."""

    def __init__(
        self, name: str, width: int, embedding_directory: Any, tokenizer_data: Mapping[str, Any]
    ) -> None:
        own = tokenizer_data.get(f"{name}_vocabulary", tokenizer_data.get(DATA_ENTRY))
        super().__init__(embedding_directory, {**tokenizer_data, DATA_ENTRY: own}, width, name)


class SmallPieces(_Pieces):
    """Those of the small one."""

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(SMALL, WIDTH, embedding_directory, tokenizer_data or {})


class AceStep15Tokenizer(SeveralTokenizers):
    """Tokens of style and lyrics, and of what the language model goes on with.

    Args:
        writer: Name of the language model; None without.
    """

    parts: ClassVar[dict[str, str]] = {STYLE: SMALL, LYRICS: SMALL}

    def __init__(
        self,
        writer: str | None,
        embedding_directory: Any = None,
        tokenizer_data: Mapping[str, Any] | None = None,
    ) -> None:
        self.qwen3_06b = SmallPieces(embedding_directory, tokenizer_data)
        self.writer: _Pieces | None = None
        if writer is not None:
            width = LARGE[writer]
            self.writer = _Pieces(writer, width, embedding_directory, tokenizer_data or {})

    def tokenize_with_weights(
        self,
        text: str,
        return_word_ids: bool = False,
        song: Song | None = None,
        choice: CodeChoice | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Chunks of tokens by name, and under "codes" how the codes are chosen.

        Args:
            text: The style, of a song of which nothing else is told.
            song: What the song is to be.
            choice: How codes are chosen; None: no codes.

        Raises:
            ValueError: There is no language model for codes.
        """
        song = song or Song(text)
        kwargs["disable_weights"] = True
        style = song.style_text(TO_FILL if choice is None else TO_WRITE)
        small = self.qwen3_06b.tokenize_with_weights
        made: dict[str, Any] = {
            STYLE: small(style, return_word_ids, **kwargs),
            LYRICS: small(song.lyrics_text(), return_word_ids, **kwargs),
        }
        if choice is None:
            return made
        if self.writer is None:
            raise ValueError(NO_WRITER)
        for name, tells_facts in ((ASKED, True), (ASKED_LESS, False)):
            whole = song.codes_text(tells_facts)
            made[name] = self.writer.tokenize_with_weights(whole, return_word_ids, **kwargs)
        first = codes15.first_code(self.writer.tokenizer.get_vocab())
        count = max(1, int(song.duration * CODES_A_SECOND))
        return {**made, CODES: codes15.Asked(choice, first, count)}


class SmallModel(LanguageModel):
    """Qwen 3 0.6B: its last states."""

    encoder_name = SMALL
    sizes = CONFIG
    ids: ClassVar[dict[str, int]] = {"pad": PAD}
    tells_mask = False


class Writer(LanguageModel):
    """A language model that writes codes."""

    ids: ClassVar[dict[str, int]] = {"pad": PAD}


class _Writer2B(Writer):
    encoder_name = QWEN3_2B
    sizes: ClassVar[Mapping[str, Any]] = {**CONFIG, "hidden_size": 2048, "intermediate_size": 6144}


class _Writer4B(Writer):
    encoder_name = QWEN3_4B


WRITERS: dict[str, type[Writer]] = {QWEN3_2B: _Writer2B, QWEN3_4B: _Writer4B}


class AceStep15Model(SeveralEncoders):
    """The encoder of style and lyrics, and the language model that writes codes, if any."""

    def __init__(
        self,
        writer: str | None,
        dtype_llm: torch.dtype | None = None,
        device: Any = "cpu",
        dtype: torch.dtype | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(dtype, dtype_llm)
        place = {"device": device, "dtype": dtype_llm or dtype, "model_options": model_options}
        self.qwen3_06b = SmallModel(**place)
        self.writer_name, self.parts = writer, (SMALL,)  # type: ignore[misc]
        if writer is not None:
            setattr(self, writer, WRITERS[writer](**place))
            self.parts = (SMALL, writer)  # type: ignore[misc]

    def memory_estimation_function(
        self, tokens: Mapping[str, Any], device: torch.device | None = None
    ) -> int:
        """Bytes beside the weights for writing codes."""
        asked = tokens.get(CODES)
        if asked is None:
            return 0
        length = max(len(tokens[name][0]) for name in (ASKED, ASKED_LESS))
        where = device or torch.device("cpu")
        return 2 * generation.memory_needed(self._writer(), length, asked.count, where)

    def _writer(self) -> SDClipModel:
        if self.writer_name is None:
            raise ValueError(NO_WRITER)
        writer: SDClipModel = getattr(self, self.writer_name)
        return writer

    def encode_token_weights(
        self, token_weight_pairs: Mapping[str, Any]
    ) -> tuple[Tensor, None, dict[str, Tensor]]:
        """States of the style ``[1, L, D]``; the lyrics' rows of the table ``[1, M, D]`` as
        ``conditioning_lyrics``, and codes ``[1, n]`` as ``audio_codes`` where they are asked for.
        """
        states, *_ = self.qwen3_06b.encode_token_weights(token_weight_pairs[STYLE])
        extra = {"conditioning_lyrics": self._rows(token_weight_pairs[LYRICS])}
        asked = token_weight_pairs.get(CODES)
        if asked is not None:
            prompts = [
                [token for token, *_ in token_weight_pairs[name][0]] for name in (ASKED, ASKED_LESS)
            ]
            extra["audio_codes"] = torch.tensor([codes15.write(self._writer(), prompts, asked)])
        return states, None, extra

    def _rows(self, chunks: Sequence[Chunk]) -> Tensor:
        table: Any = self.qwen3_06b.transformer.get_input_embeddings()
        device = self.qwen3_06b.execution_device or table.weight.device
        ids = torch.tensor([[token for token, *_ in chunks[0]]], device=device)
        rows: Tensor = table(ids, out_dtype=torch.float32)
        return rows.to(placement.intermediate_device())


def ace15_tokenizer(writer: str | None) -> Callable[..., AceStep15Tokenizer]:
    """Maker of the tokenizer beside a language model of this name; None without one."""
    return partial(AceStep15Tokenizer, writer)


def ace15_clip(
    writer: str | None, dtype_llm: torch.dtype | None = None
) -> Callable[..., nn.Module]:
    """Maker of the encoders whose weights are kept in a given type (None: as asked for)."""
    return partial(AceStep15Model, writer, dtype_llm)


class SmallTokenizer(ConversationTokenizer):
    """Tokens of the small encoder alone, in a conversation."""

    encoder_name = SMALL
    pieces = SmallPieces
    template = Z_IMAGE_TEMPLATE


class SmallAlone(LanguageModelAlone):
    """The small encoder alone, under its name."""

    encoder = SmallModel
