"""Encoders with more positions than CLIP (Long-CLIP) read and pad that many tokens at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy import text_loading
from comfy.text_encoders.long_clipl import model_options_long_clip
from tests.comfy.test_text_loading import encoder

LONG = 248
POSITIONS = "text_model.embeddings.position_embedding.weight"


def stretched(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same encoder with further positions."""
    key = next(key for key in weights if key.endswith(POSITIONS))
    table = weights[key]
    more = torch.randn(
        LONG - len(table), table.shape[1], generator=torch.Generator().manual_seed(1)
    )
    return {**weights, key: torch.cat([table, more])}


def load(folder: Path, weights: dict[str, Tensor]) -> Any:
    path = folder / f"{len(weights)}.safetensors"
    save_file({key: value.contiguous() for key, value in weights.items()}, path)
    return text_loading.load_clip([str(path)])


@torch.inference_mode()
def test_a_text_longer_than_77_tokens_is_read_as_one(tmp_path: Path) -> None:
    text = "a cat and " * 60  # 180 tokens
    plain, long = load(tmp_path, encoder()), load(tmp_path, stretched(encoder()))
    assert [len(chunk) for chunk in plain.tokenize(text)["l"]] == [77] * 3
    assert [len(chunk) for chunk in long.tokenize(text)["l"]] == [LONG]
    conditioning = long.encode_from_tokens_scheduled(long.tokenize(text))[0][0]
    assert conditioning.shape[1] == LONG
    other = long.encode_from_tokens_scheduled(long.tokenize(f"{text} dog"))
    assert not torch.equal(other[0][0][:, 185:], conditioning[:, 185:])


@torch.inference_mode()
def test_weights_of_words_reach_a_long_text(tmp_path: Path) -> None:
    clip = load(tmp_path, stretched(encoder()))
    plain, weighted = (
        clip.encode_from_tokens_scheduled(clip.tokenize(text))[0][0]
        for text in ("a cat", "a (cat:1.5)")
    )
    assert plain.shape == weighted.shape == (1, LONG, plain.shape[2])
    assert not torch.equal(plain[:, 2], weighted[:, 2])


@pytest.mark.parametrize(
    ("sd", "name"),
    [
        ({POSITIONS: torch.ones(LONG, 8)}, "clip_l"),
        (
            {
                POSITIONS: torch.ones(LONG, 8),
                "text_model.encoder.layers.30.mlp.fc1.weight": torch.ones(1),
            },
            "clip_g",
        ),
        ({f"clip_l.{POSITIONS}": torch.ones(LONG, 8)}, "clip_l"),
        ({f"clip_g.{POSITIONS}": torch.ones(LONG, 8)}, "clip_g"),
    ],
)
def test_packs_are_told_the_options_of_an_encoder(sd: dict[str, Tensor], name: str) -> None:
    given: dict[str, Any] = {f"{name}_model_config": {"hidden_size": 8}}
    data, options = model_options_long_clip(sd, {"kept": 1}, given)
    assert data == {"kept": 1, f"{name}_max_length": LONG}
    assert options[f"{name}_model_config"] == {"hidden_size": 8, "max_position_embeddings": LONG}
    assert given == {f"{name}_model_config": {"hidden_size": 8}}
    assert model_options_long_clip({}, {"kept": 1}, given) == ({"kept": 1}, given)
