"""Texts too long for the machine are refused before memory is taken: the system would end us."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from comfy.devices import memory
from comfy.ldm.ace.lyrics import LyricEncoder, LyricSizes
from comfy.ldm.llm.cache import KeyValueCache
from comfy.ldm.llm.model import DecoderLLM
from comfy.ldm.t5.model import T5
from comfy.ops import manual_cast

LENGTH = 300
LLM = {
    "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
T5_SIZES = {
    "d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 1, "vocab_size": 9,
    "model_type": "t5",
}  # fmt: skip


def encoded_by_t5(length: int) -> None:
    T5(T5_SIZES, torch.float32, "cpu", manual_cast)(torch.zeros(1, length, dtype=torch.long))


def encoded_by_llm(length: int) -> None:
    DecoderLLM(LLM, torch.float32)(torch.zeros(1, length, dtype=torch.long))


def read_by_writer(length: int) -> None:
    network = DecoderLLM(LLM, torch.float32)
    network.model.extend(torch.zeros(1, length, 8), KeyValueCache(1, length))


def sung(length: int) -> None:
    sizes = LyricSizes(width=8, heads=2, layers=1, inner=8)
    LyricEncoder(sizes, manual_cast, dtype=torch.float32)(torch.zeros(1, length, 8))


@pytest.mark.parametrize("read", [encoded_by_t5, encoded_by_llm, read_by_writer, sung])
@torch.inference_mode()
def test_what_grows_with_pairs_of_tokens_is_refused(
    read: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "NOTICEABLE_BYTES", 0)
    monkeypatch.setattr(memory, "get_free_memory", lambda *_: 2 * LENGTH**2)
    monkeypatch.setattr(memory, "swap_memory", lambda: (0, 0))
    read(20)
    with pytest.raises(memory.NotEnoughMemory, match=r"300\).*lower its .*length"):
        read(LENGTH)
