"""Turns chunks of tokens into embeddings: ids are looked up, embedding rows and images put in their
places."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from comfy import progress

logger = logging.getLogger(__name__)

Preprocess = Callable[..., tuple[Tensor | None, Any]]


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that decide where a text ends; an encoder without an end token ends at its padding."""

    end: int | None
    pad: int | None

    @property
    def last(self) -> int | None:
        """The token after which only padding comes."""
        return self.pad if self.end is None else self.end


@dataclass
class EmbeddedText:
    """What a network is given for a batch of chunks.

    Attributes:
        embeds: ``[B, L, D]`` float32.
        attention_mask: ``[B, L]``, 1 up to the end of the text, 0 for padding.
        num_tokens: Length of each text, end included.
        info: Per chunk of a multimodal text: index, size and extra facts of what was put in.
    """

    embeds: Tensor
    attention_mask: Tensor
    num_tokens: list[int]
    info: list[dict[str, Any]] = field(default_factory=list)


def embed_tokens(
    chunks: Sequence[Sequence[Any]],
    table: nn.Embedding,
    device: torch.device,
    special: SpecialTokens,
    preprocess: Preprocess | None = None,
) -> EmbeddedText:
    """Embed chunks of equal length.

    Args:
        chunks: Each a list of ids, embedding rows (tensors ``[D]`` or ``[n, D]``) or dicts
            ``{"type", "data"}``.
        table: The token table of the network; called with ids and ``out_dtype``.
        device: Where the embeddings are wanted (a streamed table rests elsewhere).
        special: Where a text ends.
        preprocess: Turns a dict of another type than "embedding" into rows, ``(entry,
            device=...)``.

    A row whose width is not the network's is left out, with a warning, and padding added at the
    end.
    """
    texts = [_embed_chunk(chunk, table, device, special, preprocess) for chunk in chunks]
    return EmbeddedText(
        torch.cat([text.embeds for text in texts]),
        torch.cat([text.attention_mask for text in texts]),
        [count for text in texts for count in text.num_tokens],
        [entry for text in texts for entry in text.info],
    )


def _embed_chunk(
    chunk: Sequence[Any],
    table: nn.Embedding,
    device: torch.device,
    special: SpecialTokens,
    preprocess: Preprocess | None,
) -> EmbeddedText:
    ids = [int(token) for token in chunk if isinstance(token, int)]
    looked_up = iter(_look_up(ids, table, device)[0])
    pieces: list[Tensor] = []
    mask: list[int] = []
    info: list[dict[str, Any]] = []
    widths: Counter[int] = Counter()  # of rows that fit no token of this encoder
    states = iter(_mask_of_ids(ids, special))
    for token in chunk:
        if isinstance(token, int):
            pieces.append(next(looked_up)[None])
            mask.append(next(states))
            continue
        rows, extra = _rows(token, device, preprocess)
        if rows is None:
            continue
        if rows.shape[-1] != table.embedding_dim:
            widths[rows.shape[-1]] += rows.shape[0]
            continue
        info.append({"type": _type(token), "index": len(mask), "size": len(rows), "extra": extra})
        pieces.append(rows)
        mask.extend([1] * len(rows))
    for width, lost in widths.items():
        progress.warn(
            logger,
            "%d rows of embeddings of width %d were left out of the text: this text encoder has "
            "width %d; use embeddings made for this model",
            lost,
            width,
            table.embedding_dim,
        )
        pieces.append(_look_up([special.pad or 0] * lost, table, device)[0])
        mask.extend([0] * lost)
    return EmbeddedText(
        torch.cat(pieces)[None], torch.tensor([mask], device=device), [sum(mask)], info
    )


def _look_up(ids: list[int], table: nn.Embedding, device: torch.device) -> Tensor:
    highest, count = max(ids, default=0), table.num_embeddings
    if highest >= count:  # an accelerator would end the process
        raise ValueError(
            f"the text has token {highest}, and this text encoder has {count}: its vocabulary "
            "belongs to another model; take the one that its publisher gives with it"
        )
    tokens = torch.tensor([ids], dtype=torch.long, device=device)
    return table(tokens, out_dtype=torch.float32)


def _mask_of_ids(ids: list[int], special: SpecialTokens) -> list[int]:
    """1 for each id up to the end of the text, 0 for padding (before the text or after it)."""
    mask: list[int] = []
    is_left_padding, is_over = bool(ids) and ids[0] == special.pad, False
    for token in ids:
        is_left_padding = is_left_padding and token == special.pad
        mask.append(0 if is_over or is_left_padding else 1)
        if not is_over and token == special.last and not is_left_padding:
            is_over = True
            if special.end is None:
                mask[-1] = 0  # the first padding token, not an end token
    return mask


def _type(token: Any) -> str:
    return token.get("type", "embedding") if isinstance(token, Mapping) else "embedding"


def _rows(
    token: Any, device: torch.device, preprocess: Preprocess | None
) -> tuple[Tensor | None, Any]:
    """Rows ``[n, D]`` that stand for an entry which is no id, and facts about them."""
    if isinstance(token, Mapping):
        if _type(token) == "embedding":
            token = token["data"]
        elif preprocess is None:
            raise ValueError(f"this text encoder does not take entries of type {_type(token)!r}")
        else:
            rows, extra = preprocess(token, device=device)
            if rows is None:
                return None, extra
            return rows.reshape(-1, rows.shape[-1]).to(device, torch.float32), extra
    return token.reshape(-1, token.shape[-1]).to(device, torch.float32), None
