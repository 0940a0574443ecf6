"""Model families: the table, in the order in which rows are tried; the first match wins.

Narrow descriptions stand before wide ones: instruct-pix2pix is Stable Diffusion 1.x with more input
channels. Custom nodes append rows in place.
"""

from __future__ import annotations

from comfy.families import sd15, sd20, sdxl
from comfy.families.family import ModelFamily

MODEL_FAMILIES: list[type[ModelFamily]] = [
    sd15.SD15_instructpix2pix,
    sd15.SD15,
    sd20.SD20,
    sdxl.SDXL_instructpix2pix,
    sdxl.SDXLRefiner,
    sdxl.SSD1B,
    sdxl.KOALA_700M,
    sdxl.KOALA_1B,
    sdxl.Segmind_Vega,
    sdxl.SDXL,
]
