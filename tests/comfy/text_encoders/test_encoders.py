"""Text encoders against the recorded ones: states, pooled states, weights, clip skip."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from comfy.ldm.clip.text import ClipTextConfig, CLIPTextModel
from comfy.ops import manual_cast
from comfy.text_encoders.sd1 import SD1ClipModel, SD1Tokenizer
from comfy.text_encoders.sd2 import SD2ClipModel, SD2Tokenizer
from comfy.text_encoders.sdxl import SDXLClipModel, SDXLRefinerClipModel, SDXLTokenizer
from comfy.text_encoders.token_embedding import SpecialTokens, embed_tokens
from tests.support.golden_nets import assert_close_to_golden, read_golden_net


@pytest.mark.parametrize("name", ["clip_text_quick_gelu", "clip_text_gelu"])
@torch.inference_mode()
def test_text_tower_agrees_with_the_reference(name: str, golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / f"text_encoders/{name}.safetensors")
    model = CLIPTextModel(net.constructor, dtype=torch.float32)
    model.load_state_dict(net.weights)
    last, _, projected, pooled = model(net.inputs["ids"])
    _, between, _, _ = model(
        net.inputs["ids"], intermediate_output=-2, final_layer_norm_intermediate=False
    )
    assert_close_to_golden(last, net.outputs["last"])
    assert_close_to_golden(between, net.outputs["penultimate_no_ln"])
    assert_close_to_golden(pooled, net.outputs["pooled"])
    assert_close_to_golden(projected, net.outputs["projected_pooled"])


@pytest.mark.parametrize(
    ("name", "encoder", "tokenizer"),
    [
        ("sd1_clip_l", SD1ClipModel, SD1Tokenizer),
        ("sd2_clip_h", SD2ClipModel, SD2Tokenizer),
        ("sdxl_clip_l_g", SDXLClipModel, SDXLTokenizer),
        ("sdxl_refiner_g", SDXLRefinerClipModel, SDXLTokenizer),
    ],
)
@torch.inference_mode()
def test_conditioning_agrees_with_the_reference(
    name, encoder, tokenizer, golden_folder: Path, tmp_path: Path
) -> None:
    net = read_golden_net(golden_folder / f"text_encoders/{name}.safetensors")
    save_file({"emb_params": net.inputs["embedding_tiny32"]}, tmp_path / "tiny32.safetensors")
    model = encoder(dtype=torch.float32, model_options=net.constructor)
    model.load_state_dict(net.weights)
    words = tokenizer(embedding_directory=str(tmp_path))
    prompts = json.loads(re.search(r"\{.*\}", net.note)[0])["prompts"]
    skips = sorted({key.split("/")[0].removeprefix("skip") for key in net.outputs})
    assert "None" in skips
    for skip in skips:
        model.reset_clip_options()
        if skip != "None":
            model.set_clip_options({"layer": int(skip)})
        for number, text in enumerate(prompts):
            cond, pooled = model.encode_token_weights(words.tokenize_with_weights(text))
            expected = f"skip{skip}/prompt{number}"
            assert_close_to_golden(cond, net.outputs[f"{expected}/cond"])
            assert_close_to_golden(pooled, net.outputs[f"{expected}/pooled_output"])


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"32.*5"):
        ClipTextConfig(hidden_size=32, num_attention_heads=5)


def test_more_tokens_than_positions_are_refused_with_both_numbers() -> None:
    config = {"hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 9}
    model = CLIPTextModel(config, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"78.*77"):
        model(torch.zeros(1, 78, dtype=torch.long))


def test_a_vocabulary_of_another_model_is_told() -> None:
    table = manual_cast.Embedding(9, 4, dtype=torch.float32)
    cpu, none = torch.device("cpu"), SpecialTokens(None, None)
    assert embed_tokens([[0, 8]], table, cpu, none).embeds.shape == (1, 2, 4)
    with pytest.raises(ValueError, match="has token 9, and this text encoder has 9: its vocab"):
        embed_tokens([[0, 9]], table, cpu, none)
