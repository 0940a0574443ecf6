"""What the words about a file in the wrong place say it is."""

from __future__ import annotations

import pytest

from comfy.weights.contents import contents_in_words, likely_kind


@pytest.mark.parametrize(
    ("keys", "folder"),
    [
        (["lora_unet_down_blocks_0_attentions_0.lora_down.weight"], "loras"),
        (["diffusion_model.double_blocks.0.img_attn.proj.lora_A.weight"], "loras"),
        (["lora_te_text_model_encoder_layers_0_mlp_fc1.hada_w1_a"], "loras"),
        (["control_model.input_blocks.0.0.weight"], "controlnet"),
        (["controlnet_cond_embedding.conv_in.weight", "down_blocks.0.x"], "controlnet"),
        (
            ["model.diffusion_model.input_blocks.0.0.weight", "first_stage_model.encoder.a"],
            "checkpoints",
        ),
        (["model.diffusion_model.input_blocks.0.0.weight"], "diffusion_models"),
        (["double_blocks.0.img_attn.qkv.weight"], "diffusion_models"),
        (["text_model.encoder.layers.0.mlp.fc1.weight"], "text_encoders"),
        (["encoder.block.0.layer.0.SelfAttention.q.weight"], "text_encoders"),
        (["vision_model.encoder.layers.0.mlp.fc1.weight"], "clip_vision"),
        (["decoder.conv_in.weight", "encoder.conv_in.weight"], "vae"),
        (["emb_params"], "embeddings"),
        (["model.0.weight", "model.1.sub.0.RDB1.conv1.0.weight"], "upscale_models"),
        (["position_net.linears.0.weight"], "gligen"),
    ],
)
def test_a_file_in_the_wrong_folder_is_told_where_it_belongs(keys: list[str], folder: str) -> None:
    found = likely_kind(keys)
    assert found is not None
    assert found[1] == folder
    assert f"which belongs in models/{folder}" in contents_in_words(keys)


def test_nothing_is_guessed_about_unknown_keys() -> None:
    assert likely_kind(["foo.weight", "bar"]) is None
    assert contents_in_words(["foo.weight", "bar"]) == "2 keys (foo.weight, bar)"
    assert contents_in_words([]) == "no keys"
