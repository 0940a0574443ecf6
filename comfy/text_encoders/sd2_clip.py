"""Text encoding of Stable Diffusion 2.x, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.public import write_through
from comfy.text_encoders.sd2 import SD2ClipHModel, SD2ClipHTokenizer, SD2ClipModel, SD2Tokenizer

write_through(__name__)
