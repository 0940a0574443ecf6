"""MMDiT, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.ldm.mmdit.model import (
    DismantledBlock,
    FinalLayer,
    JointBlock,
    MMDiT,
    OpenAISignatureMMDITWrapper,
    PatchEmbed,
    RMSNorm,
    SelfAttention,
    modulate,
)
from comfy.public import write_through

write_through(__name__)
