"""Text encoding of Stable Diffusion 1.x: CLIP ViT-L/14."""

from __future__ import annotations

from comfy.text_encoders.encoder import SD1ClipModel, SDClipModel
from comfy.text_encoders.tokenizer import SD1Tokenizer, SDTokenizer

__all__ = ["SD1ClipModel", "SD1Tokenizer", "SDClipModel", "SDTokenizer"]
