"""Attention functions and transformer blocks, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.ldm.unet.transformer import (
    GEGLU,
    BasicTransformerBlock,
    CrossAttention,
    FeedForward,
    SpatialTransformer,
)
from comfy.ldm.unet.video import SpatialVideoTransformer
from comfy.ldm.util import default, exists
from comfy.nn.attention import (
    REGISTERED_ATTENTION_FUNCTIONS,
    attention_basic,
    attention_flash,
    attention_pytorch,
    attention_sage,
    attention_split,
    attention_sub_quad,
    attention_xformers,
    get_attention_function,
    optimized_attention,
    optimized_attention_for_device,
    optimized_attention_masked,
    register_attention_function,
    wrap_attn,
)
from comfy.public import write_through

write_through(__name__, REGISTERED_ATTENTION_FUNCTIONS="comfy.nn.attention")
