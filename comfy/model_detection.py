"""Recognising model files, under the names custom nodes import."""
# ruff: noqa: F401

from comfy.families.detection import (
    detect_unet_config,
    model_config_from_unet,
    model_config_from_unet_config,
    unet_config_from_diffusers_unet,
    unet_prefix_from_state_dict,
)
from comfy.families.unet_layout import convert_config, count_blocks
from comfy.public import write_through

write_through(__name__)
