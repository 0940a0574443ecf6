"""Model families: the table, in the order in which rows are tried; the first match wins.

Narrow descriptions stand before wide ones: instruct-pix2pix is Stable Diffusion 1.x with more input
channels. Custom nodes append rows in place.
"""

from __future__ import annotations

from comfy.families import (
    auraflow,
    chroma,
    flux,
    flux2,
    hunyuan3d,
    hunyuan_video,
    ltxv,
    pixart,
    qwen_image,
    sd3,
    sd15,
    sd20,
    sd_pictures,
    sdxl,
    stable_audio,
    wan,
)
from comfy.families.family import ModelFamily

MODEL_FAMILIES: list[type[ModelFamily]] = [
    sd_pictures.Stable_Zero123,
    sd15.SD15_instructpix2pix,
    sd15.SD15,
    sd20.SD20,
    sd_pictures.SD21UnclipL,
    sd_pictures.SD21UnclipH,
    sdxl.SDXL_instructpix2pix,
    sdxl.SDXLRefiner,
    sdxl.SSD1B,
    sdxl.KOALA_700M,
    sdxl.KOALA_1B,
    sdxl.Segmind_Vega,
    sdxl.SDXL,
    sd_pictures.SD_X4Upscaler,
    sd_pictures.SV3D_u,
    sd_pictures.SV3D_p,
    sd_pictures.SVD_img2vid,
    sd3.SD3,
    stable_audio.StableAudio,
    auraflow.AuraFlow,
    pixart.PixArtAlpha,
    pixart.PixArtSigma,
    flux.FluxInpaint,
    flux.Flux,
    flux.FluxSchnell,
    flux2.Flux2,
    chroma.Chroma,
    qwen_image.ZImage,
    ltxv.LTXV,
    hunyuan_video.HunyuanVideoSkyreelsI2V,
    hunyuan_video.HunyuanVideoI2V,
    hunyuan_video.HunyuanVideo,
    wan.WAN22_T2V,
    wan.WAN21_T2V,
    wan.WAN21_I2V,
    wan.WAN21_FunControl2V,
    wan.WAN21_Vace,
    wan.WAN21_Camera,
    wan.WAN22_Camera,
    hunyuan3d.Hunyuan3Dv2mini,
    hunyuan3d.Hunyuan3Dv2,
    qwen_image.QwenImage,
]
