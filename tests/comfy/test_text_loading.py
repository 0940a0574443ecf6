"""Text encoders in files of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from comfy import loading, text_loading
from comfy.families import openclip
from comfy.ldm.t5.model import T5
from tests.comfy.text_encoders.test_sentencepiece_file import piece_file
from tests.support import tiny_checkpoint


def encoder() -> dict[str, torch.Tensor]:
    prefix = "cond_stage_model.transformer."
    tensors = tiny_checkpoint.weights()
    return {key[len(prefix) :]: tensors[key] for key in tensors if key.startswith(prefix)}


def write(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    save_file(tensors, path, tiny_checkpoint.HEADER)
    return str(path)


def encode(clip: object) -> torch.Tensor:
    return clip.encode_from_tokens(clip.tokenize("a red circle"))  # type: ignore[attr-defined]


def test_a_file_gives_the_same_text_as_the_checkpoint_it_was_taken_from(tmp_path: Path) -> None:
    alone = text_loading.load_clip([write(tmp_path / "clip.safetensors", encoder())])
    whole = tiny_checkpoint.write(tmp_path / "whole.safetensors")
    together = loading.load_checkpoint_guess_config(str(whole)).clip
    assert torch.equal(encode(alone), encode(together))


def test_the_layout_of_openclip_is_understood(tmp_path: Path) -> None:
    plain = text_loading.load_clip([write(tmp_path / "plain.safetensors", encoder())])
    other = openclip.from_clip(encoder(), "", "")
    assert "transformer.resblocks.0.attn.in_proj_weight" in other
    converted = text_loading.load_clip([write(tmp_path / "open.safetensors", other)])
    assert torch.equal(encode(plain), encode(converted))


def test_converting_to_openclip_and_back_changes_nothing() -> None:
    original = {**encoder(), "text_projection.weight": torch.randn(32, 32)}
    there = openclip.from_clip(original, "", "")
    back = openclip.to_clip(there, "", "")
    assert back.keys() == original.keys()
    assert all(torch.equal(back[key], original[key]) for key in original)


def test_a_file_without_a_text_encoder_is_described(tmp_path: Path) -> None:
    path = write(tmp_path / "vae.safetensors", {"decoder.conv_in.weight": torch.zeros(1)})
    with pytest.raises(loading.UnknownArchitectureError, match=r"vae\.safetensors.*decoder"):
        text_loading.load_clip([path])


def test_a_pair_that_no_family_uses_is_refused_with_what_is_known(tmp_path: Path) -> None:
    path = write(tmp_path / "clip.safetensors", encoder())
    with pytest.raises(ValueError, match=r"clip_l, clip_l.*known"):
        text_loading.load_clip([path, path])


def t5(width: int, gated: bool) -> dict[str, torch.Tensor]:
    options = {
        "d_model": width, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": 2, "vocab_size": 40,
        "is_gated_act": gated, "dense_act_fn": "gelu_pytorch_tanh" if gated else "relu",
    }  # fmt: skip
    model = T5(options, torch.float32, "cpu")
    return {key: torch.randn_like(value) * 0.1 for key, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("width", "gated", "kind", "name", "length", "has_mask"),
    [
        (32, True, "pixart", "t5xxl", 5, False),
        (32, True, "chroma", "t5xxl", 5, False),
        (32, True, "ltxv", "t5xxl", 128, True),
        (32, True, "mochi", "t5xxl", 256, True),
        (32, True, "stable_diffusion", "t5xxl", 256, True),
        (1024, False, "cosmos", "t5xxl", 512, True),
        (768, False, "stable_audio", "t5base", 128, False),
    ],
)
@torch.inference_mode()
def test_a_t5_alone_is_arranged_for_its_type(
    width: int, gated: bool, kind: str, name: str, length: int, has_mask: bool, tmp_path: Path
) -> None:
    save_file(t5(width, gated), tmp_path / "t5.safetensors")
    (tmp_path / "t5_spiece.model").write_bytes(piece_file())
    path = str(tmp_path / "t5.safetensors")
    clip = text_loading.load_clip([path], clip_type=text_loading.clip_type(kind))
    tokens = clip.tokenize("a red (cats:1.2)")
    assert [len(chunk) for chunk in tokens[name]] == [length]
    told = clip.encode_from_tokens(tokens, return_dict=True)
    assert told["cond"].shape == (1, length, width)
    assert told["cond"].isfinite().all()
    assert (told.get("attention_mask") is not None) == has_mask


def test_a_t5_for_a_type_that_needs_another_is_refused(tmp_path: Path) -> None:
    save_file(t5(32, True), tmp_path / "t5.safetensors")
    with pytest.raises(ValueError, match="t5xxl for type wan"):
        text_loading.load_clip(
            [str(tmp_path / "t5.safetensors")], clip_type=text_loading.clip_type("wan")
        )


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'sd9'.*stable_diffusion"):
        text_loading.clip_type("sd9")
