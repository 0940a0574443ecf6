"""Gemma 3 with pictures. Recorded answers are those of transformers 5.24.0, float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.ldm.llm.cache import KeyValueCache
from comfy.ldm.llm.gemma_vl import Gemma3VL
from comfy.text_encoders.token_embedding import EmbeddedText, SpecialTokens, embed_tokens
from tests.comfy.ldm.test_llm_cache import GEMMA3, SIZES
from tests.support.formula_weights import fill_by_formula

TOWER = {
    "hidden_size": 72, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 1,
    "image_size": 112, "patch_size": 14, "model_type": "siglip_vision_model",
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip


def model(**sizes: Any) -> Gemma3VL:
    made = Gemma3VL({**SIZES, **GEMMA3, **sizes}, torch.float32).eval().requires_grad_(False)
    fill_by_formula(made.state_dict())
    return made


def pictures() -> list[Tensor]:
    y, x = torch.meshgrid(torch.arange(112.0), torch.arange(112.0), indexing="ij")
    waves = [
        ((x / 17 + y / 23).sin(), (x / 31).cos(), (y / 19).sin()),
        ((x / 7).sin(), (y / 31).cos(), (x * y / 999).sin()),
    ]
    return [torch.stack(wave, -1)[None] * 0.5 + 0.5 for wave in waves]


def embedded(network: Gemma3VL, chunk: list[Any]) -> EmbeddedText:
    return embed_tokens(
        [chunk],
        network.model.embed_tokens,
        torch.device("cpu"),
        SpecialTokens(None, None),
        network.preprocess_embed,
    )


@torch.inference_mode()
def test_a_text_with_two_pictures_has_the_recorded_scores() -> None:
    network = model(vision_config=TOWER)
    one, two = ({"type": "image", "data": picture} for picture in pictures())
    text = embedded(network, [2, 95, one, 94, 5, 6, 95, two, 94, 7, 8, 9, 10, 11])
    blocks = network.blocks(text.info)
    assert blocks == [(2, 6), (10, 14)]
    cache = KeyValueCache(7, 20)
    scores = network.scores(network.model.extend(text.embeds, cache, None, blocks))[0]
    assert scores.argmax(-1)[[0, 3, 8, 12, 15, 19]].tolist() == [29, 13, 13, 5, 24, 13]
    expected = torch.tensor([[1.6899, -1.2925, -1.5466, 0.7264], [-1.014, 2.1381, -3.1923, 0.3718]])
    torch.testing.assert_close(scores[[3, -1], :4], expected, atol=2e-4, rtol=0)


@torch.inference_mode()
def test_any_picture_is_brought_to_the_towers_size() -> None:
    network = model(vision_config=TOWER)
    flat = torch.full((1, 30, 200, 4), 0.25)
    rows, _ = network.preprocess_embed({"type": "image", "data": flat}, "cpu")
    same, _ = network.preprocess_embed({"type": "image", "data": flat[:, :, :1, :1]}, "cpu")
    assert rows.shape == (network.picture_rows(flat), 32) == (4, 32)
    torch.testing.assert_close(rows, same)


def test_a_file_without_a_tower_says_so() -> None:
    network = model()
    assert network.picture_rows(torch.zeros(1, 8, 8, 3)) == 0
    with pytest.raises(ValueError, match=r"vision_model.*leave the picture inputs unconnected"):
        network.preprocess_embed({"type": "image", "data": torch.zeros(1, 8, 8, 3)}, "cpu")
