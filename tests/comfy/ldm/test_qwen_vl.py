"""Qwen 2.5 VL: the picture tower and the places of pictures in a text.

Recorded answers are those of transformers 4.57.1 on the same weights, float32.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from comfy.ldm.llm.qwen_vl import (
    QwenVL,
    fitting_size,
    picture_patches,
    token_places,
)
from comfy.ldm.llm.vision import VisionConfig, VisionTransformer, merged_order, window_members
from comfy.text_encoders.token_embedding import SpecialTokens, embed_tokens
from tests.support.formula_weights import fill_by_formula

TOWER = {
    "hidden_size": 32, "intermediate_size": 24, "depth": 3, "num_heads": 2, "out_hidden_size": 16,
    "fullatt_block_indexes": (1,),
}  # fmt: skip
SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "qkv_bias": True,
    "qk_norm": False, "rope_dims": (1, 1, 2), "vision_config": TOWER,
}  # fmt: skip


def model() -> QwenVL:
    made = QwenVL(SIZES, dtype=torch.float32).eval().requires_grad_(False)
    fill_by_formula(made.state_dict())
    return made


def pictures() -> list[Tensor]:
    y, x = torch.meshgrid(torch.arange(140.0), torch.arange(196.0), indexing="ij")
    waves = [
        ((x / 17 + y / 23).sin(), (x / 31).cos(), (y / 19).sin()),
        ((x / 7).sin(), (y / 31).cos(), (x * y / 999).sin()),
    ]
    made = [(torch.stack(wave, -1)[None] * 0.5 + 0.5).mul(255).round() / 255 for wave in waves]
    return [made[0], made[1][:, :84, :56]]


def close(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), atol=2e-5, rtol=0)


@torch.inference_mode()
def test_the_tower_gives_the_recorded_rows() -> None:
    tower = model().visual
    assert tower is not None
    patches, grid = picture_patches(pictures()[0], tower.config)
    assert grid == (10, 14)  # neither side is a multiple of a window
    rows = tower(patches, *grid)
    assert rows.shape == (35, 16)
    close(rows[0, :5], [-0.781006, -0.162641, 0.453112, 0.759090, 0.085670])
    close(rows[17, :5], [0.632456, 1.050142, 0.116560, 0.924948, 0.441526])
    close(rows[-1, -5:], [-0.200486, 0.505380, 0.214476, 0.656967, 0.389370])


@torch.inference_mode()
def test_a_text_with_two_pictures_has_the_recorded_states() -> None:
    whole = model()
    chunk: list[object] = [1, 2, 32]
    for number, picture in enumerate(pictures()):
        chunk += [{"type": "image", "data": picture}, 33, 7 + number, 32]
    chunk += [5, 6]
    table = whole.get_input_embeddings()
    text = embed_tokens(
        [chunk], table, torch.device("cpu"), SpecialTokens(None, 39), whole.preprocess_embed
    )
    states, _ = whole(None, text.attention_mask, text.embeds, embeds_info=text.info)
    assert states.shape == (1, 52, 16)
    close(states[0, 2, :5], [0.402594, 1.432861, 0.912568, -0.624719, 1.011720])
    close(states[0, 20, :5], [1.390220, -0.544998, -0.286316, -0.549546, 1.088963])
    close(states[0, -1, :5], [1.198523, 0.090249, -0.132993, -0.331792, 1.842095])


@torch.inference_mode()
def test_words_before_a_picture_do_not_see_it_and_those_behind_do() -> None:
    whole = model()
    table = whole.get_input_embeddings()

    def states(picture: Tensor) -> Tensor:
        chunk = [1, 2, {"type": "image", "data": picture}, 3]
        text = embed_tokens(
            [chunk], table, torch.device("cpu"), SpecialTokens(None, 39), whole.preprocess_embed
        )
        return whole(None, text.attention_mask, text.embeds, embeds_info=text.info)[0]

    dark, light = states(torch.zeros(1, 56, 56, 3)), states(torch.ones(1, 56, 56, 3))
    assert torch.equal(dark[:, :2], light[:, :2])
    assert not torch.allclose(dark[:, -1], light[:, -1], atol=1e-3)


@torch.inference_mode()
def test_windows_are_looked_at_alone_but_in_the_chosen_layers() -> None:
    for whole_layers in ((), (0,)):
        config = VisionConfig.from_options({**TOWER, "fullatt_block_indexes": whole_layers})
        from comfy import ops

        tower = VisionTransformer(config, ops.manual_cast, dtype=torch.float32, device="cpu")
        fill_by_formula(tower.state_dict())
        patches = torch.rand(16 * 8, 3, 2, 14, 14, generator=torch.Generator().manual_seed(1))
        other = patches.clone()
        other[64:] += 0.5  # the lower of two windows
        rows, moved = tower(patches, 16, 8), tower(other, 16, 8)
        assert torch.allclose(rows[:16], moved[:16]) == (not whole_layers)
        assert not torch.allclose(rows[16:], moved[16:])


@pytest.mark.parametrize(("height", "width"), [(2, 2), (8, 8), (10, 22), (28, 26), (2, 40)])
def test_each_patch_is_in_one_window(height: int, width: int) -> None:
    places = merged_order(height, width, 2)
    assert sorted(map(tuple, places.tolist())) == [
        (row, column) for row in range(height) for column in range(width)
    ]
    windows = [members for group in window_members(places, 8) for members in group]
    assert torch.cat(windows).sort().values.tolist() == list(range(height * width))
    for members in windows:
        assert len((places[members] // 8).unique(dim=0)) == 1


@pytest.mark.parametrize(
    ("size", "fitted"),
    [
        ((56, 56), (56, 56)),
        ((100, 130), (112, 140)),
        ((15, 300), (28, 308)),
        ((1, 1), (56, 56)),
        ((3, 5000), (28, 2296)),
        ((8000, 6000), (4116, 3080)),
    ],
)
def test_sizes_are_those_of_the_published_processor(
    size: tuple[int, int], fitted: tuple[int, int]
) -> None:
    assert fitting_size(*size, 28) == fitted


def test_grey_pictures_and_those_with_alpha_are_taken() -> None:
    grey = torch.rand(1, 56, 56, 1)
    colour = grey.expand(-1, -1, -1, 3)
    alpha = torch.cat([colour, torch.rand(1, 56, 56, 1)], -1)
    expected, _ = picture_patches(colour, VisionConfig())
    for picture in (grey, alpha):
        assert torch.equal(picture_patches(picture, VisionConfig())[0], expected)


def test_places_go_on_behind_the_longer_side() -> None:
    places = token_places(
        12, [{"index": 2, "size": 6, "extra": (4, 6)}, {"index": 9, "size": 1, "extra": (2, 2)}], 2
    )
    assert places[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8]
    assert places[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8]
    assert places[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8]


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(ValueError, match=r"width 16.*32"):
        QwenVL({**SIZES, "hidden_size": 32})
    with pytest.raises(ValueError, match=r"\[1, 1, 1\].*8"):
        QwenVL({**SIZES, "rope_dims": (1, 1, 1)})
    with pytest.raises(ValueError, match=r"30.*4 heads"):
        VisionConfig(hidden_size=30, num_heads=4)
    blind = QwenVL({**SIZES, "vision_config": None})
    with pytest.raises(ValueError, match=r"Qwen 2\.5 VL"):
        blind.preprocess_embed({"type": "image", "data": torch.zeros(1, 56, 56, 3)}, "cpu")
    with pytest.raises(ValueError, match="'sound'"):
        model().preprocess_embed({"type": "sound"}, "cpu")
