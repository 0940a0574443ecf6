"""LoRA files whose names have to be rewritten as a whole before any layout fits.

A row is (recognise, convert); the first that recognises the file's keys converts it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

LoraFile = Mapping[str, torch.Tensor]


def _is_control_lora(sd: LoraFile) -> bool:
    return "img_in.lora_A.weight" in sd and "single_blocks.0.norm.key_norm.scale" in sd


def convert_control_lora(sd: LoraFile) -> dict[str, torch.Tensor]:
    """FLUX.1 control LoRA: bare names, replaced norms, and a wider image projection."""
    out: dict[str, torch.Tensor] = {}
    for key, tensor in sd.items():
        name = key.replace(".lora_B.bias", ".diff_b").replace(
            "_norm.scale", "_norm.scale.set_weight"
        )
        out[f"diffusion_model.{name}"] = tensor
    rows, columns = sd["img_in.lora_B.weight"].shape[0], sd["img_in.lora_A.weight"].shape[1]
    out["diffusion_model.img_in.reshape_weight"] = torch.tensor([rows, columns])
    return out


def _is_wan_fun(sd: LoraFile) -> bool:
    return "lora_unet__blocks_0_cross_attn_k.lora_down.weight" in sd


def convert_wan_fun(sd: LoraFile) -> dict[str, torch.Tensor]:
    """Wan Fun LoRA: a doubled underscore after the prefix."""
    double, single = "lora_unet__", "lora_unet_"
    return {
        single + key[len(double) :] if key.startswith(double) else key: tensor
        for key, tensor in sd.items()
    }


_PROCESSOR = re.compile(
    r"^(?:transformer\.|diffusion_model\.)?((?:double_blocks\.\d+\.processor\.(?:qkv|proj)_lora[12]"
    r"|single_blocks\.\d+\.processor\.(?:qkv|proj)_lora)\..+)$"
)


def _is_of_processors(sd: LoraFile) -> bool:
    return any(_PROCESSOR.match(key) for key in sd)


_PROCESSOR_NAMES = (
    (r"\.processor\.qkv_lora1\.", ".img_attn.qkv.lora_"),
    (r"\.processor\.qkv_lora2\.", ".txt_attn.qkv.lora_"),
    (r"\.processor\.proj_lora1\.", ".img_attn.proj.lora_"),
    (r"\.processor\.proj_lora2\.", ".txt_attn.proj.lora_"),
    (r"\.processor\.qkv_lora\.", ".linear1_qkv.lora_"),
    (r"\.processor\.proj_lora\.", ".linear2.lora_"),
)


def convert_processors(sd: LoraFile) -> dict[str, torch.Tensor]:
    """LoRA of FLUX attention processors, as XLabs trains them and USO is published."""
    out: dict[str, torch.Tensor] = {}
    for key, tensor in sd.items():
        found = _PROCESSOR.match(key)
        name = found[1] if found else key
        for pattern, ours in _PROCESSOR_NAMES:
            name = re.sub(pattern, ours, name)
        out[f"diffusion_model.{name}"] = tensor
    return out


WHOLE_FILE_CONVERSIONS: list[
    tuple[Callable[[LoraFile], bool], Callable[[LoraFile], dict[str, torch.Tensor]]]
] = [
    (_is_control_lora, convert_control_lora),
    (_is_wan_fun, convert_wan_fun),
    (_is_of_processors, convert_processors),
]


def convert_lora(sd: LoraFile) -> LoraFile:
    """The file under names the layouts know; the file itself when it needs no conversion."""
    for recognises, convert in WHOLE_FILE_CONVERSIONS:
        if recognises(sd):
            return convert(sd)
    return sd
