"""Families that are shown a picture, from file to latent: small checkpoints of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import folder_paths
from comfy import clip_vision, loading
from comfy.ldm.autoencoder.kl import AutoencoderKL
from comfy.ldm.autoencoder.layers import AutoencoderConfig
from comfy.ldm.autoencoder.temporal import TemporalAutoencoder
from comfy.ldm.unet.model import UNetModel
from comfy_extras.nodes_sdupscale import SD_4XUpscale_Conditioning
from comfy_extras.nodes_stable3d import StableZero123_Conditioning
from comfy_extras.nodes_video_model import (
    ImageOnlyCheckpointLoader,
    ImageOnlyCheckpointSave,
    SVD_img2vid_Conditioning,
)
from comfy_nodes.sampling import common_ksampler
from comfy_nodes.special_loaders import unCLIPCheckpointLoader
from comfy_nodes.vision import unCLIPConditioning

PREFIX = "model.diffusion_model."
CONTEXT = 64  # channels of the small image encoder's embedding, and of the context
UNET: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "context_dim": CONTEXT,
    "use_linear_in_transformer": True,
    "num_head_channels": 32,
}
VIDEO: dict[str, Any] = {
    "in_channels": 8,
    "num_classes": "sequential",
    "adm_in_channels": 768,
    "extra_ff_mix_layer": True,
    "use_spatial_context": True,
    "merge_strategy": "learned_with_images",
    "merge_factor": 0.0,
    "video_kernel_size": [3, 1, 1],
    "use_temporal_resblock": True,
    "use_temporal_attention": True,
}


def filled(module: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(value.shape, generator=generator) * 0.05
        if value.ndim != 1 or not key.endswith("weight")
        else torch.ones(value.shape)
        for key, value in module.state_dict().items()
        if value.is_floating_point()
    }


def unet(**changes: Any) -> dict[str, Tensor]:
    return {PREFIX + k: v for k, v in filled(UNetModel(**{**UNET, **changes}), 1).items()}


def vision(prefix: str) -> dict[str, Tensor]:
    """A small image encoder in the layout of OpenCLIP."""
    width = 64
    shapes: dict[str, tuple[int, ...]] = {
        "class_embedding": (width,),
        "positional_embedding": (5, width),
        "conv1.weight": (width, 3, 112, 112),
        "proj": (width, CONTEXT),
    }
    blocks = [f"transformer.resblocks.{number}." for number in (0, 1)]
    norms = ["ln_pre", "ln_post", *[f"{block}ln_{n}" for block in blocks for n in (1, 2)]]
    for norm in norms:
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (width,)
    layers = {
        "attn.in_proj_": (3 * width, width),
        "attn.out_proj.": (width, width),
        "mlp.c_fc.": (2 * width, width),
        "mlp.c_proj.": (width, 2 * width),
    }
    for block in blocks:
        for layer, (rows, columns) in layers.items():
            shapes[f"{block}{layer}weight"] = (rows, columns)
            shapes[f"{block}{layer}bias"] = (rows,)
    generator = torch.Generator().manual_seed(2)
    return {
        prefix + key: torch.randn(shape, generator=generator) * 0.1 for key, shape in shapes.items()
    }


def autoencoder(kind: Any = AutoencoderKL, levels: int = 4) -> dict[str, Tensor]:
    sizes = AutoencoderConfig(ch=32, ch_mult=(1,) * levels, num_res_blocks=1, z_channels=4)
    network = kind(sizes) if kind is TemporalAutoencoder else kind(sizes, 4)
    return {f"first_stage_model.{k}": v for k, v in filled(network, 3).items()}


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of checkpoints of this test."""
    entry = ([str(tmp_path)], {".safetensors"})
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "checkpoints", entry)
    return tmp_path


def write(folder: Path, *parts: dict[str, Tensor]) -> str:
    merged = {key: value.contiguous() for part in parts for key, value in part.items()}
    save_file(merged, folder / "model.safetensors", {"unet_config": '{"num_head_channels": 32}'})
    return "model.safetensors"


def sampled(model: Any, positive: Any, negative: Any, latent: Any) -> Tensor:
    out = common_ksampler(model, 5, 2, 2.0, "euler", "normal", positive, negative, latent)
    return out[0]["samples"]


SVD_VISION = "conditioner.embedders.0.open_clip.model.visual."


def test_a_video_goes_on_from_a_picture_and_the_checkpoint_survives_saving(
    checkpoints: Path,
) -> None:
    name = write(checkpoints, unet(**VIDEO), vision(SVD_VISION), autoencoder(TemporalAutoencoder))
    model, encoder, vae = ImageOnlyCheckpointLoader().load_checkpoint(name)
    assert type(model.model.model_config).__name__ == "SVD_img2vid"
    picture = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(4))
    encode = SVD_img2vid_Conditioning().encode
    made = encode(encoder, picture, vae, 64, 64, 3, 127, 6, 0.0)
    frames = sampled(model, *made)
    assert frames.shape == (3, 4, 8, 8)
    assert frames.isfinite().all()
    assert vae.decode(frames).shape == (3, 64, 64, 3)
    other = encode(encoder, picture.flip(1), vae, 64, 64, 3, 127, 6, 0.0)
    assert not torch.equal(sampled(model, *other), frames)

    saver = ImageOnlyCheckpointSave()
    saver.output_dir = str(checkpoints)
    saver.save(model, encoder, vae, "again")
    again = next(p.name for p in checkpoints.iterdir() if p.name.startswith("again"))
    second, second_encoder, second_vae = ImageOnlyCheckpointLoader().load_checkpoint(again)
    repeated = encode(second_encoder, picture, second_vae, 64, 64, 3, 127, 6, 0.0)
    assert torch.equal(sampled(second, *repeated), frames)


def test_unclip_takes_pictures_beside_the_text(checkpoints: Path) -> None:
    changes = {"num_classes": "sequential", "adm_in_channels": 1536}
    name = write(checkpoints, unet(**changes), vision("embedder.model.visual."), autoencoder())
    found = unCLIPCheckpointLoader().load_checkpoint(name, output_clip=False)
    model, clip, _, encoder = found
    assert clip is None
    assert type(model.model.model_config).__name__ == "SD21UnclipL"
    assert isinstance(encoder, clip_vision.ClipVisionModel)
    text = [[torch.rand(1, 3, CONTEXT), {}]]
    latent = {"samples": torch.zeros(1, 4, 8, 8)}
    plain = sampled(model, text, text, latent)
    picture = clip_vision.Output()
    picture.image_embeds = torch.rand(1, 768)
    for strength, noise in ((1.0, 0.0), (1.0, 0.5), (0.3, 0.0)):
        shown = unCLIPConditioning().apply_adm(text, picture, strength, noise)[0]
        made = sampled(model, shown, text, latent)
        assert not torch.equal(made, plain)
        assert torch.equal(made, sampled(model, shown, text, latent))


def test_the_upscaler_loads_and_follows_the_small_picture(checkpoints: Path) -> None:
    changes = {
        "in_channels": 7,
        "num_classes": 1000,
        "num_heads": 8,
        "num_head_channels": -1,
        "disable_self_attentions": [True, False],
    }
    weights = unet(**changes)
    path = checkpoints / write(checkpoints, weights)
    save_file({k: v.contiguous() for k, v in weights.items()}, path)
    model = loading.load_diffusion_model(str(path))
    assert type(model.model.model_config).__name__ == "SD_X4Upscaler"
    text = [[torch.rand(1, 3, CONTEXT), {}]]
    results = []
    for value in (0.2, 0.8):
        image = torch.full((1, 8, 8, 3), value)
        made = SD_4XUpscale_Conditioning.execute(image, text, text, 4.0, 0.1)
        results.append(sampled(model, made[0], made[1], made[2]))
    assert results[0].shape == (1, 4, 8, 8)
    assert not torch.equal(results[0], results[1])


def test_zero123_projects_picture_and_camera(checkpoints: Path) -> None:
    weights = unet(
        in_channels=8, use_linear_in_transformer=False, num_heads=8, num_head_channels=-1
    )
    projection = {
        "cc_projection.weight": torch.randn(CONTEXT, CONTEXT + 4) * 0.1,
        "cc_projection.bias": torch.zeros(CONTEXT),
    }
    parts = (weights, projection, vision("cond_stage_model.model.visual."), autoencoder())
    path = checkpoints / write(checkpoints, *parts)
    save_file({k: v.contiguous() for part in parts for k, v in part.items()}, path)
    model, encoder, vae = ImageOnlyCheckpointLoader().load_checkpoint(path.name)
    assert type(model.model.model_config).__name__ == "Stable_Zero123"
    picture = torch.rand(1, 64, 64, 3)
    views = []
    for azimuth in (0.0, 90.0):
        made = StableZero123_Conditioning.execute(encoder, picture, vae, 64, 64, 1, 0.0, azimuth)
        views.append(sampled(model, made[0], made[1], made[2]))
    assert not torch.equal(views[0], views[1])


@torch.inference_mode()
def test_lotus_makes_an_estimate_of_a_picture_in_one_step(checkpoints: Path) -> None:
    own = {"num_classes": "sequential", "adm_in_channels": 4, "num_head_channels": 64}
    name = write(checkpoints, unet(**own, model_channels=64), autoencoder())
    found = loading.load_checkpoint_guess_config(str(checkpoints / name), output_clip=False)
    model: Any = found.model
    assert type(model.model.model_config).__name__ == "LotusD"
    text = [[torch.zeros(1, 2, CONTEXT), {}]]
    latents = []
    for seed in (1, 2):  # no noise is added: the seed does not count
        generator = torch.Generator().manual_seed(4)
        latent = {"samples": torch.randn(1, 4, 8, 8, generator=generator)}
        out = common_ksampler(
            model, seed, 1, 1.0, "euler", "normal", text, text, latent, disable_noise=True
        )
        latents.append(out[0]["samples"])
    assert torch.equal(*latents)
    assert latents[0].isfinite().all()
    assert not torch.allclose(latents[0], latent["samples"], atol=1e-3)
