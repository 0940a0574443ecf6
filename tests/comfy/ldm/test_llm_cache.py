"""Language models word by word: what they keep of earlier words gives the scores of whole texts.

Recorded answers are those of transformers 5.24.0 on the same weights, float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.ldm.llm.cache import KeyValueCache, LayerCache, cache_bytes
from comfy.ldm.llm.model import DecoderLLM
from tests.support.formula_weights import fill_by_formula

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
GEMMA2 = {
    "rope_theta": 1e4, "qk_norm": False, "transformer_type": "gemma2",
    "sliding_attention": (8, False), "score_cap": 50.0, "word_cap": 30.0,
}  # fmt: skip
GEMMA3 = {
    "transformer_type": "gemma3", "rope_theta": (1e6, 1e4), "rope_scale": (8.0, 1.0),
    "sliding_attention": (8, 8, 8, 8, 8, False),
}  # fmt: skip
LLAMA = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "qk_norm": False, "lm_head": True}
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": {**LLAMA, "rope_theta": 1e9},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {},
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
}
# Words of the highest scores behind every fourth token, and the last scores of four words.
LIKELIEST = {
    "llama": [65, 29, 57, 29, 29, 29, 29, 83, 87, 87],
    "mistral": [65, 29, 57, 29, 29, 29, 29, 22, 2, 87],
    "qwen2": [52, 73, 73, 59, 59, 5, 26, 62, 5, 54],
    "qwen3": [52, 73, 73, 59, 59, 54, 26, 59, 5, 54],
    "gemma2": [52, 83, 69, 10, 35, 54, 3, 26, 5, 70],
    "gemma3": [52, 20, 83, 62, 33, 60, 69, 1, 77, 69],
}
LAST = {
    "llama": [0.60975, -0.52819, 0.91831, -1.98105],
    "mistral": [0.88171, -0.1687, 0.57419, -2.44981],
    "qwen2": [0.77688, 0.04466, 0.42015, 1.01463],
    "qwen3": [1.0333, -0.04769, -0.07232, 1.34049],
    "gemma2": [2.6391, 2.36306, 2.30223, 3.44997],
    "gemma3": [3.57231, -0.26108, 1.37496, 0.63571],
}
GREEDY = {
    "llama": [29, 65, 33, 8, 29, 37, 65, 65, 29, 37, 37, 37, 29, 37, 29, 37, 83, 29, 37, 83],
    "mistral": [29, 65, 33, 8, 29, 37, 65, 65, 29, 37, 37, 37, 83, 57, 27, 29, 37, 46, 29, 37],
    "qwen2": [73, 73, 72, 73, 72, 52, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5],
    "qwen3": [73, 28, 52, 28, 28, 5, 5, 5, 5, 5, 5, 5, 5, 5, 52, 5, 5, 5, 5, 52],
    "gemma2": [83, 83, 1, 15, 19, 83, 1, 57, 60, 54, 17, 95, 20, 19, 53, 37, 52, 53, 96, 63],
    "gemma3": [20, 52, 89, 71, 58, 72, 73, 77, 26, 5, 28, 73, 28, 28, 28, 28, 30, 83, 83, 83],
}
TEXT = torch.tensor([[(7 * i * i + 3 * i + 5) % 97 for i in range(40)]])


def model(kind: str) -> DecoderLLM:
    made = DecoderLLM({**SIZES, **KINDS[kind]}, torch.float32).eval().requires_grad_(False)
    fill_by_formula(made.state_dict())
    return made


def scores(network: DecoderLLM, tokens: Tensor, cache: KeyValueCache) -> Tensor:
    return network.scores(network.model.extend(network.model.embed_tokens(tokens), cache))[0]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_words_one_by_one_have_the_recorded_scores(kind: str) -> None:
    network, cache = model(kind), KeyValueCache(7, 40)
    parts = [TEXT[:, :9], *TEXT[:, 9:].split(1, dim=1)]
    found = torch.cat([scores(network, part, cache) for part in parts])
    assert cache.length == cache.next_place == 40
    assert found.argmax(-1)[::4].tolist() == LIKELIEST[kind]
    torch.testing.assert_close(found[-1, :4], torch.tensor(LAST[kind]), atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_the_likeliest_words_are_those_recorded(kind: str) -> None:
    network, cache = model(kind), KeyValueCache(7, 25)
    tokens, written = TEXT[:, :5], []
    for _ in range(20):
        written.append(int(scores(network, tokens, cache)[-1].argmax()))
        tokens = torch.tensor([written[-1:]])
    assert written == GREEDY[kind]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gemma2"])
@torch.inference_mode()
def test_a_text_read_in_parts_is_the_text_read_at_once(kind: str) -> None:
    network, cache = model(kind), KeyValueCache(7, 40)
    whole = network(TEXT)[0]
    parts = [network.model.embed_tokens(part) for part in TEXT.split([3, 17, 1, 19], dim=1)]
    found = torch.cat([network.model.extend(part, cache) for part in parts], dim=1)
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-5)


def test_a_cache_grows_to_what_is_needed_and_no_further() -> None:
    layer = LayerCache(600)
    rows = torch.randn(1, 2, 600, 4, generator=torch.Generator().manual_seed(1))
    for part in rows.split([1, 299, 300], dim=2):
        keys, values = layer.extend(part, -part)
    assert torch.equal(keys, rows)
    assert torch.equal(values, -rows)
    assert keys.untyped_storage().nbytes() == 2 * rows.nbytes
    assert cache_bytes(1, 2, 4, 600, 4) == 2 * keys.untyped_storage().nbytes()
