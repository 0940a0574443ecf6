"""The KL autoencoder against recorded tiny networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from comfy.ldm.autoencoder.kl import AutoencoderKL
from comfy.ldm.autoencoder.layers import AutoencoderConfig
from comfy.ldm.genmo.vae import MochiVAEConfig, VideoVAE
from comfy.ldm.hunyuan_video.packed_vae import PackedConfig, PackedVAE
from tests.support.golden_nets import assert_close_to_golden, read_golden_net
from tests.support.live_bytes import peak_bytes


@pytest.mark.parametrize("name", ["vae_kl", "vae_kl16_noquant"])
@torch.inference_mode()
def test_autoencoder_agrees_with_the_reference(name: str, golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / f"nets/{name}.safetensors")
    options = net.constructor if "ddconfig" in net.constructor else {"ddconfig": net.constructor}
    model = AutoencoderKL(**options).eval()
    model.load_state_dict(net.weights)
    picture = net.inputs["image_-1_1"]
    assert_close_to_golden(model.decode(net.inputs["z"]), net.outputs["decode"])
    assert_close_to_golden(model.moments(picture), net.outputs["moments"])
    torch.manual_seed(123)
    assert_close_to_golden(model.encode(picture), net.outputs["encode_seed123"])


def test_norm_groups_that_do_not_divide_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"16.*32"):
        AutoencoderConfig(ch=16, ch_mult=(1, 2), num_res_blocks=1, z_channels=4)


@torch.inference_mode()
@pytest.mark.parametrize("way", ["decode", "encode"])
def test_no_features_are_held_beyond_the_layer_that_reads_them(way: str) -> None:
    """A decoder is widest in the residual block that halves the finest level's channels: its input
    and the norm of that, and the result of half their size. An encoder holds three of that size."""
    wide, side = 64, 128
    config = {"ch": 32, "ch_mult": (1, 2, 2), "num_res_blocks": 1, "z_channels": 4}
    model = AutoencoderKL(config, embed_dim=4).eval()
    for weight in model.parameters():
        torch.nn.init.constant_(weight, 0.01)
    model.to(memory_format=torch.channels_last)
    latent, picture = torch.ones(1, 4, side // 4, side // 4), torch.ones(1, 3, side, side)
    held = peak_bytes(lambda: model.decode(latent) if way == "decode" else model.encode(picture))
    finest = 4 * wide * side * side
    assert held < {"decode": 2.6, "encode": 1.7}[way] * finest


# An autoencoder of videos whose finest level has 32 channels, frames of a video, and the most
# features of that level that encoding and decoding hold at once.
VIDEOS = {
    "packed": (PackedVAE, PackedConfig((32, 64, 128), 2, 8, (True, True)), 5, (6.2, 6.2)),
    "mochi": (
        VideoVAE,
        MochiVAEConfig((32, 64, 64, 64), (32, 64, 64, 64), (1,) * 5, (1,) * 5),
        7,
        (5.3, 5.0),
    ),
}


@torch.inference_mode()
@pytest.mark.parametrize("kind", VIDEOS)
def test_levels_of_a_video_do_not_hold_what_they_were_given(kind: str) -> None:
    build, config, frames, most = VIDEOS[kind]
    model: Any = build(config).eval()
    for weight in model.parameters():
        torch.nn.init.constant_(weight, 0.01)
    video = torch.ones(1, 3, frames, 128, 64)
    latent = model.encode(video)
    finest = 4 * 32 * video[0, 0].numel()
    assert peak_bytes(lambda: model.encode(video)) < most[0] * finest
    assert peak_bytes(lambda: model.decode(latent)) < most[1] * finest
