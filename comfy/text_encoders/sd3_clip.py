"""Text encoding of Stable Diffusion 3, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.public import write_through
from comfy.text_encoders.sd3 import SD3ClipModel, SD3Tokenizer, sd3_clip
from comfy.text_encoders.t5_encoder import T5XXLModel, T5XXLTokenizer

write_through(__name__)
