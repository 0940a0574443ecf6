"""Continues a text word by word with a language model that is held as a text encoder."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comfy import interrupt, progress
from comfy.devices import accelerators, precision
from comfy.ldm.llm.cache import cache_bytes
from comfy.ldm.llm.model import DecoderLLM
from comfy.text_encoders.encoder import SDClipModel
from comfy.text_encoders.token_embedding import SpecialTokens, embed_tokens

CAN_WRITE = (
    "a file of Qwen 2.5 or 2.5 VL, Qwen 3, 3 VL or 3.5, Gemma 2 or 3, Llama 3 or Mistral Small 3 "
    "with all its layers"
)
ROWS_AT_ONCE = 4  # of feed-forward width, that live at once for each token that is read


@dataclass(frozen=True)
class Choice:
    """How the next word is chosen.

    Attributes:
        do_sample: Whether chance has a part; else the word of the highest score is taken.
        temperature: Divides scores; below 1 likely words become likelier.
        top_k: Only so many of the likeliest words; 0 for all.
        top_p: Only the likeliest words that together have this probability; 1 for all.
        min_p: Only words with this part of the likeliest one's probability; 0 for all.
        repetition_penalty: Divides positive scores of words that were written already and
            multiplies negative ones (https://arxiv.org/abs/1909.05858).
        presence_penalty: Taken from the scores of words that were written already.
        seed: Of the chance, the same on every device; None for another one each time.
    """

    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    seed: int | None = None

    def chance(self) -> torch.Generator:
        """The source of chance of one text."""
        source = torch.Generator()
        if self.seed is None:
            source.seed()
        else:
            source.manual_seed(self.seed)
        return source


def next_word(
    scores: Tensor, choice: Choice, written: Collection[int], chance: torch.Generator
) -> int:
    """The word that comes next.

    Args:
        scores: ``[words]`` float32; not changed.
        written: Words that were written already.

    Raises:
        ValueError: The scores are no numbers.
    """
    if not bool(scores.isfinite().all()):
        raise ValueError(
            "the text encoder's scores are not finite numbers; its file is damaged, or its "
            "weights do not bear the type they are computed in"
        )
    scores = scores.cpu()
    repeated = torch.tensor(sorted(set(written)), dtype=torch.long)
    if len(repeated) and (choice.repetition_penalty != 1 or choice.presence_penalty):
        scores = scores.clone()
        old = scores[repeated]
        penalty = max(choice.repetition_penalty, 1e-6)
        old = torch.where(old > 0, old / penalty, old * penalty)
        scores[repeated] = old - choice.presence_penalty
    if not choice.do_sample or choice.temperature <= 0:
        return int(scores.argmax())
    odds = _kept(scores / choice.temperature, choice).softmax(dim=-1)
    return int(torch.multinomial(odds, 1, generator=chance))


def _kept(scores: Tensor, choice: Choice) -> Tensor:
    """Scores of the words that may come; the others' are minus infinity."""
    count = len(scores)
    ranked, order = scores.topk(min(choice.top_k or count, count))
    odds = ranked.softmax(dim=-1)
    keeps = odds.cumsum(dim=-1) - odds < choice.top_p  # as long as those before do not suffice
    keeps &= odds >= choice.min_p * odds[0]
    keeps[0] = True
    chosen = order[keeps]
    return torch.full_like(scores, -torch.inf).index_copy(0, chosen, scores[chosen])


def writer_in(module: nn.Module) -> tuple[str, SDClipModel]:
    """The language model among text encoders, and the name under which it is held.

    Raises:
        ValueError: None of them is one that can write; the text says what can.
    """
    for name, held in module.named_modules():
        if isinstance(held, SDClipModel) and isinstance(held.transformer, DecoderLLM):
            _check(held.transformer)
            return name, held
    kinds = sorted({name for name, held in module.named_modules() if isinstance(held, SDClipModel)})
    raise ValueError(
        f"clip: this text encoder ({', '.join(kinds) or type(module).__name__}) reads text but "
        f"cannot write any; load {CAN_WRITE}"
    )


def _check(network: DecoderLLM) -> None:
    config = network.config
    if not config.final_norm:
        lacks = "its last layers (there is no model.norm.weight)"
    elif not (config.lm_head or config.ties_words):
        lacks = "lm_head.weight, which turns states into words"
    else:
        return
    raise ValueError(
        f"clip: this file of a language model lacks {lacks}, so that it reads text but cannot "
        f"write any; load {CAN_WRITE}"
    )


def computing_dtype(network: DecoderLLM, device: torch.device) -> torch.dtype:
    """The type that texts are written in: that of the weights where the device is good at it."""
    layer: Any = network.model.layers[0]
    stored = layer.mlp.down_proj.weight.dtype  # norms are float32 in files of few bits
    is_good = (
        accelerators.cpu_multiplies_bf16()
        if device.type == "cpu"
        else precision.supports_dtype(device, torch.bfloat16)
    )
    return torch.bfloat16 if is_good and stored != torch.float32 else torch.float32


def memory_needed(encoder: SDClipModel, tokens: int, max_length: int, device: torch.device) -> int:
    """Bytes beside the weights for reading so many tokens and writing so many."""
    network: DecoderLLM = encoder.transformer
    config, dtype = network.config, computing_dtype(network, device)
    fixed = len(config.delta_layers)
    kept = cache_bytes(
        config.num_hidden_layers - fixed, config.num_key_value_heads, config.head_dim,
        tokens + max_length, dtype.itemsize,
    )  # fmt: skip
    if config.delta is not None:
        kept += fixed * config.delta.state_bytes() + tokens * config.delta.reading_bytes()
    reading = tokens * (ROWS_AT_ONCE * config.intermediate_size + 2 * tokens) * dtype.itemsize
    head: Any = network.lm_head or network.model.embed_tokens
    is_cast = head.weight.dtype != dtype  # or unpacked, with every word
    table = config.vocab_size * config.hidden_size * dtype.itemsize if is_cast else 0
    return int(kept + reading + table + 2 * config.vocab_size * torch.float32.itemsize)


def write(
    encoder: SDClipModel,
    tokens: Sequence[Any],
    choice: Choice,
    max_length: int,
    ends: Collection[int],
) -> list[int]:
    """Ids of the words that follow some tokens, without the one that ends them.

    It looks for a cancelled prompt before each word and counts words on a progress bar.

    Args:
        tokens: Ids, rows, and dicts of pictures.
        max_length: How many words at most.
        ends: Ids that end the text.
    """
    network: DecoderLLM = encoder.transformer
    table: Any = network.get_input_embeddings()
    device: torch.device = encoder.execution_device or table.weight.device
    dtype = computing_dtype(network, device)
    text = embed_tokens(
        [tokens], table, device, SpecialTokens(None, None),
        getattr(network, "preprocess_embed", None),
    )  # fmt: skip
    length = text.embeds.shape[1]
    cache = network.model.new_cache(length + max_length)
    places = network.places(text.info, length)
    blocks, deep = network.blocks(text.info), network.deep_rows(text.info)
    states = network.model.extend(text.embeds.to(dtype), cache, places, blocks, deep)
    del text, deep  # rows of pictures
    bar, chance = progress.ProgressBar(max_length), choice.chance()
    written: list[int] = []
    while len(written) < max_length:
        interrupt.throw_exception_if_processing_interrupted()
        word = next_word(network.scores(states[0, -1]), choice, written, chance)
        if word in ends:
            break
        written.append(word)
        bar.update_absolute(len(written))
        if len(written) < max_length:
            row = table(torch.tensor([[word]], device=device), out_dtype=dtype)
            states = network.model.extend(row, cache)
    bar.update_absolute(max_length)
    return written
