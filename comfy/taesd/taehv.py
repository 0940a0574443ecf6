"""The small autoencoder of videos, under the names custom nodes import."""

# ruff: noqa: F401
from comfy.ldm.taesd.model import Clamp, conv
from comfy.ldm.taesd.video import TAEHV, MemBlock, TGrow, TPool, apply_model_with_memblocks
from comfy.public import write_through

write_through(__name__)
