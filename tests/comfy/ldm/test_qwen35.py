"""Qwen 3.5: attention by the gated delta rule, gated attention, pictures, words.

Recorded answers are those of transformers 5.24.0 (Qwen3_5ForConditionalGeneration) on the same
weights, float32; the tolerance is what 1e-6 of the embeddings changes in them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.ldm.llm.delta import PIECE, DeltaSizes, delta_rule
from comfy.ldm.llm.qwen35 import Qwen35
from comfy.text_encoders import generation
from comfy.text_encoders.generation import Choice
from comfy.text_encoders.token_embedding import SpecialTokens, embed_tokens
from tests.comfy.ldm.test_qwen3_vl import CPU, TOWER, tokens
from tests.support.formula_weights import fill_by_formula

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rope_part": 0.5,
    "rope_dims": (3, 3, 2), "delta": DeltaSizes(2, 4, 8, 12, 4), "delta_layers": (0, 1, 2),
    "lm_head": True, "vision_config": {**TOWER, "deepstack_visual_indexes": ()},
}  # fmt: skip


def model() -> Qwen35:
    made = Qwen35(SIZES, dtype=torch.float32).eval().requires_grad_(False)
    fill_by_formula(made.state_dict())
    for name, value in made.state_dict().items():
        if name.startswith("model.") and "norm" in name and "linear_attn.norm" not in name:
            value -= 1  # these count from 1
    return made


def close(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), atol=2e-4, rtol=0)


def written(choice: Choice) -> list[int]:
    encoder: Any = SimpleNamespace(transformer=model(), execution_device=CPU)
    with torch.inference_mode():
        return generation.write(encoder, tokens(), choice, 12, ())


@torch.inference_mode()
def test_a_text_with_two_pictures_has_the_recorded_states_and_scores() -> None:
    whole = model()
    table: Any = whole.get_input_embeddings()
    text = embed_tokens([tokens()], table, CPU, SpecialTokens(None, 39), whole.preprocess_embed)
    states, _ = whole(None, text.attention_mask, text.embeds, embeds_info=text.info)
    assert states.shape == (1, 182, 16)
    scores = whole.scores(states)
    close(states[0, 2, :5], [1.041339, -1.697657, 0.391259, 0.346350, 0.062425])
    close(states[0, 60, :5], [-1.771851, -0.204014, -0.436514, -0.248526, 0.779766])
    close(states[0, -1, :5], [0.854940, 1.113301, -1.403672, -0.269010, 0.906090])
    close(scores[0, 99, :5], [-1.744534, 0.514263, 0.496248, -1.246902, -0.336711])
    close(scores[0, -1, :5], [2.014161, 0.229712, 0.419517, 1.533508, -0.207876])


def test_words_are_the_recorded_ones() -> None:
    assert written(Choice(do_sample=False)) == [0, 17, 21, 10, 12, 21, 27, 9, 1, 17, 15, 28]
    choice = Choice(temperature=0.7, top_k=20, top_p=0.95, min_p=0.05, seed=8)
    assert written(choice) == [16, 31, 14, 9, 16, 13, 36, 7, 15, 35, 33, 7]


@torch.inference_mode()
def test_tokens_in_parts_have_the_states_of_the_whole() -> None:
    network = model().model
    x = torch.randn(1, 150, 16, generator=torch.Generator().manual_seed(2))
    whole = network.extend(x, network.new_cache(150))
    cache = network.new_cache(150)
    parts = [network.extend(part, cache) for part in x.split([70, 1, 2, 64, 13], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-4, rtol=0)
    assert cache.length == 150


@pytest.mark.parametrize("length", [1, 3, PIECE, PIECE + 1, 150])
def test_pieces_are_single_steps(length: int) -> None:
    """The rule as it is written, token by token, in double precision."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, 3, length, 8, generator=generator) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    decay, strength = (torch.rand(2, 3, length, generator=generator) for _ in range(2))
    start = torch.randn(2, 3, 8, 8, generator=generator)
    out, end = delta_rule(q, k, v, decay.log(), strength, start)
    state, read = start.double(), []
    for token in range(length):
        state = state * decay[:, :, token, None, None].double()
        key = k[:, :, token, :, None].double()
        missing = v[:, :, token, None].double() - key.mT @ state
        state = state + strength[:, :, token, None, None].double() * key @ missing
        read.append(q[:, :, token, None].double() @ state)
    torch.testing.assert_close(out.double(), torch.cat(read, dim=2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(end.double(), state, atol=1e-4, rtol=1e-4)


def test_sizes_that_do_not_agree_are_refused() -> None:
    with pytest.raises(ValueError, match=r"5 heads of values.*2 heads of keys"):
        DeltaSizes(2, 5)
    with pytest.raises(ValueError, match=r"layers \[0, 1, 2\] need sizes"):
        Qwen35({**SIZES, "delta": None})
    with pytest.raises(ValueError, match=r"\[3, 3, 3\].*16 channels that are turned"):
        Qwen35({**SIZES, "rope_dims": (3, 3, 3)})
