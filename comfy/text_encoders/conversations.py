"""Conversations as language models were taught them: what stands around a question and its answer.

Each is the template of the model's publisher, for one question and with the answer left open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from comfy.text_encoders.sentencepiece_file import HIDDEN

Token = tuple[Any, float]
IMAGE = "image"
NO_LETTER = "\ufffd"  # in place of bytes that make none


@dataclass(frozen=True)
class Conversation:
    """One kind of conversation.

    Attributes:
        system: What stands before and behind the instructions.
        user: What stands before and behind the question.
        answer: What opens the answer.
        ends: Names of the tokens that end an answer.
        usual_system: Instructions that stand there when a person gives none; "" for none.
        system_is_in_turn: Whether the instructions are a part of the question.
        unthinking: What opens an answer without thoughts before it.
        thinking: What opens one with thoughts; "" where the model opens them.
        picture: How a picture is put before the question; None if the model sees none.
        picture_mark: The token in its place.
        start: The token at the beginning of every text.
    """

    system: tuple[str, str]
    user: tuple[str, str]
    answer: str
    ends: tuple[str, ...]
    usual_system: str = ""
    system_is_in_turn: bool = False
    unthinking: str = ""
    thinking: str = ""
    picture: str | None = None
    picture_mark: str = ""
    start: str = ""

    def around(self, text: str, system: str = "", pictures: int = 0, thinking: bool = False) -> str:
        """The conversation with this question."""
        told = system or self.usual_system
        instructions = f"{self.system[0]}{told}{self.system[1]}" if told else ""
        inside = self.system_is_in_turn
        return "".join(
            (
                "" if inside else instructions,
                self.user[0],
                instructions if inside else "",
                (self.picture or "") * pictures,
                text,
                self.user[1],
                self.answer,
                self.thinking if thinking else self.unthinking,
            )
        )


_QWEN: dict[str, Any] = {
    "system": ("<|im_start|>system\n", "<|im_end|>\n"),
    "user": ("<|im_start|>user\n", "<|im_end|>\n"),
    "answer": "<|im_start|>assistant\n",
    "ends": ("<|im_end|>", "<|endoftext|>"),
}
QWEN25 = Conversation(**_QWEN, usual_system="You are a helpful assistant.")
_QWEN_PICTURES: dict[str, Any] = {
    "picture": "<|vision_start|><|image_pad|><|vision_end|>",
    "picture_mark": "<|image_pad|>",
}
QWEN25_VL = Conversation(**_QWEN, **_QWEN_PICTURES, usual_system="You are a helpful assistant.")
QWEN3_VL = Conversation(**_QWEN, **_QWEN_PICTURES)
QWEN3 = Conversation(**_QWEN, unthinking="<think>\n\n</think>\n\n")
QWEN35 = Conversation(
    **_QWEN, **_QWEN_PICTURES, unthinking="<think>\n\n</think>\n\n", thinking="<think>\n"
)
_GEMMA: dict[str, Any] = {
    "system": ("", "\n\n"),
    "user": ("<start_of_turn>user\n", "<end_of_turn>\n"),
    "answer": "<start_of_turn>model\n",
    "ends": ("<end_of_turn>", "<eos>"),
    "system_is_in_turn": True,
    "start": "<bos>",
}
GEMMA2 = Conversation(**_GEMMA)
GEMMA3 = Conversation(
    **_GEMMA,
    picture="\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
    picture_mark="<image_soft_token>",
)
LLAMA3 = Conversation(
    system=("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
    user=("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
    answer="<|start_header_id|>assistant<|end_header_id|>\n\n",
    ends=("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    start="<|begin_of_text|>",
)
MISTRAL = Conversation(
    system=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    user=("[INST]", "[/INST]"),
    answer="",
    ends=("</s>",),
    start="<s>",
)


@dataclass(frozen=True)
class Question:
    """What a language model is to continue or to answer.

    Attributes:
        text: A question, or with ``is_whole`` a text to continue as it is.
        images: Pictures, each ``[1, H, W, 3]``.
        system: Instructions; "" for the model's usual ones.
        thinking: Whether the model may think before it answers.
        is_whole: Whether the text is the whole conversation already.
    """

    text: str
    images: Sequence[Tensor] = ()
    system: str = ""
    thinking: bool = False
    is_whole: bool = False


def question_tokens(pieces: Any, conversation: Conversation, question: Question) -> list[Token]:
    """Tokens of a question, pictures among them as dicts; nothing is weighted or padded.

    Args:
        pieces: Called with text, it gives ids, and ``.pieces`` is the vocabulary behind it.

    Raises:
        ValueError: There are pictures, but the model sees none, or the text has no place for them;
            or there is nothing to continue.
    """
    text, count = question.text, len(question.images)
    if count and conversation.picture is None:
        raise ValueError(
            "image: this text encoder sees no pictures; leave image unconnected, or choose a file "
            "with a picture tower (Qwen 2.5 VL, Qwen 3 VL, Qwen 3.5, Gemma 3)"
        )
    if question.is_whole:
        text = text.removeprefix(conversation.start)  # the word pieces put it there themselves
    else:
        text = conversation.around(text, question.system, count, question.thinking)
    # Not every vocabulary has the mark, so that the text is cut at it.
    parts = text.split(conversation.picture_mark, count) if count else [text]
    if len(parts) <= count:
        raise ValueError(
            f"prompt: it has places for {len(parts) - 1} of {count} pictures; write "
            f"{conversation.picture!r} where each is to stand, or switch use_default_template on"
        )
    start = len(pieces("")["input_ids"])
    tokens: list[Any] = list(pieces(parts[0])["input_ids"])
    for image, part in zip(question.images, parts[1:]):
        tokens.append({"type": IMAGE, "data": image, "original_type": IMAGE})
        tokens += pieces(part)["input_ids"][start:]
    if not tokens:
        raise ValueError(
            "prompt: it is empty, and this model has no token that begins a text; write what is to "
            "be continued, or switch use_default_template on"
        )
    return [(token, 1.0) for token in tokens]


def end_ids(vocabulary: Mapping[str, int], conversation: Conversation) -> frozenset[int]:
    """Ids of the tokens that end an answer, those that a vocabulary has."""
    names = (spelled for name in conversation.ends for spelled in (name, HIDDEN + name))
    return frozenset(vocabulary[name] for name in names if name in vocabulary)


def words_of(pieces: Tokenizer, ids: Sequence[int], skip_marks: bool = True) -> str:
    """The text of some tokens, without a letter at the end of which a part is missing.

    Args:
        skip_marks: Whether tokens that are no text, such as the end's, are left out.
    """
    kept = [int(one) for one in ids]
    if skip_marks:
        kept = [one for one in kept if not (pieces.id_to_token(one) or "").startswith(HIDDEN)]
    return pieces.decode(kept, skip_special_tokens=skip_marks).rstrip(NO_LETTER)
