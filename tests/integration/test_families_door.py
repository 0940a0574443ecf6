"""Transformer families at the public door: files in folders, a graph over HTTP, a picture back."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from comfy.ldm.hunyuan_video.model import HunyuanVideo
from tests.comfy.families import test_hunyuan_image as hunyuan
from tests.support.server_process import ServerProcess, running_server

LORA_KEY = "double_blocks.0.img_attn.qkv"
FOLDERS = {"model": "diffusion_models", "vae": "vae", "qwen": "text_encoders"}
FOLDERS["byt5"] = "text_encoders"


def place(root: Path, prefix: str, network: dict[str, Any], vae: Any) -> None:
    """The files of a small model of a family, each in the folder of its kind."""
    for folder in (*FOLDERS.values(), "loras", "written"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    paths = hunyuan.files(root / "written", network, vae)
    for name, path in paths.items():
        Path(path).rename(root / FOLDERS[name] / f"{prefix}_{name}.safetensors")
    vocabulary = root / "written" / "qwen_tokenizer.json"
    vocabulary.replace(root / "text_encoders" / vocabulary.name)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that finds small models of two families."""
    base = tmp_path_factory.mktemp("families")
    place(base / "more", "image", hunyuan.IMAGE, hunyuan.IMAGE_VAE)
    place(base / "more", "refiner", hunyuan.REFINER, hunyuan.VIDEO_VAE)
    rows, columns = HunyuanVideo(**hunyuan.IMAGE).state_dict()[f"{LORA_KEY}.weight"].shape
    lora = {
        f"diffusion_model.{LORA_KEY}.lora_up.weight": torch.ones(rows, 2),
        f"diffusion_model.{LORA_KEY}.lora_down.weight": torch.ones(2, columns),
    }
    save_file(lora, base / "more" / "loras" / "image_lora.safetensors")
    lines = ["more:", f"    base_path: {base / 'more'}"]
    lines += [f"    {name}: {name}" for name in sorted({*FOLDERS.values(), "loras"})]
    config = base / "more.yaml"
    config.write_text("\n".join(lines))
    with running_server(
        base / "server", "--cpu", "--extra-model-paths-config", str(config)
    ) as running:
        yield running


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def image_prompt(text: str = 'a "cat"', lora: float = 0.0, kind: str = "hunyuan_image") -> Any:
    clips = {"clip_name1": "image_qwen.safetensors", "clip_name2": "image_byt5.safetensors"}
    return {
        "1": node("UNETLoader", unet_name="image_model.safetensors", weight_dtype="default"),
        "2": node("DualCLIPLoader", **clips, type=kind),
        "3": node("VAELoader", vae_name="image_vae.safetensors"),
        "4": node("CLIPTextEncode", clip=["2", 0], text=text),
        "5": node("EmptyHunyuanImageLatent", width=96, height=64, batch_size=1),
        "6": node(
            "LoraLoaderModelOnly", model=["1", 0], lora_name="image_lora.safetensors",
            strength_model=lora,
        ),
        "7": node(
            "KSampler", model=["6", 0], seed=3, steps=2, cfg=1.0, sampler_name="euler",
            scheduler="simple", positive=["4", 0], negative=["4", 0], latent_image=["5", 0],
            denoise=1.0,
        ),
        "8": node("VAEDecode", samples=["7", 0], vae=["3", 0]),
        "9": node("SaveImage", images=["8", 0], filename_prefix="hunyuan"),
    }  # fmt: skip


def refined_prompt() -> dict[str, Any]:
    prompt = image_prompt()
    prompt |= {
        "11": node("UNETLoader", unet_name="refiner_model.safetensors", weight_dtype="default"),
        "12": node("VAELoader", vae_name="refiner_vae.safetensors"),
        "13": node("VAEEncode", pixels=["8", 0], vae=["12", 0]),
        "14": node(
            "HunyuanRefinerLatent", positive=["4", 0], negative=["4", 0], latent=["13", 0],
            noise_augmentation=0.1,
        ),
        "15": node(
            "KSampler", model=["11", 0], seed=3, steps=2, cfg=1.0, sampler_name="euler",
            scheduler="simple", positive=["14", 0], negative=["14", 1], latent_image=["14", 2],
            denoise=1.0,
        ),
        "16": node("VAEDecode", samples=["15", 0], vae=["12", 0]),
    }  # fmt: skip
    prompt["9"]["inputs"]["images"] = ["16", 0]
    return prompt


def made(server: ServerProcess, prompt: Any) -> Image.Image:
    entry = server.run(prompt)
    assert entry["status"]["status_str"] == "success", entry["status"]
    return Image.open(io.BytesIO(server.picture(entry, "9")))


def test_text_becomes_a_picture_that_text_and_lora_change(families: ServerProcess) -> None:
    plain = made(families, image_prompt())
    assert plain.size == (96, 64)
    assert made(families, image_prompt('a "dog"')).tobytes() != plain.tobytes()
    assert made(families, image_prompt(lora=1.0)).tobytes() != plain.tobytes()
    assert made(families, image_prompt()).tobytes() == plain.tobytes()


def test_the_picture_is_refined_by_the_other_model(families: ServerProcess) -> None:
    refined = made(families, refined_prompt())
    assert refined.size == (96, 64)
    assert refined.tobytes() != made(families, image_prompt()).tobytes()


def test_a_wrong_type_is_refused_with_what_goes_together(families: ServerProcess) -> None:
    entry = families.run(image_prompt(kind="flux"))
    kind, error = entry["status"]["messages"][-1]
    assert kind == "execution_error"
    assert error["node_id"] == "2"
    assert "byt5_small with qwen25_7b for type hunyuan_image" in error["exception_message"]
