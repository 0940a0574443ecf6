"""Qwen 3 VL: the picture tower, what it adds to the language model's layers, places, words.

Recorded answers are those of transformers 5.24.0 (Qwen3VLForConditionalGeneration and
Qwen2VLImageProcessor with Qwen 3 VL's figures) on the same weights, float32.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.ldm.llm.cache import KeyValueCache
from comfy.ldm.llm.qwen3_vision import Qwen3VisionConfig
from comfy.ldm.llm.qwen3_vl import QWEN3_LOOK, Qwen3VL
from comfy.ldm.llm.qwen_vl import fitting_size, picture_patches
from comfy.text_encoders import generation
from comfy.text_encoders.generation import Choice
from comfy.text_encoders.token_embedding import EmbeddedText, SpecialTokens, embed_tokens
from tests.support.formula_weights import fill_by_formula

TOWER = {
    "hidden_size": 32, "intermediate_size": 24, "depth": 4, "num_heads": 2, "out_hidden_size": 16,
    "num_position_embeddings": 25, "deepstack_visual_indexes": (0, 2),
}  # fmt: skip
SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rope_dims": (6, 5, 5),
    "lm_head": True, "vision_config": TOWER,
}  # fmt: skip
CPU = torch.device("cpu")


def model() -> Qwen3VL:
    made = Qwen3VL(SIZES, dtype=torch.float32).eval().requires_grad_(False)
    fill_by_formula(made.state_dict())
    for name, value in made.state_dict().items():
        if name.startswith("model.layers") and value.ndim > 1:
            value *= 2.5  # else the last word decides what comes next
    return made


def pictures() -> list[Tensor]:
    y, x = torch.meshgrid(torch.arange(288.0), torch.arange(352.0), indexing="ij")
    waves = [
        ((x / 17 + y / 23).sin(), (x / 31).cos(), (y / 19).sin()),
        ((x / 7).sin(), (y / 31).cos(), (x * y / 999).sin()),
    ]
    made = [(torch.stack(wave, -1)[None] * 0.5 + 0.5).mul(255).round() / 255 for wave in waves]
    return [made[0], made[1][:, :, :256]]


def tokens() -> list[Any]:
    chunk: list[Any] = [1, 2, 32]
    for number, picture in enumerate(pictures()):
        chunk += [{"type": "image", "data": picture}, 33, 7 + number, 32]
    return [*chunk, 5, 6]


def embedded(whole: Qwen3VL) -> EmbeddedText:
    table: Any = whole.get_input_embeddings()
    return embed_tokens([tokens()], table, CPU, SpecialTokens(None, 39), whole.preprocess_embed)


def close(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), atol=2e-5, rtol=0)


def written(choice: Choice) -> list[int]:
    encoder: Any = SimpleNamespace(transformer=model(), execution_device=CPU)
    with torch.inference_mode():
        return generation.write(encoder, tokens(), choice, 12, ())


def test_a_picture_of_fitting_size_is_cut_as_it_is() -> None:
    patches, grid = picture_patches(pictures()[0], Qwen3VisionConfig(), QWEN3_LOOK)
    assert (grid, patches.shape) == ((18, 22), (396, 3, 2, 16, 16))
    expected = pictures()[0][0, :16, 32:48].movedim(-1, 0) * 2 - 1  # below, row by row of squares
    torch.testing.assert_close(patches[4, :, 1], expected)


def test_other_pictures_are_resized_like_the_published_processor_does() -> None:
    patches, grid = picture_patches(pictures()[0][:, :100, :130], Qwen3VisionConfig(), QWEN3_LOOK)
    assert grid == (16, 20)
    rows = patches.flatten(1)
    for actual, expected in (
        (rows[0, :4], [-0.003922, -0.003922, 0.027451, 0.043137]),
        (rows[150, 300:304], [0.952941, 0.960784, 0.960784, 0.968627]),
        (rows[-1, -4:], [-0.882353, -0.882353, -0.882353, -0.882353]),
    ):  # the recorded ones are of pictures in 8 bits
        torch.testing.assert_close(actual, torch.tensor(expected), atol=2.5 / 255, rtol=0)
    assert rows.abs().max() <= 1


@pytest.mark.parametrize(
    ("size", "fitted"),
    [
        ((288, 352), (288, 352)),
        ((100, 130), (256, 320)),
        ((20, 30), (224, 320)),
        ((1030, 40), (1312, 64)),
        ((8000, 6000), (4704, 3520)),
    ],
)
def test_sizes_are_those_of_the_published_processor(
    size: tuple[int, int], fitted: tuple[int, int]
) -> None:
    assert fitting_size(*size, 32, QWEN3_LOOK) == fitted


@torch.inference_mode()
def test_the_tower_gives_the_recorded_rows_and_those_for_the_first_layers() -> None:
    tower = model().visual
    rows, deep = tower(*_flat(picture_patches(pictures()[0], tower.config, QWEN3_LOOK)))
    assert [tuple(one.shape) for one in (rows, *deep)] == [(99, 16)] * 3
    close(rows[0, :5], [-0.519446, -0.344413, 1.335148, -1.588293, 0.024002])
    close(rows[37, :5], [-0.394427, -0.377672, 1.369739, -1.456598, 0.201343])
    close(rows[-1, -5:], [0.826391, -0.693098, -0.408594, 0.166407, 1.770653])
    close(deep[0][37, :5], [0.304914, 1.249928, -0.883835, 1.305630, -0.232302])
    close(deep[1][-1, -5:], [1.168879, -0.528353, -1.420063, 0.404249, 0.483537])


def _flat(cut: tuple[Tensor, tuple[int, int]]) -> tuple[Tensor, int, int]:
    return cut[0], *cut[1]


@torch.inference_mode()
def test_a_text_with_two_pictures_has_the_recorded_states_and_scores() -> None:
    whole = model()
    text = embedded(whole)
    states, _ = whole(None, text.attention_mask, text.embeds, embeds_info=text.info)
    assert states.shape == (1, 182, 16)
    scores = whole.scores(states)
    close(states[0, 2, :5], [0.630441, 0.141516, -0.363666, -0.344778, 1.407812])
    close(states[0, 60, :5], [-0.455636, -0.050891, 0.543612, -0.645121, -1.365924])
    close(states[0, -1, :5], [-0.939566, 0.640803, -0.604670, 0.084558, -1.440921])
    close(scores[0, 99, :5], [0.603302, 0.006358, 0.676389, -0.365844, -0.296117])
    close(scores[0, -1, :5], [1.382665, 0.835121, 1.012332, -0.162467, -0.324583])
    cache = KeyValueCache(3, 182)
    places = whole.places(text.info, 182)
    again = whole.model.extend(text.embeds, cache, places, (), whole.deep_rows(text.info))
    torch.testing.assert_close(again, states)


def test_words_are_the_recorded_ones() -> None:
    assert written(Choice(do_sample=False)) == [15] * 12
    choice = Choice(temperature=0.7, top_k=20, top_p=0.95, min_p=0.05, seed=7)
    assert written(choice) == [16, 5, 15, 28, 25, 0, 15, 29, 13, 15, 13, 1]


def test_a_tower_without_the_layers_it_is_read_at_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layers \[5, 11, 17\].*with 12"):
        Qwen3VisionConfig(depth=12)
    with pytest.raises(ValueError, match=r"width 16.*32"):
        Qwen3VL({**SIZES, "hidden_size": 32})
    blind = Qwen3VL({**SIZES, "vision_config": None})
    with pytest.raises(ValueError, match="choose a file of Qwen 3 VL"):
        blind.preprocess_embed({"type": "image", "data": torch.zeros(1, 256, 256, 3)}, "cpu")
