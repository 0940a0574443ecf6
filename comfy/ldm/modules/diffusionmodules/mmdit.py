"""MMDiT, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.ldm.mmdit.layers import (
    DismantledBlock,
    FinalLayer,
    JointBlock,
    PatchEmbed,
    RMSNorm,
    SelfAttention,
    modulate,
)
from comfy.ldm.mmdit.model import MMDiT, OpenAISignatureMMDITWrapper
from comfy.public import write_through

write_through(__name__)
