"""Control networks, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.control.base import ControlBase, StrengthType, broadcast_image_to
from comfy.control.loading import load_controlnet, load_controlnet_state_dict
from comfy.control.networks import ControlLora, ControlNet, ControlNetSD35, T2IAdapter
from comfy.public import write_through

write_through(__name__)
