"""Cosmos Predict 2: the recorded network, and small files from text to picture and video."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import loading, text_loading
from comfy.families.cosmos import CosmosT2IPredict2, read_cosmos_predict2_config
from comfy.families.family import BrokenModelError
from comfy.ldm.cosmos.predict2 import MiniTrainDIT
from comfy.ldm.t5.model import T5
from comfy.ops import manual_cast
from tests.comfy.families.small_files import PREFIX, loaded_again, prefixed, sampled, write
from tests.comfy.families.test_transformers import pieces, random_like
from tests.support.golden_nets import assert_close_to_golden, read_golden_net

TEXT = 1024  # of the first T5 XXL, which its width tells
SIZES: dict[str, Any] = {
    "in_channels": 16, "out_channels": 16, "model_channels": 48, "num_blocks": 2, "num_heads": 2,
    "mlp_ratio": 1.5, "crossattn_emb_channels": TEXT, "adaln_lora_dim": 8,
}  # fmt: skip
SHAPE = (1, 16, 3, 5, 6)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def network(channels: int = 16) -> dict[str, Tensor]:
    return random_like(MiniTrainDIT(**{**SIZES, "in_channels": channels}), 4)


def text_encoder() -> dict[str, Tensor]:
    sizes = {
        "d_model": TEXT, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": 2, "vocab_size": 40,
        "is_gated_act": False, "dense_act_fn": "relu",
    }  # fmt: skip
    return random_like(T5(sizes, None, "cpu", manual_cast), 7)


def checkpoint(folder: Path, channels: int = 16) -> str:
    pieces(folder)
    tensors = prefixed(network(channels), PREFIX)
    tensors |= prefixed(text_encoder(), "cond_stage_model.t5xxl.transformer.")
    return write(tensors, folder / "cosmos.safetensors")


def test_the_network_agrees_with_the_reference(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "nets/cosmos_predict2.safetensors")
    model = MiniTrainDIT(**net.constructor).eval()
    model.load_state_dict(net.weights)
    given = net.calls()["a"]
    x, t, context = given["x"], given["t"], given["context"]
    assert_close_to_golden(model(x, t, context), net.outputs["a"])
    each = t[:, None].expand(-1, x.shape[2])  # all frames at one time
    assert_close_to_golden(model(x, each, context), net.outputs["a"])


def test_sizes_are_read_from_the_weights_and_a_hole_is_named() -> None:
    weights = network()
    config = read_cosmos_predict2_config(weights)
    assert config is not None
    assert {key: config[key] for key in SIZES} == SIZES
    del weights["final_layer.linear.weight"]
    with pytest.raises(BrokenModelError, match="layout of Cosmos Predict 2, but final_layer"):
        read_cosmos_predict2_config(weights)


def test_text_becomes_a_picture_and_survives_saving(tmp_path: Path) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path), output_vae=False)
    assert type(found.model.model.model_config).__name__ == "CosmosT2IPredict2"
    latent = sampled(found.model, found.clip, SHAPE)
    assert latent.shape == SHAPE
    assert sampled(found.model, found.clip, (2, 16, 6, 8)).shape == (2, 16, 1, 6, 8)
    again = loaded_again(found, tmp_path)
    assert torch.equal(sampled(again.model, again.clip, SHAPE), latent)


def test_given_frames_stay_as_they_are_and_change_the_others(tmp_path: Path) -> None:
    found: Any = loading.load_checkpoint_guess_config(checkpoint(tmp_path, 17), output_vae=False)
    assert type(found.model.model.model_config).__name__ == "CosmosI2VPredict2"
    mask = torch.ones(1, 1, *SHAPE[2:])
    mask[:, :, 0] = 0
    model, clip = found.model, found.clip
    given = sampled(model, clip, SHAPE, mask, fill=0.5)
    torch.testing.assert_close(given[:, :, 0], torch.full_like(given[:, :, 0], 0.5))
    in_part = sampled(model, clip, SHAPE, mask, fill=0.5, area=(2, *SHAPE[3:], 0, 0, 0))
    torch.testing.assert_close(in_part[:, :, 0], given[:, :, 0])
    free = sampled(model, clip, SHAPE, fill=0.5)
    assert not torch.allclose(given[:, :, 1:], free[:, :, 1:])
    concat = model.model.concat_cond(noise=torch.zeros(SHAPE), denoise_mask=mask)
    assert torch.equal(concat, 1 - mask)
    assert not model.model.concat_cond(noise=torch.zeros(SHAPE)).any()
    times = model.model.process_timestep(torch.tensor([0.7]), denoise_mask=mask)
    torch.testing.assert_close(times, torch.tensor([[0.0, 0.7, 0.7]]))


def test_given_frames_are_scaled_as_recorded(
    golden_tensors: Callable[[str], dict[str, Tensor]],
) -> None:
    tensors = golden_tensors("model_conds.safetensors")
    root = "scale_latent_inpaint/Cosmos Predict2 2B T2I"
    config = {**SIZES, "disable_unet_model_creation": True}
    model = CosmosT2IPredict2(config).get_model({})
    for sigma in (0.3, 0.9):
        got = model.scale_latent_inpaint(
            torch.tensor([sigma]), tensors[f"{root}/noise"], tensors[f"{root}/latent"]
        )
        torch.testing.assert_close(got, tensors[f"{root}/sigma{sigma}"])


def test_single_files_load(tmp_path: Path) -> None:
    pieces(tmp_path)
    model = loading.load_diffusion_model(write(network(), tmp_path / "model.safetensors"))
    path = write(text_encoder(), tmp_path / "t5.safetensors")
    clip = text_loading.load_clip([path], clip_type=text_loading.CLIPType.COSMOS)
    assert clip.encode("a").shape == (1, 512, TEXT)
    sampled(model, clip, SHAPE)
