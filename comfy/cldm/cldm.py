"""The ControlNet of the UNet line, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.ldm.unet.controlnet import ControlAddEmbedding, ControlNet
from comfy.public import write_through

write_through(__name__)
