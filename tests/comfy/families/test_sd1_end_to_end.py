"""A tiny Stable Diffusion 1.x network, sampled through patcher, guidance and solver as recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.families import sd15
from comfy.patching.patcher import ModelPatcher
from comfy.sampling import run
from comfy.weights.lora import load_lora, model_lora_keys_unet
from tests.support.golden_nets import read_golden_net

STEPS, CFG, SEED = 4, 5.0, 42


@pytest.fixture(scope="module")
def patcher(golden_folder: Any) -> ModelPatcher:
    recorded = read_golden_net(golden_folder / "nets/unet_sd1.safetensors")
    config = {**recorded.constructor, "dtype": torch.float32}
    family = sd15.SD15(config)
    family.unet_config.update(num_heads=config["num_heads"])
    model = family.get_model({}, "", device="meta")
    model.load_model_weights(dict(recorded.weights))
    return ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


@pytest.fixture(scope="module")
def case(golden_folder: Any) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(str(golden_folder / "nets" / "e2e_sd1_tiny.safetensors"))


def sample(model: ModelPatcher, case: dict[str, Tensor], **options: Any) -> Tensor:
    latent = options.pop("latent", torch.zeros(1, 4, 8, 8))
    noise = torch.randn([1, 4, 8, 8], generator=torch.manual_seed(SEED))
    return run.sample(
        model,
        noise,
        STEPS,
        CFG,
        "euler",
        "normal",
        [[case["in/pos"], {}]],
        [[case["in/neg"], {}]],
        latent,
        seed=SEED,
        disable_pbar=True,
        **options,
    )


def assert_recorded(got: Tensor, expected: Tensor) -> None:
    """Agrees within 4 times the rounding found, of the output's spread."""
    assert (got - expected).abs().max() < 3e-5 * expected.std()


def test_text_to_image(patcher: ModelPatcher, case: dict[str, Tensor]) -> None:
    assert_recorded(sample(patcher, case), case["out/plain"])


def test_image_to_image(patcher: ModelPatcher, case: dict[str, Tensor]) -> None:
    got = sample(patcher, case, latent=case["in/latent"], denoise=0.5)
    assert_recorded(got, case["out/plain_img2img_d0.5"])


def test_a_lora_changes_the_result_and_leaves_the_model_as_it_was(
    patcher: ModelPatcher, case: dict[str, Tensor]
) -> None:
    prefix = "in/lora/"
    file = {key[len(prefix) :]: value for key, value in case.items() if key.startswith(prefix)}
    keys = model_lora_keys_unet(patcher.model, {})
    changed = patcher.clone()
    assert len(changed.add_patches(load_lora(file, keys), 0.8)) == 1
    assert_recorded(sample(changed, case), case["out/lora_0.8"])
    assert_recorded(sample(patcher, case), case["out/plain"])
