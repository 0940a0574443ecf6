"""How a CLIP writes: its tokenizer makes a conversation, its language model goes on with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from comfy import progress
from comfy.devices import memory, residency
from comfy.text_encoders import conversations, generation
from comfy.text_encoders.generation import Choice

logger = logging.getLogger(__name__)

ASKS = frozenset({"skip_template", "thinking", "system_prompt"})
"""Options of `CLIP.tokenize` that ask for tokens to go on with."""


def writing_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer of the language model among those of some encoders.

    Raises:
        ValueError: None of the encoders is a language model.
    """
    held = [tokenizer, *vars(tokenizer).values()]
    found = next((one for one in held if getattr(one, "conversation", None) is not None), None)
    if found is None:
        raise ValueError(
            f"clip: this text encoder ({type(tokenizer).__name__}) reads text but cannot write "
            f"any; load {generation.CAN_WRITE}"
        )
    return found


def asked_tokens(
    tokenizer: Any,
    text: str,
    skip_template: bool = False,
    thinking: bool = False,
    system_prompt: str = "",
    image: Tensor | None = None,
    images: Sequence[Tensor] = (),
    **_: Any,
) -> dict[str, list[list[conversations.Token]]]:
    """One chunk of tokens for `CLIP.generate`, under the name of the language model.

    Args:
        text: A question; with ``skip_template`` a text to go on with as it is.
        thinking: Whether the model may think first, if it knows how.
        system_prompt: Instructions; "" for the model's usual ones.
        image: Pictures ``[B, H, W, C]``.
        images: More pictures, each ``[1, H, W, C]``.

    Raises:
        ValueError: None of the encoders is a language model, or it sees no pictures.
    """
    one = writing_tokenizer(tokenizer)
    batch = [] if image is None else list(image.split(1))
    question = conversations.Question(
        text, [*batch, *images], system_prompt, thinking, skip_template
    )
    tokens = conversations.question_tokens(one.tokenizer, one.conversation, question)
    return {one.embedding_key: [tokens]}


def written(clip: Any, tokens: Mapping[str, Any], choice: Choice, max_length: int) -> list[int]:
    """See `CLIP.generate`."""
    tokenizer = writing_tokenizer(clip.tokenizer)
    name, encoder = generation.writer_in(clip.cond_stage_model)
    if name not in tokens:
        raise ValueError(f"tokens of {name} were expected, found those of {', '.join(tokens)}")
    chunk = [token for part in tokens[name] for token, *_ in part]
    device = clip.patcher.load_device
    length = length_of(chunk, encoder)
    needed = generation.memory_needed(encoder, length, max_length, device)
    memory.require_capacity(needed, f"writing {max_length} words behind {length} tokens", device)
    residency.load_models_gpu([clip.patcher], memory_required=needed)
    clip.cond_stage_model.set_clip_options({"execution_device": device})
    ends = conversations.end_ids(tokenizer.tokenizer.get_vocab(), tokenizer.conversation)
    if not ends:
        progress.warn(
            logger,
            "the vocabulary of %s has none of the tokens that end an answer (%s), which therefore "
            "goes on to its full length; take the vocabulary of the model's publisher",
            name,
            ", ".join(tokenizer.conversation.ends),
        )
    write = partial(generation.write, encoder, chunk, choice, max_length, ends)
    return residency.run_or_make_room(clip.patcher, write)


def length_of(tokens: Sequence[Any], encoder: Any) -> int:
    """About how many rows some tokens are, pictures among them."""
    rows_of = getattr(encoder.transformer, "picture_rows", None)
    pictures = [one["data"] for one in tokens if isinstance(one, Mapping)]
    plain = len(tokens) - len(pictures)
    return plain + sum(rows_of(one) for one in pictures) if rows_of is not None else plain


def words(tokenizer: Any, ids: Sequence[int], skip_marks: bool = True) -> str:
    """See `CLIP.decode`."""
    pieces = writing_tokenizer(tokenizer).tokenizer.pieces
    return conversations.words_of(pieces, ids, skip_marks)
