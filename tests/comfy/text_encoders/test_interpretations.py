"""What weights in a text do to each kind of text encoder, by each interpretation: nodes, against
formulas in double precision on states of the encoders for tokens without weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from comfy import text_loading
from comfy.text_encoders import lumina2
from comfy.text_encoders.clip import CLIP
from comfy.text_encoders.sd1 import SD1ClipModel, SD1Tokenizer
from comfy.text_encoders.sdxl import SDXLClipModel, SDXLTokenizer
from comfy_extras.nodes_prompt_weights import CLIPSetWeightInterpretation
from comfy_nodes.conditioning import CLIPTextEncode
from tests.comfy.families.test_last_layer import flux
from tests.comfy.text_encoders.test_lumina2 import VOCABULARY, gemma, written
from tests.support.golden_nets import read_golden_net

Array = NDArray[np.float64]
START, END = 49406, 49407
TEXT = "a (cat:1.4) (red:0.5) cat"
LONG = TEXT + " dog" * 80 + " (red:0.25)"


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def recorded(name: str, tokenizer: type, encoder: type, golden_folder: Path) -> Any:
    net = read_golden_net(golden_folder / f"text_encoders/{name}.safetensors")
    target = SimpleNamespace(tokenizer=tokenizer, clip=encoder, params={})
    options = {**net.constructor, "dtype": torch.float32}
    return CLIP(target, state_dict=net.weights, model_options=options)


def gemma2(folder: Path) -> Any:
    return text_loading.load_clip([written(gemma(lumina2.GEMMA2_2B), folder, VOCABULARY)])


@pytest.fixture(params=["SD1", "SDXL", "FLUX", "Lumina 2"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clip(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    if kind == "FLUX":
        return flux(tmp_path)
    if kind == "Lumina 2":
        return gemma2(tmp_path)
    golden = request.getfixturevalue("golden_folder")
    if kind == "SD1":
        return recorded("sd1_clip_l", SD1Tokenizer, SD1ClipModel, golden)
    return recorded("sdxl_clip_l_g", SDXLTokenizer, SDXLClipModel, golden)


# The encoders whose states are the conditioning: their name among tokens, and as an attribute; the
# tokens of the empty text: how it begins, and with what it is filled up.
ENCODERS: dict[str, list[tuple[str, str, list[int], int]]] = {
    "SD1": [("l", "clip_l", [START, END], END)],
    "SDXL": [("l", "clip_l", [START, END], END), ("g", "clip_g", [START, END], 0)],
    "FLUX": [("t5xxl", "t5xxl", [1], 0)],
    "Lumina 2": [(lumina2.GEMMA2_2B, lumina2.GEMMA2_2B, [2], 0)],
}


def compatible(z: Array, e: Array, w: Array) -> Array:
    return e + (z - e) * w


def keeping_the_mean(z: Array, e: Array, w: Array) -> Array:
    return np.stack([c * v * c.mean() / (c * v).mean() for c, v in zip(z, w)])


def down_weighted(z: Array, e: Array, w: Array) -> Array:
    return e + (z - e) * w / max(1.0, w.max())


FORMULAS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "default": compatible,
    "A1111": keeping_the_mean,
    "down-weight": down_weighted,
    "none": lambda z, e, w: z,
}


def states_of(encoder: Any, ids: list[int]) -> Array:
    """States of tokens without weights, each chunk alone."""
    made: Array = encoder.encode_token_weights([[(number, 1.0) for number in ids]])[0]
    return made[0].double().numpy()


def expected(clip: Any, kind: str, text: str, name: str) -> Array:
    made = []
    for tokens, attribute, begin, fill in ENCODERS[kind]:
        encoder = getattr(clip.cond_stage_model, attribute)
        chunks = clip.tokenize(text)[tokens]
        length = len(chunks[0])
        z = np.stack([states_of(encoder, [pair[0] for pair in chunk]) for chunk in chunks])
        e = states_of(encoder, begin + [fill] * (length - len(begin)))
        w = np.array([[pair[1] for pair in chunk] for chunk in chunks])[..., None]
        assert w.min() < 1 < w.max()
        made.append(np.concatenate(FORMULAS[name](z, e, w)))
    return np.concatenate(made, axis=-1)


@pytest.mark.parametrize("text", [TEXT, LONG], ids=["short", "long"])
def test_each_interpretation_follows_its_formula(clip: Any, kind: str, text: str) -> None:
    encode = functools.partial(CLIPTextEncode().encode, clip, text)
    plain = encode(weight_interpretation="none")[0][0][1].get("pooled_output")
    for name in FORMULAS:
        [[cond, told]] = encode(weight_interpretation=name)[0]
        wanted = expected(clip, kind, text, name)
        error = np.abs(cond[0].double().numpy() - wanted).max()
        assert error <= 1e-5 * np.abs(wanted).max(), name
        # By the node before, too; and what a text asks for goes before what the encoder has.
        (set_before,) = CLIPSetWeightInterpretation.execute(clip, name)
        assert torch.equal(CLIPTextEncode().encode(set_before, text)[0][0][0], cond)
        (other,) = CLIPSetWeightInterpretation.execute(clip, "none")
        again = CLIPTextEncode().encode(other, text, weight_interpretation=name)[0][0][0]
        assert torch.equal(again, cond)
        if plain is not None:  # pooled states are never weighted
            torch.testing.assert_close(told["pooled_output"], plain)
    assert torch.equal(encode()[0][0][0], encode(weight_interpretation="default")[0][0][0])
