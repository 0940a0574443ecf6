"""GGUF files at the nodes: listed, loaded, sampled; packs that bring these nodes go first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import folder_paths
import nodes
from comfy import progress
from comfy.ldm.lumina.model import NextDiT
from comfy.text_encoders import qwen
from comfy_extras import nodes_gguf
from comfy_nodes.sampling import common_ksampler
from comfy_nodes.table import add_nodes
from tests.comfy.families.test_qwen import pieces, text_encoder
from tests.comfy.families.test_transformers import random_like
from tests.comfy.text_encoders.test_gguf_text import facts, of_llama_cpp
from tests.support import gguf_files

TEXT = 32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders with a small Z-Image and its text encoder, plain and quantised."""
    root = tmp_path_factory.mktemp("models")
    patch = pytest.MonkeyPatch()
    patch.setattr(progress, "PROGRESS_BAR_ENABLED", False)
    for name in ("diffusion_models", "text_encoders"):
        (root / name).mkdir()
    for name, folder, suffixes in (
        ("diffusion_models", "diffusion_models", folder_paths.supported_pt_extensions),
        ("unet_gguf", "diffusion_models", {".gguf"}),
        ("text_encoders", "text_encoders", folder_paths.supported_pt_extensions),
        ("clip_gguf", "text_encoders", {".gguf"}),
    ):
        entry = ([str(root / folder)], suffixes)
        patch.setitem(folder_paths.folder_names_and_paths, name, entry)
    network = NextDiT(
        dim=256, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=TEXT,
        axes_dims=(32, 48, 48), patch_size=2, in_channels=16, qk_norm=True, z_image_modulation=True,
    )  # fmt: skip
    weights = random_like(network, 4)
    text = text_encoder(qwen.QWEN3_4B, TEXT)
    save_file(weights, root / "diffusion_models" / "plain.safetensors")
    save_file(text, root / "text_encoders" / "text.safetensors")
    for kind in ("Q8_0", "Q4_K"):
        gguf_files.write(root / "diffusion_models" / f"{kind}.gguf", weights, kind)
    told = facts("qwen3")
    theirs = of_llama_cpp(text, "qwen3")
    gguf_files.write(root / "text_encoders" / "text_q8.gguf", theirs, "Q8_0", told)
    pieces(root / "text_encoders")
    yield root
    patch.undo()


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def sampled(model: Any, clip: Any) -> Tensor:
    cond = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
    latent = {"samples": torch.zeros(1, 16, 4, 4)}
    made = common_ksampler(model, 3, 2, 1.0, "euler", "simple", cond, cond, latent)
    return made[0]["samples"]


def unet(name: str) -> Any:
    return nodes.UNETLoader().load_unet(name, "default")[0]


def clip_of(name: str) -> Any:
    return nodes.CLIPLoader().load_clip(name, "lumina2")[0]


def test_the_usual_loaders_list_quantised_files_beside_others(models: Path) -> None:
    del models
    listed = nodes.UNETLoader.INPUT_TYPES()["required"]["unet_name"][0]
    assert listed == ["Q4_K.gguf", "Q8_0.gguf", "plain.safetensors"]
    assert "text_q8.gguf" in nodes.CLIPLoader.INPUT_TYPES()["required"]["clip_name"][0]
    assert "text_q8.gguf" in nodes.DualCLIPLoader.INPUT_TYPES()["required"]["clip_name2"][0]


def test_quantised_models_give_nearly_the_latent_of_the_plain_one(models: Path) -> None:
    del models
    clip = clip_of("text.safetensors")
    plain = unet("plain.safetensors")
    wanted = sampled(plain, clip)
    lost = {}
    for kind, share in (("Q8_0", 0.30), ("Q4_K", 0.20)):
        model = unet(f"{kind}.gguf")
        assert model.model_size() < share * plain.model_size()
        lost[kind] = float((sampled(model, clip) - wanted).norm() / wanted.norm())
    assert 0 < lost["Q8_0"] < 0.02
    assert lost["Q8_0"] < lost["Q4_K"] < 0.3
    small = clip_of("text_q8.gguf")
    assert (sampled(plain, small) - wanted).norm() < 0.1 * wanted.norm()


def test_nodes_of_published_workflows_load_the_same(models: Path) -> None:
    del models
    schema = nodes_gguf.UnetLoaderGGUF.INPUT_TYPES()["required"]["unet_name"]
    assert schema[1]["options"] == ["Q4_K.gguf", "Q8_0.gguf"]
    model = nodes_gguf.UnetLoaderGGUF.execute("Q8_0.gguf").result[0]
    other = nodes_gguf.UnetLoaderGGUFAdvanced.execute("Q8_0.gguf").result[0]
    clip = nodes_gguf.CLIPLoaderGGUF.execute("text_q8.gguf", "lumina2").result[0]
    wanted = sampled(unet("Q8_0.gguf"), clip_of("text_q8.gguf"))
    assert torch.equal(sampled(model, clip), wanted)
    assert torch.equal(sampled(other, clip), wanted)


def test_a_choice_without_effect_is_said(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    del models
    load = nodes_gguf.UnetLoaderGGUFAdvanced.execute
    load("Q8_0.gguf", dequant_dtype="float32", patch_on_device=True)
    assert "dequant_dtype float32" in caplog.text
    assert "patch_on_device" in caplog.text


@pytest.mark.parametrize("name", ["UnetLoaderGGUF", "CLIPLoaderGGUF", "DualCLIPLoaderGGUF"])
def test_a_pack_that_brings_these_nodes_goes_first(name: str) -> None:
    asyncio.run(nodes.init_builtin_extra_nodes())
    ours = nodes.NODE_CLASS_MAPPINGS[name]
    assert ours is getattr(nodes_gguf, name)

    class Theirs:
        """Of a pack."""

    add_nodes({name: Theirs}, {})
    try:
        assert nodes.NODE_CLASS_MAPPINGS[name] is Theirs
    finally:
        nodes.NODE_CLASS_MAPPINGS[name] = ours


def test_a_name_that_no_folder_has_is_an_error_that_names_it(models: Path) -> None:
    del models
    with pytest.raises(FileNotFoundError, match=r"gone\.gguf"):
        nodes_gguf.UnetLoaderGGUF.execute("gone.gguf")
