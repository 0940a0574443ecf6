"""What CLIPSetLastLayer does to encoders that stand beside CLIP: T5 and language models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import text_loading
from comfy.text_loading import CLIPType
from comfy_nodes.conditioning import CLIPSetLastLayer
from tests.comfy.families import (
    test_hidream,
    test_hunyuan_video,
    test_kandinsky5,
    test_transformers,
)
from tests.comfy.families.small_files import write


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def hunyuan_video(folder: Path) -> Any:
    test_hunyuan_video.pieces(folder)
    weights = test_hunyuan_video.text_encoders()
    paths = [write(one, folder / f"{name}.safetensors") for name, one in weights.items()]
    return text_loading.load_clip(paths, clip_type=CLIPType.HUNYUAN_VIDEO)


def flux(folder: Path) -> Any:
    test_transformers.pieces(folder)
    weights = test_transformers.text_encoders(24)
    paths = [write(one, folder / f"{name}.safetensors") for name, one in weights.items()]
    return text_loading.load_clip(paths, clip_type=CLIPType.FLUX)


@dataclass(frozen=True)
class Case:
    """An encoder beside CLIP.

    Attributes:
        clip: Makes the text encoding.
        name: Of the encoder.
        own: The layer it takes by itself; 0 is behind the last norm.
        norm: Whether the states of earlier layers go through the last norm.
        follows: Whether by the model's paper a choice of layer is its own too.
    """

    clip: Callable[[Path], Any]
    name: str
    own: int
    norm: bool = False
    follows: bool = False


CASES = {
    "HunyuanVideo": Case(hunyuan_video, "llama", -3),
    "Kandinsky 5": Case(test_kandinsky5.clip_of, "qwen25_7b", 0),
    "HiDream": Case(
        lambda folder: test_hidream.clip_of(folder, "clip_l", "t5xxl"), "t5xxl", 0, norm=True
    ),
    "FLUX": Case(flux, "t5xxl", 0, norm=True, follows=True),
}


def layers_of(encoder: Any) -> tuple[Any, Any]:
    """The layers of a network, and its last norm."""
    network = encoder.transformer
    if hasattr(network, "encoder"):
        return network.encoder.block, network.encoder.final_layer_norm
    return network.model.layers, network.model.norm


def looked_into(clip: Any, name: str) -> tuple[Tensor, list[Tensor], Tensor]:
    """States an encoder gives for a text, those behind each of its layers, and the last normed."""
    encoder = getattr(clip.cond_stage_model, name)
    layers, norm = layers_of(encoder)
    seen: dict[Any, Tensor] = {}

    def note(module: Any, _: Any, out: Any) -> None:
        seen[module] = (out if isinstance(out, Tensor) else out[0]).clone()

    handles = [module.register_forward_hook(note) for module in (*layers, encoder)]
    clip.encode_from_tokens(clip.tokenize("a red cat"))
    for handle in handles:
        handle.remove()
    behind = [seen[layer] for layer in layers]
    return seen[encoder], behind, norm(behind[-1])


@pytest.mark.parametrize("published", [False, True], ids=["as_always", "by_the_paper"])
@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_that_of_every_encoder_or_of_clip(
    name: str, published: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if published:
        request.getfixturevalue("paper_formulas")
    case = CASES[name]
    clip = case.clip(tmp_path)
    for chosen in (-1, -2, -24):  # the last is more than there are
        (view,) = CLIPSetLastLayer().set_last_layer(clip, chosen)
        states, behind, last = looked_into(view, case.name)
        asked = chosen if not published or case.follows else case.own
        if asked == 0 or -asked > len(behind):
            asked = case.own
        expected = last if asked == 0 else behind[asked]
        if case.norm and asked != 0:
            expected = layers_of(getattr(clip.cond_stage_model, case.name))[1](expected)
        assert torch.equal(states, expected), chosen


def test_an_encoder_of_which_all_layers_count_keeps_them(tmp_path: Path) -> None:
    clip = test_hidream.clip_of(tmp_path, "llama", kind=CLIPType.STABLE_DIFFUSION)
    tokens = clip.tokenize("a cat")
    [[_, told]] = clip.encode_from_tokens_scheduled(tokens)
    (view,) = CLIPSetLastLayer().set_last_layer(clip, -2)
    [[_, same]] = view.encode_from_tokens_scheduled(tokens)
    assert torch.equal(told["conditioning_llama3"], same["conditioning_llama3"])
