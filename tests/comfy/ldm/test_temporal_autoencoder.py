"""The autoencoder of Stable Video Diffusion: names, recognition, what it does along the time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comfy.ldm.autoencoder.kl import AutoencoderKL
from comfy.ldm.autoencoder.layers import AutoencoderConfig
from comfy.ldm.autoencoder.temporal import TemporalAutoencoder, as_clip, as_frames
from comfy.vae.kinds import detect_autoencoder
from comfy.vae.vae import VAE
from tests.comfy.families import key_shapes

SMALL = AutoencoderConfig(ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=4)


def small() -> TemporalAutoencoder:
    torch.manual_seed(1)
    network = TemporalAutoencoder(SMALL).eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)
    return network


def test_the_full_size_has_the_recorded_weights(golden_folder: Path) -> None:
    patterns = key_shapes.recorded(golden_folder)["vaes"]["SVD temporal decoder"]
    weights = key_shapes.expand(patterns)
    spec = detect_autoencoder(weights)
    assert spec is not None
    assert (spec.latent_channels, spec.downscale_ratio) == (4, 8)
    network = spec.build(dtype=None, device="meta")
    own = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    assert own == {key: tuple(value.shape) for key, value in weights.items()}


def test_frames_and_clips_are_one_another() -> None:
    frames = torch.rand(3, 4, 5, 6)
    assert as_clip(frames).shape == (1, 4, 3, 5, 6)
    assert torch.equal(as_frames(as_clip(frames)), frames)


@torch.inference_mode()
def test_without_a_share_of_time_it_is_the_picture_decoder() -> None:
    """A share of zero leaves the blocks alone; a kernel that only copies leaves the end alone."""
    network = small()
    weights = network.state_dict()
    for key, value in weights.items():
        if key.endswith("mix_factor"):
            value.fill_(-100.0)
        if "time_mix_conv" in key:
            value.zero_()
    for channel in range(3):
        weights["decoder.conv_out.time_mix_conv.weight"][channel, channel, 1] = 1.0
    pictures = AutoencoderKL(SMALL, None).eval()
    pictures.load_state_dict({k: weights[k] for k in pictures.state_dict()})
    latent = torch.randn(3, 4, 4, 4)
    assert torch.allclose(network.decode(latent), pictures.decode(latent), atol=1e-5)


@torch.inference_mode()
def test_a_frame_depends_on_its_neighbours() -> None:
    network = small()
    latent = torch.randn(4, 4, 4, 4)
    changed = latent.clone()
    changed[0] += 1.0
    before, after = network.decode(latent), network.decode(changed)
    assert not torch.allclose(before[1], after[1])


def by_hand(clip: Tensor, block: Any) -> Tensor:
    """The block over time in plain functions."""
    first, last = block.in_layers, block.out_layers
    h = nn.functional.group_norm(clip, 32, first[0].weight, first[0].bias, 1e-5)
    h = nn.functional.conv3d(
        nn.functional.silu(h), first[2].weight, first[2].bias, padding=(1, 0, 0)
    )
    h = nn.functional.group_norm(h, 32, last[0].weight, last[0].bias, 1e-5)
    h = nn.functional.conv3d(nn.functional.silu(h), last[3].weight, last[3].bias, padding=(1, 0, 0))
    return clip + h


@torch.inference_mode()
def test_the_share_of_time_is_a_sigmoid() -> None:
    block: Any = small().decoder.mid.block_1
    x = torch.randn(3, 32, 4, 4)
    plain = super(type(block), block).forward(x)
    share = torch.sigmoid(block.mix_factor)
    clip = as_clip(plain)
    expected = as_frames(share * by_hand(clip, block.time_stack) + (1 - share) * clip)
    assert torch.allclose(block(x), expected, atol=1e-5)


def test_it_is_a_vae_like_the_others() -> None:
    weights = small().state_dict()
    vae = VAE(sd=weights)
    pictures = vae.decode(torch.randn(3, 4, 8, 8))
    assert pictures.shape == (3, 16, 16, 3)
    assert vae.encode(pictures).shape == (3, 4, 8, 8)
    with pytest.raises(ValueError, match="mix_factor"):
        VAE(sd={k: v for k, v in weights.items() if "up.0.block.0.mix_factor" not in k})
