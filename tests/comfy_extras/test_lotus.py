"""The conditioning of Lotus comes from whatever file holds the encoder of Stable Diffusion 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import folder_paths
from comfy import text_loading
from comfy.families import openclip
from comfy.ldm.clip.text import CLIPTextModel
from comfy_extras import nodes_lotus
from comfy_extras.nodes_lotus import LotusConditioning
from tests.support import tiny_checkpoint

WIDTH, WHOLE = 8, 24
CONFIG = {
    "hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": WHOLE,
    "num_attention_heads": 1, "hidden_act": "gelu", "vocab_size": 49408,
}  # fmt: skip
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def encoder() -> CLIPTextModel:
    """One of the real one's depth and a small width."""
    torch.manual_seed(0)
    made = CLIPTextModel(CONFIG, dtype=torch.float32)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made.eval()


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folders of models."""
    for name in ("text_encoders", "checkpoints"):
        (tmp_path / name).mkdir()
        entry = ([str(tmp_path / name)], {".safetensors"})
        monkeypatch.setitem(folder_paths.folder_names_and_paths, name, entry)
    monkeypatch.setattr(nodes_lotus, "WIDTH", WIDTH)
    return tmp_path


def whole(weights: Weights) -> Weights:
    return weights


def without_last_layer(weights: Weights) -> Weights:
    """As the diffusers library saves it."""
    return {
        key: value
        for key, value in weights.items()
        if f"layers.{WHOLE - 1}." not in key and "projection" not in key
    }


def as_openclip(weights: Weights) -> Weights:
    return openclip.from_clip(weights, "", "")


@pytest.mark.parametrize("layout", [whole, without_last_layer, as_openclip])
@torch.inference_mode()
def test_the_empty_text_is_encoded_without_padding(
    layout: Callable[[Weights], Weights], encoder: CLIPTextModel, models: Path
) -> None:
    weights = {key: value.contiguous() for key, value in layout(encoder.state_dict()).items()}
    save_file(weights, models / "text_encoders" / "h.safetensors")
    (models / "text_encoders" / "a broken one.safetensors").write_bytes(b"nothing")
    ((states, options),) = LotusConditioning.execute()[0]
    _, expected, _, _ = encoder(torch.tensor([[49406, 49407]]), intermediate_output=-2)
    assert options == {}
    assert states.shape == (1, 2, WIDTH)
    # The encoder may keep its weights in half precision.
    torch.testing.assert_close(states, expected, rtol=0.01, atol=0.005)


def test_a_missing_encoder_is_asked_for(models: Path) -> None:
    tiny_checkpoint.write(models / "checkpoints" / "another.safetensors")
    with pytest.raises(FileNotFoundError, match=r"Lotus needs .*put text_encoder/model\.safeten"):
        LotusConditioning.execute()


@pytest.mark.parametrize("layer", [-2, -5])
@torch.inference_mode()
def test_layers_are_counted_alike_where_the_last_is_left_out(
    layer: int, encoder: CLIPTextModel, tmp_path: Path
) -> None:
    states = []
    for layout in (whole, without_last_layer):
        save_file(layout(encoder.state_dict()), tmp_path / "h.safetensors")
        clip = text_loading.load_clip([str(tmp_path / "h.safetensors")])
        clip.clip_layer(layer)
        states.append(clip.encode("a cat"))
    assert torch.equal(*states)
