"""Turns a prompt into weighted tokens: weights, embeddings, word pieces, chunks."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from comfy import progress
from comfy.text_encoders import embeddings
from comfy.text_encoders.bpe import CLIPTokenizer
from comfy.text_encoders.chunks import ChunkRules, Group, make_chunks
from comfy.text_encoders.conversations import Conversation
from comfy.text_encoders.prompt_weights import (
    escape_important,
    token_weights,
    unescape_important,
    whole_characters,
)

logger = logging.getLogger(__name__)

EMBEDDING_MARK = "embedding:"
# Signs that may follow the name of an embedding without a blank.
TRAILING_SIGNS = (",", ".,;:!?\"'()[]{}")
UNLIMITED = 99999999  # max_length of encoders that take any number of tokens


class _Embeddings:
    """The embeddings that one text names, each looked for, and missed, once."""

    def __init__(self, look: Callable[[str], Tensor | None]) -> None:
        self._look = look
        self._rows: dict[str, Tensor | None] = {}
        self._missed: set[str] = set()

    def find(self, name: str) -> Tensor | None:
        """Rows of an embedding; None where there is none of this name."""
        if name not in self._rows:
            self._rows[name] = self._look(name)
        return self._rows[name]

    def is_news(self, name: str) -> bool:
        """Whether a missing name comes for the first time."""
        is_new = name not in self._missed
        self._missed.add(name)
        return is_new


class SDTokenizer:
    """Tokenizer of one text encoder.

    Attributes:
        tokenizer: Word-piece tokenizer; called with text it gives ``{"input_ids": [...]}``.
        max_length, min_length, pad_to_max_length, pad_left: Shape of a chunk.
        start_token, end_token, pad_token: Ids; start and end may be None.
        embedding_directory: Folder or folders of embeddings; None leaves `embedding:` plain text.
        embedding_key: Name of this encoder in embedding files.
        inv_vocab: Id -> word piece.
        conversation: How its model is asked to write; None of models that do not.
        source: Where the vocabulary was read: the bytes of the encoder's own file, or elsewhere.
        saved_as: Entry under which such bytes are saved with the encoder; None of kinds whose
            files carry none.

    Entries ``<embedding_key>_max_length`` and ``..._min_length`` of the tokenizer data override
    those of a kind of encoder: Long-CLIP has more positions than CLIP.
    """

    conversation: ClassVar[Conversation | None] = None
    saved_as: ClassVar[str | None] = None
    source: Any = None

    def __init__(
        self,
        tokenizer_path: str | None = None,
        max_length: int = 77,
        pad_with_end: bool = True,
        embedding_directory: str | Iterable[str] | None = None,
        embedding_size: int = 768,
        embedding_key: str = "clip_l",
        tokenizer_class: Any = CLIPTokenizer,
        has_start_token: bool = True,
        has_end_token: bool = True,
        pad_to_max_length: bool = True,
        min_length: int | None = None,
        pad_token: int | None = None,
        end_token: int | None = None,
        start_token: int | None = None,
        min_padding: int | None = None,
        pad_left: bool = False,
        disable_weights: bool = False,
        tokenizer_data: Mapping[str, Any] | None = None,
        tokenizer_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer_class.from_pretrained(tokenizer_path, **(tokenizer_args or {}))
        told = tokenizer_data or {}
        self.max_length = told.get(f"{embedding_key}_max_length", max_length)
        self.min_length = told.get(f"{embedding_key}_min_length", min_length)
        self.min_padding = min_padding
        self.pad_to_max_length, self.pad_left = pad_to_max_length, pad_left
        self.disable_weights = disable_weights

        empty = self.tokenizer("")["input_ids"]
        self.tokenizer_adds_end_token = has_end_token
        self.tokens_start = 1 if has_start_token else 0
        self.start_token: int | None = None
        if has_start_token:
            self.start_token = empty[0] if start_token is None else start_token
        self.end_token: int | None = end_token
        if end_token is None and has_end_token:
            self.end_token = empty[self.tokens_start]
        if pad_token is not None:
            self.pad_token: int = pad_token
        else:
            self.pad_token = self.end_token if pad_with_end and self.end_token is not None else 0

        self.inv_vocab = {number: piece for piece, number in self.tokenizer.get_vocab().items()}
        self.embedding_directory = embedding_directory
        self.embedding_identifier = EMBEDDING_MARK
        self.embedding_size, self.embedding_key = embedding_size, embedding_key

    def tokenize_with_weights(
        self,
        text: str,
        return_word_ids: bool = False,
        tokenizer_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[list[tuple[Any, ...]]]:
        """Chunks of ``(token, weight)``, with ``return_word_ids`` of ``(token, weight, word)``.

        A token is an id or a row of an embedding (a tensor). Words count from 1 per weighted piece;
        0 is padding.

        Args:
            tokenizer_options: ``<embedding_key>_min_length`` and ``..._min_padding`` override this
                tokenizer's own.
            **kwargs: ``disable_weights`` takes parentheses as plain text.
        """
        text = whole_characters(text)
        if kwargs.get("disable_weights", self.disable_weights):
            pieces = [(escape_important(text), 1.0)]  # backslashes before parentheses go, too
        else:
            pieces = token_weights(escape_important(text), 1.0)
        groups: list[Group] = []
        known = _Embeddings(self._try_get_embedding)
        for piece, weight in pieces:
            groups.extend(self._groups(unescape_important(piece), weight, known))
        chunks = make_chunks(groups, self._rules(tokenizer_options or {}))
        if return_word_ids:
            return chunks
        return [[(token, weight) for token, weight, _ in chunk] for chunk in chunks]

    def _rules(self, options: Mapping[str, Any]) -> ChunkRules:
        key = self.embedding_key
        return ChunkRules(
            max_length=self.max_length,
            start=self.start_token,
            end=self.end_token,
            pad=self.pad_token,
            pad_to_max_length=self.pad_to_max_length,
            min_length=options.get(f"{key}_min_length", self.min_length),
            min_padding=options.get(f"{key}_min_padding", self.min_padding),
            pad_left=self.pad_left,
        )

    def _groups(self, text: str, weight: float, known: _Embeddings) -> Iterable[Group]:
        """Token groups of a piece of text: its embeddings one by one, and the text between them."""
        # A mark counts at the start of a word only; a blank before it goes, a sign stays text.
        parts = re.split(rf"\s(?={EMBEDDING_MARK})|(?<=[^\w\s])(?={EMBEDDING_MARK})", text)
        for part in parts:
            if part.startswith(EMBEDDING_MARK) and self.embedding_directory is not None:
                rows, part = self._read_embedding(part[len(EMBEDDING_MARK) :], known)
                if rows is not None:
                    yield [(row, weight) for row in rows]
                if not part:
                    continue
            if part:
                yield [(number, weight) for number in self._word_ids(part)]

    def _word_ids(self, text: str) -> list[int]:
        """Ids of plain text, without the start and end the word-piece tokenizer puts around it."""
        ids = self.tokenizer(text)["input_ids"]
        return ids[self.tokens_start : -1 if self.tokenizer_adds_end_token else None]

    def _read_embedding(self, text: str, known: _Embeddings) -> tuple[list[Tensor] | None, str]:
        """Rows of the embedding whose name text starts with (None: missing), and the text after
        it."""
        name, *rest = text.split() or [""]
        after = " ".join(rest)
        rows = known.find(name)
        for signs in TRAILING_SIGNS:  # fewest first: names of files may end in signs too
            bare = name.rstrip(signs)
            if rows is None and bare != name:
                rows = known.find(bare)
                if rows is not None:
                    after = f"{name[len(bare) :]} {after}"
        if rows is None:
            bare = name.rstrip(TRAILING_SIGNS[0])
            if known.is_news(bare):
                progress.warn(
                    logger,
                    "Embedding %r was not found in %s; the prompt goes on without it",
                    bare,
                    self.embedding_directory,
                )
            return None, f"{name[len(bare) :]} {after}" if bare != name else after
        return [rows] if rows.ndim == 1 else list(rows), after

    def _try_get_embedding(self, name: str) -> Tensor | None:
        if not name or self.embedding_directory is None:
            return None
        return embeddings.load_embed(
            name, self.embedding_directory, self.embedding_size, self.embedding_key
        )

    def untokenize(
        self, token_weight_pair: Iterable[tuple[Any, ...]]
    ) -> list[tuple[tuple[Any, ...], str]]:
        """Each weighted token with its word piece."""
        return [(pair, self.inv_vocab[pair[0]]) for pair in token_weight_pair]

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved with the encoder: the vocabulary, if its file brought it."""
        if self.saved_as is None or not isinstance(self.source, bytes):
            return {}
        return {self.saved_as: torch.frombuffer(bytearray(self.source), dtype=torch.uint8)}


class OpenClipTokenizer(SDTokenizer):
    """CLIP's tokens for one of OpenCLIP's encoders.

    Attributes:
        encoder_name: Key of its rows in embedding files.
        width: Channels of a token.
        pads_with_end: Whether the end token fills chunks up, else token 0 does.
    """

    encoder_name: ClassVar[str]
    width: ClassVar[int]
    pads_with_end: ClassVar[bool] = False

    def __init__(
        self,
        tokenizer_path: str | None = None,
        embedding_directory: Any = None,
        tokenizer_data: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            tokenizer_path,
            pad_with_end=self.pads_with_end,
            embedding_directory=embedding_directory,
            embedding_size=self.width,
            embedding_key=self.encoder_name,
            tokenizer_data=tokenizer_data,
        )


class SD1Tokenizer:
    """Tokenizer of a model with one text encoder; its name is the key of the result."""

    def __init__(
        self,
        embedding_directory: str | Iterable[str] | None = None,
        tokenizer_data: Mapping[str, Any] | None = None,
        clip_name: str = "l",
        tokenizer: Any = SDTokenizer,
        name: str | None = None,
    ) -> None:
        data = tokenizer_data or {}
        self.clip_name = clip_name
        self.clip = f"clip_{clip_name}" if name is None else name
        kind = data.get(f"{self.clip}_tokenizer_class", tokenizer)
        one = kind(embedding_directory=embedding_directory, tokenizer_data=data)
        setattr(self, self.clip, one)

    def tokenize_with_weights(
        self, text: str, return_word_ids: bool = False, **kwargs: Any
    ) -> dict[str, list[list[tuple[Any, ...]]]]:
        """Chunks of weighted tokens by encoder name."""
        one = getattr(self, self.clip)
        return {self.clip_name: one.tokenize_with_weights(text, return_word_ids, **kwargs)}

    def untokenize(
        self, token_weight_pair: Iterable[tuple[Any, ...]]
    ) -> list[tuple[tuple[Any, ...], str]]:
        """Each weighted token with its word piece."""
        return getattr(self, self.clip).untokenize(token_weight_pair)

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved with the encoder."""
        return getattr(self, self.clip).state_dict()


class TokenizerAlone(SD1Tokenizer):
    """Tokenizer of a model's only encoder, both under the encoder's name.

    Attributes:
        encoder_name: Key of the result.
        pieces: Class of the tokenizer.
    """

    encoder_name: ClassVar[str]
    pieces: ClassVar[type]

    def __init__(
        self, embedding_directory: Any = None, tokenizer_data: Mapping[str, Any] | None = None
    ) -> None:
        name = self.encoder_name
        super().__init__(embedding_directory, tokenizer_data, name, self.pieces, name=name)


class ConversationTokenizer(TokenizerAlone):
    """Puts the text into a conversation, as the encoder was trained to read it.

    Attributes:
        template: The conversation, with ``{}`` for the text.
        weighs: Whether weights in parentheses count; else parentheses are text like any other.
    """

    template: ClassVar[str]
    weighs: ClassVar[bool] = False

    def tokenize_with_weights(
        self,
        text: str,
        return_word_ids: bool = False,
        llama_template: str | None = None,
        **kwargs: Any,
    ) -> dict[str, list[list[tuple[Any, ...]]]]:
        """Chunks of tokens by encoder name.

        Args:
            llama_template: A conversation with ``{}`` for the text, in place of this encoder's.
        """
        whole = (llama_template or self.template).replace("{}", text)
        if not self.weighs:
            kwargs["disable_weights"] = True
        return super().tokenize_with_weights(whole, return_word_ids, **kwargs)
