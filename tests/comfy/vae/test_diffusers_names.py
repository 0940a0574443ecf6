"""Autoencoders under the names of the diffusers library give the same pictures."""

from __future__ import annotations

import re

import torch

from comfy.ldm.autoencoder.kl import AutoencoderKL
from comfy.ldm.autoencoder.layers import AutoencoderConfig
from comfy.vae.vae import VAE
from comfy.weights.diffusers_vae import convert_vae_state_dict, is_diffusers_vae

LEVELS = 3
ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
EARLY = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


def weights() -> dict[str, torch.Tensor]:
    sizes = AutoencoderConfig(
        ch=32, ch_mult=(1, 2, 2), num_res_blocks=1, z_channels=4, norm_num_groups=32
    )
    torch.manual_seed(0)
    network = AutoencoderKL(sizes, 4)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return network.state_dict()


def diffusers_name(key: str) -> str:
    """What the library calls one of our weights, part by part."""
    for ours, theirs in (("down", "down_blocks"), ("up", "up_blocks")):
        found = re.fullmatch(rf"(encoder|decoder)\.{ours}\.(\d+)\.(\w+)\.(.+)", key)
        if found is None:
            continue
        side, level, kind, rest = found.groups()
        level = str(LEVELS - 1 - int(level)) if ours == "up" else level
        kind = {"block": "resnets", "downsample": "downsamplers.0", "upsample": "upsamplers.0"}[
            kind
        ]
        return f"{side}.{theirs}.{level}.{kind}.{rest}".replace("nin_shortcut", "conv_shortcut")
    found = re.fullmatch(r"(encoder|decoder)\.mid\.(block|attn)_(\d)\.(.+)\.(weight|bias)", key)
    if found is not None:
        side, kind, number, part, end = found.groups()
        place = int(number) - 1
        if kind == "block":
            return f"{side}.mid_block.resnets.{place}.{part}.{end}"
        return f"{side}.mid_block.attentions.{place}.{ATTENTION[part]}.{end}"
    return key.replace("coder.norm_out.", "coder.conv_norm_out.")


def renamed(early: bool = False) -> dict[str, torch.Tensor]:
    made = {}
    for key, value in weights().items():
        name = diffusers_name(key)
        if early:
            for new, old in EARLY.items():
                name = name.replace(f"attentions.0.{new}.", f"attentions.0.{old}.")
        is_linear = ".attentions." in name and value.ndim == 4
        made[name] = value[:, :, 0, 0].clone() if is_linear else value
    return made


def test_every_name_comes_back() -> None:
    ours = weights()
    for early in (False, True):
        theirs = renamed(early)
        assert is_diffusers_vae(theirs)
        assert not is_diffusers_vae(ours)
        back = convert_vae_state_dict(theirs)
        assert back.keys() == ours.keys()
        assert all(torch.equal(back[key], ours[key]) for key in ours)


def test_both_names_make_the_same_picture() -> None:
    latent = torch.randn(1, 4, 8, 8)
    first = VAE(sd=weights()).decode(latent)
    assert torch.equal(VAE(sd=renamed()).decode(latent), first)
