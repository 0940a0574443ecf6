"""ControlNets of Qwen-Image and Z-Image: from files in their published layout to latents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import folder_paths
from comfy import loading, text_loading
from comfy.ldm.lumina.controlnet import ZImage_Control, z_image_convert
from comfy.ldm.qwen_image.controlnet import BlockWiseControlBlock, QwenImageBlockWiseControlNet
from comfy.ops import manual_cast
from comfy.vae.vae import VAE
from comfy_extras.nodes_model_patch import (
    ModelPatchLoader,
    QwenImageDiffsynthControlnet,
    ZImageFunControlnet,
)
from tests.comfy.families.test_qwen import FILES, sampled
from tests.comfy.families.test_transformers import random_like

PICTURE = torch.rand(1, 64, 48, 3, generator=torch.Generator().manual_seed(3))
SIZES: dict[str, Any] = {
    "dim": 64, "n_heads": 2, "n_kv_heads": 2, "inner": 176, "n_control_layers": 2, "width": 64,
}  # fmt: skip
GENERATIONS: dict[str, dict[str, Any]] = {
    "first": {},
    "second": {"additional_in_dim": 17, "refiner_control": True},
    "second, early": {"additional_in_dim": 17, "refiner_control": True, "broken": True},
}


class Parts:
    """A model with its text encoder and autoencoder."""

    def __init__(self, folder: Path, family: str) -> None:
        paths = FILES[family](folder)
        self.model: Any = loading.load_diffusion_model(paths["model"])
        kind = text_loading.CLIPType.QWEN_IMAGE
        self.clip = text_loading.load_clip([paths["clip"]], clip_type=kind)
        self.vae = VAE(sd=load_file(paths["vae"]))

    def run(self, model: Any = None) -> Tensor:
        return sampled(self.model if model is None else model, self.clip)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    entry = ([str(tmp_path)], {".safetensors"})
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "model_patches", entry)
    return tmp_path


def loaded(folder: Path, weights: dict[str, Tensor]) -> Any:
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / "c.safetensors")
    return ModelPatchLoader().load_model_patch("c.safetensors")[0]


def qwen_control(channels: int = 16) -> dict[str, Tensor]:
    return random_like(QwenImageBlockWiseControlNet(2, channels, 32), 8)


def z_image_control(generation: str) -> dict[str, Tensor]:
    """Weights under their published names."""
    network = ZImage_Control(**SIZES, **GENERATIONS[generation])
    made = {}
    for key, value in random_like(network, 9).items():
        name = key.replace("attention.out.", "attention.to_out.0.")
        name = name.replace("q_norm", "norm_q").replace("k_norm", "norm_k")
        if "attention.qkv" in name:
            for letter, part in zip("qkv", value.chunk(3)):
                made[name.replace("qkv", f"to_{letter}")] = part
        else:
            made[name] = value
    if generation == "second, early":
        for number in range(2):
            made[f"control_noise_refiner.{number}.after_proj.weight"].zero_()
    return made


def differ(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() > 1e-4)


@torch.inference_mode()
def test_a_control_block_follows_its_publication() -> None:
    block = BlockWiseControlBlock(8, manual_cast)
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    x, y = torch.randn(2, 1, 3, 8, generator=torch.Generator().manual_seed(1))
    weights = block.state_dict()
    parts = [
        part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}_rms.weight"]
        for part, name in ((x, "x"), (y, "y"))
    ]
    hidden = (parts[0] + parts[1]) @ weights["input_proj.weight"].T + weights["input_proj.bias"]
    wanted = functional.gelu(hidden) @ weights["output_proj.weight"].T
    torch.testing.assert_close(block(x, y), wanted + weights["output_proj.bias"])


@torch.inference_mode()
def test_a_picture_controls_qwen_image(folder: Path) -> None:
    parts, node = Parts(folder, "QwenImage"), QwenImageDiffsynthControlnet()
    patch = loaded(folder, qwen_control())

    def controlled(image: Tensor, strength: float = 1.0) -> Tensor:
        view = node.diffsynth_controlnet(parts.model, patch, parts.vae, image, strength)[0]
        return parts.run(view)

    plain = parts.run()
    assert torch.equal(controlled(PICTURE, 0.0), plain)
    made = controlled(PICTURE)
    assert differ(made, plain)
    assert differ(controlled(1.0 - PICTURE), made)
    assert differ(controlled(PICTURE, 0.5), made)
    assert torch.equal(controlled(torch.cat([PICTURE, PICTURE[..., :1]], dim=-1)), made)
    larger = functional.interpolate(PICTURE.movedim(-1, 1), scale_factor=2.0).movedim(1, -1)
    torch.testing.assert_close(controlled(larger), made, rtol=1e-3, atol=1e-3)
    assert torch.equal(parts.run(), plain)


@torch.inference_mode()
def test_qwen_images_control_by_mask_is_told_what_is_known(folder: Path) -> None:
    parts, node = Parts(folder, "QwenImage"), QwenImageDiffsynthControlnet()
    patch = loaded(folder, qwen_control(17))

    def controlled(mask: Tensor | None) -> Tensor:
        view = node.diffsynth_controlnet(parts.model, patch, parts.vae, PICTURE, mask=mask)[0]
        return parts.run(view)

    everything_known = controlled(None)
    assert torch.equal(controlled(torch.zeros(1, 64, 48)), everything_known)
    assert torch.equal(controlled(torch.zeros(64, 48)), everything_known)
    assert differ(controlled(torch.ones(1, 30, 20)), everything_known)


@pytest.mark.parametrize("generation", GENERATIONS)
@torch.inference_mode()
def test_a_picture_controls_z_image(generation: str, folder: Path) -> None:
    parts = Parts(folder, "ZImage")
    patch = loaded(folder, z_image_control(generation))
    facts = (patch.model.refiners_add, patch.model.refines_with_layers)
    assert facts == (generation != "first", generation == "second, early")

    def controlled(image: Tensor | None, strength: float = 1.0, **more: Any) -> Tensor:
        node = ZImageFunControlnet()
        view = node.diffsynth_controlnet(
            parts.model, patch, parts.vae, image=image, strength=strength, **more
        )[0]
        return parts.run(view)

    plain = parts.run()
    assert torch.equal(controlled(PICTURE, 0.0), plain)
    made = controlled(PICTURE)
    assert differ(made, plain)
    assert differ(controlled(1.0 - PICTURE), made)
    assert torch.equal(controlled(PICTURE), made)
    view = QwenImageDiffsynthControlnet().diffsynth_controlnet(
        parts.model, patch, parts.vae, PICTURE
    )
    assert torch.equal(parts.run(view[0]), made)
    filled = controlled(PICTURE, inpaint_image=1.0 - PICTURE, mask=torch.ones(1, 64, 48))
    if generation == "first":
        assert torch.equal(filled, made)  # it has no place for them
        return
    # Where all is to be made, the picture to fill in is not seen.
    torch.testing.assert_close(filled, made)
    known = controlled(PICTURE, inpaint_image=1.0 - PICTURE, mask=torch.zeros(1, 64, 48))
    assert differ(known, made)
    assert differ(controlled(None, inpaint_image=1.0 - PICTURE), made)
    assert torch.equal(parts.run(), plain)


@torch.inference_mode()
def test_what_is_added_to_z_image_comes_from_the_layers_projections(folder: Path) -> None:
    parts = Parts(folder, "ZImage")
    weights = z_image_control("first")
    for key, value in weights.items():
        if "after_proj" in key:
            value.zero_()
    view = ZImageFunControlnet().diffsynth_controlnet(
        parts.model, loaded(folder, weights), parts.vae, PICTURE
    )[0]
    assert torch.equal(parts.run(view), parts.run())


def test_published_names_become_ours() -> None:
    own = ZImage_Control(**SIZES).state_dict()
    made = z_image_convert(z_image_control("first"))
    assert {key: value.shape for key, value in made.items()} == {
        key: value.shape for key, value in own.items()
    }
    assert z_image_convert(made).keys() == made.keys()


def test_parts_of_different_families_are_refused_with_both_names(folder: Path) -> None:
    qwen, z_image = Parts(folder, "QwenImage"), Parts(folder, "ZImage")
    node = QwenImageDiffsynthControlnet()
    patch = loaded(folder, qwen_control())
    with pytest.raises(ValueError, match=r"for Qwen-Image, but the model is a NextDiT"):
        node.diffsynth_controlnet(z_image.model, patch, qwen.vae, PICTURE)
    with pytest.raises(ValueError, match=r"16 latent channels of 2 dimensions.*16 of 3"):
        node.diffsynth_controlnet(qwen.model, patch, z_image.vae, PICTURE)
    with pytest.raises(ValueError, match="no picture to control by"):
        ZImageFunControlnet().diffsynth_controlnet(qwen.model, patch, qwen.vae)
    patch.model = nn.Identity()
    with pytest.raises(ValueError, match="Identity, which does not control"):
        node.diffsynth_controlnet(qwen.model, patch, qwen.vae, PICTURE)
