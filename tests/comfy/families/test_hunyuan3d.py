"""Hunyuan3D 2: the recorded network, and a small checkpoint from picture to shape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy import interrupt, loading
from comfy.families.family import BrokenModelError
from comfy.families.hunyuan3d import read_hunyuan3d_config
from comfy.ldm.dino.vision import Dinov2Model
from comfy.ldm.hunyuan3d import vae as shape_vae
from comfy.ldm.hunyuan3d.model import Hunyuan3Dv2
from comfy.ldm.hunyuan3d.vae import GeoSizes, ShapeVAE, waves_of
from comfy.ops import disable_weight_init
from comfy.saving import save_checkpoint
from comfy.vae.vae import VAE
from comfy_extras import nodes_hunyuan3d as nodes
from comfy_extras.shapes.nodes import VoxelToMesh
from comfy_nodes.sampling import common_ksampler
from tests.comfy.families.test_transformers import random_like
from tests.support.golden_nets import assert_close_to_golden, read_golden_net

SIZES: dict[str, Any] = {
    "in_channels": 64, "context_in_dim": 64, "hidden_size": 32, "mlp_ratio": 2.0, "num_heads": 2,
    "depth": 1, "depth_single_blocks": 1,
}  # fmt: skip
DINO = {
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 1,
    "image_size": 28,
}  # fmt: skip
GEO = GeoSizes(width=32, heads=2, inner=48)
TURBO = GeoSizes(width=64, heads=1, inner=64, has_norms=False)
VISION_PREFIX = "conditioner.main_image_encoder.model."


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def shape_weights(geo: GeoSizes = GEO, width: int = 32, heads: int = 2) -> dict[str, Tensor]:
    network = ShapeVAE(64, width, heads, 48, 2, geo=geo, operations=disable_weight_init)
    return random_like(network, 2)


def checkpoint(folder: Path) -> str:
    """A whole checkpoint of small parts."""
    tensors = {f"model.{k}": v for k, v in random_like(Hunyuan3Dv2(**SIZES), 4).items()}
    tensors |= {f"vae.{key}": value for key, value in shape_weights().items()}
    dino = Dinov2Model(DINO, operations=disable_weight_init)
    tensors |= {VISION_PREFIX + key: value for key, value in random_like(dino, 3).items()}
    path = folder / "hunyuan3d.safetensors"
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return str(path)


def sampled(checkpoint: Any) -> Tensor:
    seen = checkpoint.clip_vision.encode_image(torch.full((1, 40, 30, 3), 0.3))
    positive, negative = nodes.Hunyuan3Dv2Conditioning.execute(seen).args
    latent = nodes.EmptyLatentHunyuan3Dv2.execute(12, 1).args[0]
    settings = (3, 2, 1.5, "euler", "simple")
    made = common_ksampler(checkpoint.model, *settings, positive, negative, latent)
    samples: Tensor = made[0]["samples"]
    return samples


def load(path: str) -> Any:
    return loading.load_checkpoint_guess_config(path, output_clip=False, output_clipvision=True)


def test_the_network_agrees_with_the_reference(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/hunyuan3d2.safetensors")
    model = Hunyuan3Dv2(**net.constructor).eval()
    model.load_state_dict(net.weights)
    given = net.calls()["a"]
    assert_close_to_golden(model(given["x"], given["t"], given["context"]), net.outputs["a"])
    config = read_hunyuan3d_config(net.weights)
    assert config is not None
    assert {key: config[key] for key in net.constructor} == net.constructor


def test_guidance_counts_where_it_was_taught() -> None:
    x, context, t = torch.randn(1, 64, 5), torch.randn(1, 3, 64), torch.tensor([0.5])
    for taught in (False, True):
        model = Hunyuan3Dv2(**SIZES, guidance_embed=taught).eval()
        model.load_state_dict(random_like(model, 1))
        weak, strong = (model(x, t, context, guidance=torch.tensor([g])) for g in (1.0, 5.0))
        assert torch.equal(weak, strong) is not taught


@pytest.mark.parametrize("key", ["cond_in.weight", "double_blocks.0.img_mlp.0.weight"])
def test_a_hole_is_named(key: str) -> None:
    weights = random_like(Hunyuan3Dv2(**SIZES), 4)
    del weights[key]
    with pytest.raises(BrokenModelError, match=rf"layout of Hunyuan3D 2, but {key}"):
        read_hunyuan3d_config(weights)


def test_a_picture_becomes_a_shape_and_survives_saving(tmp_path: Path) -> None:
    found = load(checkpoint(tmp_path))
    assert type(found.model.model.model_config).__name__ == "Hunyuan3Dv2"
    latent = sampled(found)
    assert latent.shape == (1, 64, 12)
    assert latent.isfinite().all()
    voxel = nodes.VAEDecodeHunyuan3D.execute({"samples": latent}, found.vae, 1000, 16).args[0]
    assert voxel.data.shape == (1, 17, 17, 17)
    assert 0.0 <= voxel.data.min() < voxel.data.max() <= 1.0
    threshold = float(voxel.data.median())
    mesh = VoxelToMesh.execute(voxel, "surface net", threshold).args[0]
    assert mesh.vertices.shape[0] == 1
    assert mesh.faces.numel()
    again_path = str(tmp_path / "again.safetensors")
    save_checkpoint(again_path, found.model, None, found.vae, found.clip_vision)
    again = load(again_path)
    assert torch.equal(sampled(again), latent)
    assert torch.equal(again.vae.decode(latent, {"octree_resolution": 4}),
                       found.vae.decode(latent, {"octree_resolution": 4}))  # fmt: skip


def test_another_picture_gives_another_shape(tmp_path: Path) -> None:
    found = load(checkpoint(tmp_path))
    pictures = [torch.rand(1, 28, 28, 3), torch.zeros(1, 28, 28, 3)]
    seen = [found.clip_vision.encode_image(picture) for picture in pictures]
    assert seen[0].last_hidden_state.shape == (1, 5, 64)
    assert not torch.allclose(seen[0].last_hidden_state, seen[1].last_hidden_state)
    pair = nodes.Hunyuan3Dv2ConditioningMultiView.execute(front=seen[0], back=seen[1]).args
    assert pair[0][0][0].shape == (1, 10, 64)


@pytest.mark.parametrize(("geo", "width", "heads"), [(GEO, 32, 2), (TURBO, 128, 2)])
def test_the_field_has_its_values_at_their_places(geo: GeoSizes, width: int, heads: int) -> None:
    weights = shape_weights(geo, width, heads)
    vae = VAE(sd=weights, dtype=torch.float32)
    tokens = torch.randn(2, 64, 7, generator=torch.Generator().manual_seed(1))
    field = vae.decode(tokens, {"octree_resolution": 4, "num_chunks": 1000})
    assert field.shape == (2, 5, 5, 5)
    network = vae.first_stage_model
    seen = network.transformer(network.post_kl(tokens.movedim(1, 2)))
    seen = network.geo_decoder.latents_proj(seen)
    line = torch.linspace(-1.01, 1.01, 5)
    for x, y, z in ((0, 3, 1), (4, 0, 2)):
        point = torch.stack([line[x], line[y], line[z]])[None]
        value = network.geo_decoder(point, seen)[:, 0]
        expected = ((value + 1) / 2).clamp(0, 1)
        torch.testing.assert_close(field[:, z, y, x], expected, rtol=1e-4, atol=1e-5)


def test_the_number_of_points_asked_at_a_time_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = ShapeVAE(64, 32, 2, 48, 1, geo=GEO).eval()
    network.load_state_dict(random_like(network, 3))
    tokens = torch.randn(1, 64, 3)
    whole = network.decode(tokens, num_chunks=500_000, octree_resolution=8)
    monkeypatch.setattr(shape_vae, "MOST_BYTES", 64 * 4 * 20)  # twenty points
    asked: list[int] = []
    network.geo_decoder.register_forward_pre_hook(lambda _, args: asked.append(len(args[0])))
    pieces = network.decode(tokens, num_chunks=500_000, octree_resolution=8)
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-5)
    assert max(asked) == 20
    assert sum(asked) == 9**3


def test_points_are_told_by_their_waves() -> None:
    told = waves_of(torch.tensor([[0.5, -1.0, 0.25]]), 2)
    angles = torch.tensor([[0.5, 1.0, -1.0, -2.0, 0.25, 0.5]])
    expected = torch.cat([torch.tensor([[0.5, -1.0, 0.25]]), angles.sin(), angles.cos()], dim=-1)
    torch.testing.assert_close(told, expected)


def test_decoding_stops_when_the_prompt_is_cancelled() -> None:
    network = ShapeVAE(64, 32, 2, 48, 1, geo=GEO).eval()
    network.load_state_dict(random_like(network, 3))

    def cancel(module: Any, args: Any) -> None:
        interrupt.interrupt_current_processing()

    network.geo_decoder.register_forward_pre_hook(cancel)
    try:
        with pytest.raises(interrupt.InterruptProcessingException):
            network.decode(torch.randn(1, 64, 3), num_chunks=8, octree_resolution=4)
    finally:
        interrupt.interrupt_current_processing(False)


def test_what_is_no_shape_is_refused(tmp_path: Path) -> None:
    vae = VAE(sd=shape_weights(), dtype=torch.float32)
    with pytest.raises(ValueError, match="4 channels, this VAE decodes 64"):
        vae.decode(torch.zeros(1, 4, 12))
    with pytest.raises(ValueError, match="sets and cannot be cut into tiles"):
        vae.decode_tiled(torch.zeros(1, 64, 12))
    with pytest.raises(ValueError, match="makes shapes of latents"):
        vae.encode(torch.zeros(1, 64, 64, 3))
    from tests.comfy.families.test_transformers import autoencoder

    pictures = VAE(sd=autoencoder(), dtype=torch.float32)
    with pytest.raises(ValueError, match="makes pictures, not shapes"):
        nodes.VAEDecodeHunyuan3D.execute({"samples": torch.zeros(1, 16, 8, 8)}, pictures, 1000, 16)
