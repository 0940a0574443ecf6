"""The text tower of CLIP, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.ldm.clip.text import (
    ACTIVATIONS,
    CLIPMLP,
    CLIPAttention,
    CLIPEmbeddings,
    CLIPEncoder,
    CLIPLayer,
    CLIPTextModel,
)
from comfy.ldm.clip.vision import (
    CLIPVision,
    CLIPVisionEmbeddings,
    CLIPVisionModelProjection,
    LlavaProjector,
)
from comfy.public import write_through

write_through(__name__, ACTIVATIONS="comfy.ldm.clip.text")
