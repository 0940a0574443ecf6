"""Model families, under the names custom nodes import."""
# ruff: noqa: F401

from comfy import supported_models_base
from comfy.families import MODEL_FAMILIES as models
from comfy.families.sd15 import SD15, SD15_instructpix2pix
from comfy.families.sd20 import SD20
from comfy.families.sdxl import (
    KOALA_1B,
    KOALA_700M,
    SDXL,
    SSD1B,
    SDXL_instructpix2pix,
    SDXLRefiner,
    Segmind_Vega,
)
from comfy.public import write_through

write_through(__name__)
