"""The preview autoencoder, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.ldm.taesd.model import TAESD, Block, Clamp, Decoder, Encoder, conv
from comfy.public import write_through

write_through(__name__)
