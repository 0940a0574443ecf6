"""Hunyuan3D 2.1: the network beside its authors' numbers, and from a picture to a shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from comfy import ops
from comfy.families.family import BrokenModelError
from comfy.families.hunyuan3d import read_hunyuan3d21_config
from comfy.ldm.dino.vision import Dinov2Model
from comfy.ldm.hunyuan3dv2_1.hunyuandit import HunYuanDiTPlain
from comfy.nn.experts import MoEGate, mixed
from comfy.saving import save_checkpoint
from comfy_extras import nodes_hunyuan3d as nodes
from tests.comfy.families import key_shapes
from tests.comfy.families.small_files import write
from tests.comfy.families.test_hunyuan3d import DINO, VISION_PREFIX, load, sampled, shape_weights
from tests.comfy.families.test_transformers import random_like

SIZES: dict[str, Any] = {
    "in_channels": 64, "hidden_size": 64, "context_dim": 48, "depth": 6, "num_heads": 4,
    "num_moe_layers": 2,
}  # fmt: skip

# What the authors' own code (hunyuandit.py of Hunyuan3D 2.1) answers to `given`, with its sign and
# its time turned about: every 13th channel of every 5th token.
RECORDED = [
    [
        [-1.061493, -0.902491, -0.949953], [0.740283, 1.023462, 0.716891],
        [-0.477961, -0.633538, -0.456373], [-1.270097, -1.193008, -1.070577],
        [-2.601164, -2.539644, -2.589222],
    ],
    [
        [-1.512052, -1.475379, -1.308035], [-0.563007, -0.565363, 0.267178],
        [-0.991216, -0.988947, -1.309702], [-1.181843, -1.422965, -1.348061],
        [-2.734940, -2.610003, -2.565228],
    ],
]  # fmt: skip


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def given() -> tuple[HunYuanDiTPlain, tuple[Tensor, Tensor, Tensor]]:
    """A network with weights, and inputs for it, of one run of random numbers."""
    generator = torch.Generator().manual_seed(1)
    model = HunYuanDiTPlain(**SIZES).eval()
    weights = {}
    for key, empty in sorted(model.state_dict().items()):
        if empty.ndim > 1:
            weight = torch.randn(empty.shape, generator=generator) / empty.shape[-1] ** 0.5
        else:
            weight = 0.7 + 0.6 * torch.rand(empty.shape, generator=generator)
        weights[key] = weight
    model.load_state_dict(weights)
    x = torch.randn(2, 64, 12, generator=generator)
    return model, (x, torch.tensor([0.3, 0.8]), torch.randn(2, 7, 48, generator=generator))


def test_the_network_answers_as_the_authors_does() -> None:
    model, inputs = given()
    torch.testing.assert_close(
        model(*inputs)[:, ::13, ::5], torch.tensor(RECORDED), rtol=1e-4, atol=1e-4
    )


def test_pictures_of_a_batch_do_not_mix() -> None:
    model, inputs = given()
    together = model(*inputs)
    for item in range(2):
        alone = model(*(part[item : item + 1] for part in inputs))
        torch.testing.assert_close(together[item : item + 1], alone, rtol=1e-4, atol=1e-4)


def test_each_token_goes_through_the_experts_it_weighs_most() -> None:
    generator = torch.Generator().manual_seed(3)
    gate = MoEGate(4, 3, 2)
    gate.load_state_dict({"weight": torch.randn(3, 4, generator=generator)})
    experts = [ops.disable_weight_init.Linear(4, 4) for _ in range(3)]
    for expert in experts:
        expert.load_state_dict(random_like(expert, 5) | {"bias": torch.randn(4)})
    x = torch.randn(2, 5, 4, generator=generator)
    made = mixed(x, gate, experts)
    for place in ((0, 0), (0, 3), (1, 4)):
        token = x[place]
        shares = (gate.weight @ token).softmax(0)
        best = shares.argsort(descending=True)[:2].tolist()
        wanted = sum(shares[number] * experts[number](token) for number in best)
        torch.testing.assert_close(made[place], wanted)


def test_the_recorded_file_has_the_recorded_sizes(
    golden_folder: Path, golden_json: Callable[[str], Any]
) -> None:
    recorded = golden_json("model_families.json")["variants"]["Hunyuan3D 2.1"]
    expected = dict(recorded["detected_unet_config"])
    config = read_hunyuan3d21_config(key_shapes.network(golden_folder, "Hunyuan3D 2.1"))
    assert config is not None
    assert expected.pop("guidance_cond_proj_dim") is None
    assert {key: config[key] for key in expected} == expected
    assert (config["num_moe_layers"], config["num_experts"]) == (6, 8)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"x_embedder.weight": None}, "layout of Hunyuan3D 2.1, but x_embedder.weight is missing"),
        ({"blocks.0.attn2.to_k.weight": None}, "but blocks.0.attn2.to_k.weight is missing"),
        ({"x_embedder.weight": torch.empty(60, 64)}, "60 channels in heads of 16.*not fit"),
        ({"t_embedder.cond_proj.weight": torch.empty(4, 4)}, "nothing but the time.*not fit"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Tensor | None], told: str) -> None:
    weights = {**HunYuanDiTPlain(**SIZES).state_dict(), **changed}
    whole = {key: value for key, value in weights.items() if value is not None}
    with pytest.raises(BrokenModelError, match=told):
        read_hunyuan3d21_config(whole)


@pytest.mark.parametrize("wrong", [{"num_heads": 5}, {"num_experts": 1}])
def test_impossible_sizes_are_refused_with_the_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"heads of 64 channels, 2 of \d experts"):
        HunYuanDiTPlain(**{**SIZES, **wrong})


def checkpoint(folder: Path) -> str:
    """A whole checkpoint of small parts."""
    sizes = {**SIZES, "context_dim": DINO["hidden_size"]}
    network = random_like(HunYuanDiTPlain(**sizes), 4)
    tensors = {f"model.{key}": value for key, value in network.items()}
    tensors |= {f"vae.{key}": value for key, value in shape_weights().items()}
    dino = Dinov2Model(DINO, operations=ops.disable_weight_init)
    tensors |= {VISION_PREFIX + key: value for key, value in random_like(dino, 3).items()}
    return write(tensors, folder / "hunyuan3d21.safetensors")


def test_a_picture_becomes_a_shape_and_survives_saving(tmp_path: Path) -> None:
    found = load(checkpoint(tmp_path))
    assert type(found.model.model.model_config).__name__ == "Hunyuan3Dv2_1"
    latent = sampled(found)
    assert latent.isfinite().all()
    voxel = nodes.VAEDecodeHunyuan3D.execute({"samples": latent}, found.vae, 1000, 16).args[0]
    assert voxel.data.shape == (1, 17, 17, 17)
    assert voxel.data.min() < voxel.data.max()
    again_path = str(tmp_path / "again.safetensors")
    save_checkpoint(again_path, found.model, None, found.vae, found.clip_vision)
    weights = HunYuanDiTPlain(**SIZES).state_dict()
    assert load_file(again_path).keys() >= {f"model.diffusion_model.{key}" for key in weights}
    assert torch.equal(sampled(load(again_path)), latent)
