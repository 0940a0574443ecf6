"""The UNet and its parts, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.ldm.unet.blocks import Downsample, ResBlock, TimestepBlock, Upsample
from comfy.ldm.unet.model import UNetModel
from comfy.ldm.unet.steps import TimestepEmbedSequential, apply_control, forward_timestep_embed
from comfy.ldm.unet.transformer import SpatialTransformer
from comfy.ldm.unet.video import SpatialVideoTransformer, VideoResBlock
from comfy.nn.timesteps import timestep_embedding
from comfy.public import write_through

write_through(__name__)
