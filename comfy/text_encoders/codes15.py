"""Writes codes of music with the language model of ACE-Step 1.5, led as diffusion models are.

Each code is one word. The model reads what the song is to be, and beside it the same without its
facts; how their scores differ counts more than once.
Source: https://github.com/ace-step/ACE-Step-1.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comfy import interrupt, progress
from comfy.ldm.ace.conditions15 import CODES
from comfy.ldm.llm.cache import KeyValueCache
from comfy.ldm.llm.model import DecoderLLM
from comfy.text_encoders.encoder import SDClipModel
from comfy.text_encoders.generation import computing_dtype

CODES_A_SECOND = 5
FIRST = 151669  # behind the words of Qwen 3, where a vocabulary names no codes
FIRST_WORD = "<|audio_code_0|>"


@dataclass(frozen=True)
class CodeChoice:
    """How the next code is chosen.

    Attributes:
        cfg_scale: How much what the song is to be counts; 1: as without guidance.
        temperature: Divides the scores of the codes that may come; 0: the likeliest is taken.
        top_p: Only the likeliest codes that together have this probability; 1 for all.
        top_k: Only so many of the likeliest codes; 0 for all.
        min_p: Only codes with this part of the likeliest one's probability; 0 for all.
        seed: Of the chance, the same on every device.
    """

    cfg_scale: float = 2.0
    temperature: float = 0.85
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Asked:
    """Which codes are asked for.

    Attributes:
        choice: How they are chosen.
        first: The word that is code 0.
        count: How many.
    """

    choice: CodeChoice
    first: int
    count: int


def first_code(vocabulary: Mapping[str, int]) -> int:
    """The word that is code 0; Qwen's own vocabulary, which many have, ends before it."""
    return vocabulary.get(FIRST_WORD, FIRST)


def next_code(scores: Tensor, choice: CodeChoice, chance: torch.Generator) -> int:
    """The code that comes next.

    Args:
        scores: ``[codes]`` float32; not changed.

    Raises:
        ValueError: The scores are no numbers.
    """
    scores = scores.cpu()
    if not bool(scores.isfinite().all()):
        raise ValueError(
            "the language model's scores of codes are not finite numbers; its file is damaged, or "
            "its weights do not bear the type they are computed in"
        )
    if choice.temperature <= 0:
        return int(scores.argmax())
    ranked, order = scores.topk(min(choice.top_k or len(scores), len(scores)))
    odds = ranked.softmax(dim=-1)
    keeps = odds >= choice.min_p * odds[0]
    if choice.top_p < 1:
        keeps &= odds.cumsum(dim=-1) - odds <= choice.top_p  # those before do not suffice
    keeps[0] = True
    kept = ranked[keeps] / choice.temperature
    place = int(torch.multinomial(kept.softmax(dim=-1), 1, generator=chance))
    return int(order[keeps][place])


def write(encoder: SDClipModel, prompts: Sequence[Sequence[int]], asked: Asked) -> list[int]:
    """Codes that follow what the song is to be.

    It looks for a cancelled prompt before each code and counts codes on a progress bar.

    Args:
        prompts: Tokens of what it is to be, and of what it is led away from.

    Raises:
        ValueError: The language model has no words for codes.
    """
    network: DecoderLLM = encoder.transformer
    table: Any = network.get_input_embeddings()
    device: torch.device = encoder.execution_device or table.weight.device
    dtype, choice = computing_dtype(network, device), asked.choice
    known = min(CODES, network.config.vocab_size - asked.first)
    if known < 1:
        raise ValueError(
            f"the language model knows {network.config.vocab_size} words, and codes of music "
            f"begin at {asked.first}: it is not one of ACE-Step 1.5 (qwen_1.7b_ace15 or "
            "qwen_4b_ace15); load one, or switch generate_audio_codes off"
        )
    used = prompts if choice.cfg_scale != 1 else prompts[:1]
    caches = [KeyValueCache(network.num_layers, len(one) + asked.count) for one in used]
    latest = [list(one) for one in used]
    chance = torch.Generator().manual_seed(choice.seed)
    bar = progress.ProgressBar(asked.count)
    written: list[int] = []
    while len(written) < asked.count:
        interrupt.throw_exception_if_processing_interrupted()
        scores = []
        for words, cache in zip(latest, caches):
            rows = table(torch.tensor([words], device=device), out_dtype=dtype)
            states = network.model.extend(rows, cache)
            scores.append(network.scores(states[0, -1])[asked.first : asked.first + known])
        guided = (
            scores[-1] + choice.cfg_scale * (scores[0] - scores[-1]) if scores[1:] else scores[0]
        )
        written.append(next_code(guided, choice, chance))
        latest = [[asked.first + written[-1]]] * len(used)
        bar.update_absolute(len(written))
    return written
