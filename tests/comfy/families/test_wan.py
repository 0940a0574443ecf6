"""Wan from file to video: small networks load, sample, and are saved again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from comfy import loading, text_loading
from comfy.ldm.t5.model import T5
from comfy.ldm.wan.model import VaceWanModel, WanModel
from comfy.ldm.wan.vae import WanVAE
from comfy.ops import manual_cast
from comfy.saving import save_checkpoint
from comfy.text_encoders import t5_pieces
from comfy.vae.vae import VAE
from comfy_extras.nodes_wan import WanImageToVideo, WanPhantomSubjectToVideo, WanVaceToVideo
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families.test_transformers import random_like
from tests.comfy.text_encoders.test_sentencepiece_file import piece_file

SIZES: dict[str, Any] = {
    "in_dim": 16, "out_dim": 16, "dim": 32, "ffn_dim": 32, "num_heads": 2, "num_layers": 2,
    "text_dim": 24, "freq_dim": 32,
}  # fmt: skip
HEADS = {"unet_config": '{"num_heads": 2}'}


def wan_network(kind: str = "t2v", **options: Any) -> dict[str, Tensor]:
    model = VaceWanModel if kind == "vace" else WanModel
    network = model(model_type=kind, **{**SIZES, **options})
    return {key: value * 0.5 for key, value in random_like(network, 4).items()}


def wan_autoencoder() -> dict[str, Tensor]:
    return random_like(WanVAE(dim=8, num_res_blocks=1), 5)


def wan_text_encoder(with_pieces: bool = True) -> dict[str, Tensor]:
    sizes = {
        "d_model": 24, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2, "vocab_size": 40,
        "model_type": "umt5",
    }  # fmt: skip
    weights = random_like(T5(sizes, None, "cpu", manual_cast), 7)
    if with_pieces:
        weights["spiece_model"] = torch.tensor(list(piece_file()), dtype=torch.uint8)
    return weights


def wan_files(folder: Path, kind: str = "t2v", **options: Any) -> dict[str, str]:
    parts = {
        "model": wan_network(kind, **options),
        "vae": wan_autoencoder(),
        "clip": wan_text_encoder(),
    }
    paths = {}
    for name, weights in parts.items():
        paths[name] = str(folder / f"{name}.safetensors")
        save_file({k: v.contiguous() for k, v in weights.items()}, paths[name], metadata=HEADS)
    return paths


def load(paths: dict[str, str]) -> tuple[Any, Any, Any]:
    wan = text_loading.CLIPType.WAN
    return (
        loading.load_diffusion_model(paths["model"]),
        text_loading.load_clip([paths["clip"]], clip_type=wan),
        VAE(sd=load_file(paths["vae"])),
    )


def texts(clip: Any) -> tuple[Any, Any]:
    return tuple(clip.encode_from_tokens_scheduled(clip.tokenize(text)) for text in ("red cat", ""))


def with_area(conditioning: Any, area: tuple[int, ...]) -> Any:
    return [[cond, {**options, "area": area}] for cond, options in conditioning]


def sampled(model: Any, positive: Any, negative: Any, latent: Tensor) -> Tensor:
    out = common_ksampler(
        model, 7, 2, 3.0, "euler", "simple", positive, negative, {"samples": latent}
    )
    samples: Tensor = out[0]["samples"]
    return samples


@torch.inference_mode()
def test_text_becomes_a_video(tmp_path: Path) -> None:
    model, clip, vae = load(wan_files(tmp_path))
    assert type(model.model.model_config).__name__ == "WAN21_T2V"
    positive, negative = texts(clip)
    assert positive[0][0].shape == (1, 512, 24)
    assert positive[0][0][0, 10:].abs().max() == 0  # padding is nothing
    latent = sampled(model, positive, negative, torch.zeros(1, 16, 3, 4, 6))
    assert latent.shape == (1, 16, 3, 4, 6)
    video = vae.decode(latent)
    assert video.shape == (1, 9, 32, 48, 3)
    assert video.isfinite().all()
    assert torch.equal(sampled(model, positive, negative, torch.zeros_like(latent)), latent)
    assert not torch.equal(sampled(model, negative, positive, torch.zeros_like(latent)), latent)


@torch.inference_mode()
def test_a_picture_is_the_first_frame(tmp_path: Path) -> None:
    model, clip, vae = load(wan_files(tmp_path, "i2v", in_dim=36, image_dim=20))
    assert type(model.model.model_config).__name__ == "WAN21_I2V"
    positive, negative = texts(clip)
    picture = torch.rand(1, 32, 48, 3, generator=torch.Generator().manual_seed(1))

    def run(start: Tensor | None) -> Tensor:
        made = WanImageToVideo.execute(positive, negative, vae, 48, 32, 9, 1, start)
        return sampled(model, made[0], made[1], made[2]["samples"])

    assert run(picture).shape == (1, 16, 3, 4, 6)
    assert not torch.allclose(run(picture), run(1 - picture))
    assert run(None).isfinite().all()


@torch.inference_mode()
def test_a_control_video_acts_by_its_strength(tmp_path: Path) -> None:
    paths = wan_files(tmp_path, "vace", vace_layers=1, vace_in_dim=96)
    model, clip, vae = load(paths)
    positive, negative = texts(clip)
    video = torch.rand(9, 32, 48, 3, generator=torch.Generator().manual_seed(1))

    def run(strength: float, control: Tensor) -> Tensor:
        made = WanVaceToVideo.execute(positive, negative, vae, 48, 32, 9, 1, strength, control)
        return sampled(model, made[0], made[1], made[2]["samples"])

    assert not torch.allclose(run(1.0, video), run(1.0, 1 - video))
    assert torch.equal(run(0.0, video), run(0.0, 1 - video))

    def within(area: tuple[int, ...]) -> Tensor:
        made = WanVaceToVideo.execute(positive, negative, vae, 48, 32, 9, 1, 1.0, video)
        return sampled(model, [*made[0], *with_area(made[0], area)], made[1], made[2]["samples"])

    assert torch.allclose(within((3, 4, 6, 0, 0, 0)), run(1.0, video), rtol=1e-4, atol=1e-4)
    assert within((2, 2, 4, 1, 2, 1)).isfinite().all()


@pytest.mark.parametrize(
    ("kind", "size", "found"),
    [
        ("i2v", (48, 32), "36 channels and 4 x 6 cells.*16 channels and 4 x 6 cells"),
        ("t2v", (64, 32), "16 channels and 4 x 6 cells.*16 channels and 4 x 8 cells"),
        ("t2v", (48, 32), None),
    ],
)
@torch.inference_mode()
def test_frames_behind_a_video_must_be_like_its_own(
    kind: str, size: tuple[int, int], found: str | None, tmp_path: Path
) -> None:
    paths = wan_files(tmp_path, kind, in_dim=36 if kind == "i2v" else 16)
    model, clip, vae = load(paths)
    positive, negative = texts(clip)
    picture = torch.rand(1, 32, 48, 3)
    made = WanPhantomSubjectToVideo.execute(positive, negative, vae, *size, 9, 1, picture)
    latent = torch.zeros(1, 16, 3, 4, 6)
    if found is None:
        assert sampled(model, made[0], made[1], latent).shape == latent.shape
        return
    with pytest.raises(ValueError, match=rf"time_dim_concat: .*{found}"):
        sampled(model, made[0], made[1], latent)


@torch.inference_mode()
def test_a_given_frame_of_the_5b_model_stays_as_it_is(tmp_path: Path) -> None:
    paths = wan_files(tmp_path, in_dim=48, out_dim=48)
    model, clip, _ = load(paths)
    assert type(model.model.model_config).__name__ == "WAN22_T2V"
    positive, negative = texts(clip)
    known = torch.randn(1, 48, 3, 2, 4, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(1, 1, 3, 2, 4)
    mask[:, :, 0] = 0
    latent = {"samples": known, "noise_mask": mask}
    out = common_ksampler(model, 7, 2, 3.0, "euler", "simple", positive, negative, latent)
    made = out[0]["samples"]
    torch.testing.assert_close(made[:, :, 0], known[:, :, 0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(made[:, :, 1:], known[:, :, 1:])
    latent = {"samples": known, "noise_mask": mask}
    positive = [*positive, *with_area(positive, (2, 2, 2, 0, 0, 2))]  # without the last moment
    (out,) = common_ksampler(model, 7, 2, 3.0, "euler", "simple", positive, negative, latent)
    torch.testing.assert_close(out["samples"][:, :, 0], known[:, :, 0], rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_a_checkpoint_of_all_parts_survives_saving_with_its_vocabulary(tmp_path: Path) -> None:
    model, clip, vae = load(wan_files(tmp_path))
    positive, negative = texts(clip)
    latent = sampled(model, positive, negative, torch.zeros(1, 16, 1, 4, 6))
    path = tmp_path / "all.safetensors"
    save_checkpoint(str(path), model, clip, vae, metadata=HEADS)
    saved = load_file(path)
    assert "text_encoders.spiece_model" in saved or "text_encoders.umt5xxl.spiece_model" in saved
    again = loading.load_checkpoint_guess_config(str(path))
    positive, negative = texts(again.clip)
    got = sampled(again.model, positive, negative, torch.zeros(1, 16, 1, 4, 6))
    assert torch.equal(got, latent)
    assert torch.equal(again.vae.decode(latent), vae.decode(latent))


def test_without_a_vocabulary_the_error_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(t5_pieces, "PACKAGE", "a_package_nobody_has")
    path = tmp_path / "umt5.safetensors"
    save_file(wan_text_encoder(with_pieces=False), path)
    with pytest.raises(FileNotFoundError, match=r"word pieces of UMT5.*umt5_spiece\.model"):
        text_loading.load_clip([str(path)], clip_type=text_loading.CLIPType.WAN)
    (tmp_path / "umt5_spiece.model").write_bytes(piece_file())
    clip = text_loading.load_clip([str(path)], clip_type=text_loading.CLIPType.WAN)
    assert clip.tokenize("red cat")["umt5xxl"][0][:2] == [(5, 1.0), (6, 1.0)]


def test_a_file_of_wan_with_a_hole_is_named_with_the_hole(tmp_path: Path) -> None:
    weights = wan_network()
    del weights["blocks.0.ffn.0.weight"]
    path = tmp_path / "wan.safetensors"
    save_file(weights, path)
    with pytest.raises(loading.BrokenCheckpointError, match=r"Wan.*blocks\.0\.ffn\.0\.weight"):
        loading.load_diffusion_model(str(path))
