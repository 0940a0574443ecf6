"""The CLIP class: filling, clones, options, what nodes get."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comfy.text_encoders.clip import CLIP
from comfy.text_encoders.sd1 import SD1ClipModel, SD1Tokenizer
from comfy.weights.fill import IncompleteWeightsError
from tests.support.golden_nets import GoldenNet, assert_close_to_golden, read_golden_net


class Target:
    tokenizer = SD1Tokenizer
    clip = SD1ClipModel
    params: dict = {}  # noqa: RUF012 - the shape of a family's target


@pytest.fixture(scope="module")
def net(golden_folder: Path) -> GoldenNet:
    return read_golden_net(golden_folder / "text_encoders/sd1_clip_l.safetensors")


def build(net: GoldenNet, weights: dict | None = None) -> CLIP:
    options = {**net.constructor, "dtype": torch.float32}
    return CLIP(Target, state_dict=weights or net.weights, model_options=options)


@pytest.fixture
def clip(net: GoldenNet) -> CLIP:
    return build(net)


@torch.inference_mode()
def test_a_scheduled_encoding_is_conditioning_with_its_options(clip: CLIP, net: GoldenNet) -> None:
    tokens = clip.tokenize("a photo of a cat")
    [[cond, options]] = clip.encode_from_tokens_scheduled(tokens, add_dict={"width": 8})
    assert_close_to_golden(cond, net.outputs["skipNone/prompt1/cond"])
    assert_close_to_golden(options["pooled_output"], net.outputs["skipNone/prompt1/pooled_output"])
    assert options["width"] == 8


@torch.inference_mode()
def test_clip_skip_belongs_to_a_clone(clip: CLIP, net: GoldenNet) -> None:
    skipping = clip.clone()
    skipping.clip_layer(-2)
    text = "a photo of a cat"
    assert_close_to_golden(skipping.encode(text), net.outputs["skip-2/prompt1/cond"])
    assert_close_to_golden(clip.encode(text), net.outputs["skipNone/prompt1/cond"])


@torch.inference_mode()
def test_a_patch_changes_only_the_clone_that_has_it(clip: CLIP, net: GoldenNet) -> None:
    key = "clip_l.transformer.text_model.final_layer_norm.bias"
    patched = clip.clone()
    assert patched.add_patches({key: (torch.ones(32),)}, 1.0) == [key]
    plain = net.outputs["skipNone/prompt1/cond"]
    torch.testing.assert_close(patched.encode("a photo of a cat"), plain + 1, atol=1e-4, rtol=0)
    assert_close_to_golden(clip.encode("a photo of a cat"), plain)


@torch.inference_mode()
def test_the_interpretation_of_weights_belongs_to_a_clone(clip: CLIP, net: GoldenNet) -> None:
    flat = clip.clone()
    flat.weight_interpretation = "none"
    assert torch.equal(flat.encode("a (cat:1.3)"), clip.encode("a cat"))
    assert not torch.equal(clip.encode("a (cat:1.3)"), clip.encode("a cat"))


@torch.inference_mode()
def test_a_file_without_projection_has_the_identity(net: GoldenNet) -> None:
    left_out = ("text_projection.weight", "logit_scale")
    weights = {k: v for k, v in net.weights.items() if not k.endswith(left_out)}
    clip = build(net, weights)
    tokens = clip.tokenize("a photo of a cat")
    _, plain = clip.encode_from_tokens(tokens, return_pooled="unprojected")
    clip.cond_stage_model.set_clip_options({"projected_pooled": True})
    projection = clip.cond_stage_model.clip_l.transformer.text_projection
    torch.testing.assert_close(projection(plain), plain)


def test_a_missing_weight_is_named(net: GoldenNet) -> None:
    weights = {k: v for k, v in net.weights.items() if not k.endswith("final_layer_norm.bias")}
    with pytest.raises(IncompleteWeightsError, match=r"final_layer_norm\.bias"):
        build(net, weights)


def test_all_weights_come_back(clip: CLIP, net: GoldenNet) -> None:
    saved = clip.get_sd()
    assert saved.keys() == net.weights.keys()


def test_tokenizer_options_reach_the_tokenizer(clip: CLIP) -> None:
    clip.tokenizer.clip_l.pad_to_max_length = False
    clip.set_tokenizer_option("clip_l_min_length", 10)
    assert [len(chunk) for chunk in clip.tokenize("a")["l"]] == [10]
    assert [len(chunk) for chunk in clip.clone().tokenize("a")["l"]] == [10]


def test_a_text_of_two_chunks_is_twice_as_long(clip: CLIP) -> None:
    assert clip.encode("cat " * 80).shape == (1, 154, 32)


def test_rows_of_another_models_embedding_are_counted_and_left_out(
    clip: CLIP, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = clip.tokenize("a b c d e")
    (name, (chunk,)) = next(iter(tokens.items()))
    wrong = [(torch.rand(99), 1.0)] * 3
    cond, _ = clip.encode_from_tokens(
        {name: [[*chunk[:2], *wrong, *chunk[5:]]]}, return_pooled=True
    )
    assert cond.shape[1] == 77
    assert caplog.text.count("3 rows of embeddings of width 99 were left out") == 1
