"""Text encoding of SDXL and Stable Cascade, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.public import write_through
from comfy.text_encoders.sdxl import (
    SDXLClipG,
    SDXLClipGTokenizer,
    SDXLClipModel,
    SDXLRefinerClipModel,
    SDXLTokenizer,
    StableCascadeClipG,
    StableCascadeClipGTokenizer,
    StableCascadeClipModel,
    StableCascadeTokenizer,
)

write_through(__name__)
