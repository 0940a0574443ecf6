"""Names of an autoencoder's weights in the diffusers library, for files that use them.

There, levels are called blocks and count from the latent on the way up; the attention in the middle
has linear layers where ours has 1x1 convolutions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

MARK = "decoder.up_blocks.0.resnets.0.norm1.weight"
RESNET_PARTS = {"conv_shortcut": "nin_shortcut"}
ATTENTION_PARTS = {
    "group_norm": "norm",
    "to_q": "q",
    "query": "q",
    "to_k": "k",
    "key": "k",
    "to_v": "v",
    "value": "v",
    "to_out.0": "proj_out",
    "proj_attn": "proj_out",
}
CONVOLUTIONS = ("q", "k", "v", "proj_out")


def is_diffusers_vae(state_dict: Mapping[str, Tensor]) -> bool:
    """Whether some weights have these names."""
    return MARK in state_dict


def convert_vae_state_dict(vae_state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under our names; entries with other names are passed on."""
    levels = {
        int(m[1]) for key in vae_state_dict if (m := re.match(r"decoder\.up_blocks\.(\d+)", key))
    }
    last = max(levels, default=0)
    converted = {}
    for key, value in vae_state_dict.items():
        name = _our_name(key, last)
        part = name.split(".")
        if ".attn_1." in name and part[-1] == "weight" and part[-2] in CONVOLUTIONS:
            value = value.reshape(*value.shape, 1, 1) if value.ndim == 2 else value
        converted[name] = value
    return converted


def _our_name(key: str, last: int) -> str:
    """Our name of a weight, in an autoencoder with levels 0..last."""
    rules = (
        (r"encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\.(.+)", r"encoder.down.{0}.block.{1}.{2}"),
        (r"encoder\.down_blocks\.(\d+)\.downsamplers\.0\.(.+)", r"encoder.down.{0}.downsample.{1}"),
        (r"decoder\.up_blocks\.(\d+)\.resnets\.(\d+)\.(.+)", r"decoder.up.{0}.block.{1}.{2}"),
        (r"decoder\.up_blocks\.(\d+)\.upsamplers\.0\.(.+)", r"decoder.up.{0}.upsample.{1}"),
    )
    for pattern, ours in rules:
        found = re.fullmatch(pattern, key)
        if found is not None:
            level, *rest = found.groups()
            if key.startswith("decoder."):
                level = str(last - int(level))
            rest[-1] = _renamed(rest[-1], RESNET_PARTS)
            return ours.format(level, *rest)
    middle = re.fullmatch(r"(encoder|decoder)\.mid_block\.(resnets|attentions)\.(\d+)\.(.+)", key)
    if middle is not None:
        side, kind, number, part = middle.groups()
        if kind == "resnets":
            return f"{side}.mid.block_{int(number) + 1}.{_renamed(part, RESNET_PARTS)}"
        return f"{side}.mid.attn_{int(number) + 1}.{_renamed(part, ATTENTION_PARTS)}"
    return re.sub(r"^(encoder|decoder)\.conv_norm_out\.", r"\1.norm_out.", key)


def _renamed(part: str, names: Mapping[str, str]) -> str:
    """`layer.weight` with the layer renamed."""
    layer, _, kind = part.rpartition(".")
    return f"{names.get(layer, layer)}.{kind}"
