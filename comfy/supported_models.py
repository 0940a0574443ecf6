"""Model families, under the names custom nodes import."""
# ruff: noqa: F401

from comfy import supported_models_base
from comfy.families import MODEL_FAMILIES as models
from comfy.families.ace_step import ACEStep
from comfy.families.auraflow import AuraFlow
from comfy.families.cascade import Stable_Cascade_B, Stable_Cascade_C
from comfy.families.chroma import Chroma
from comfy.families.chroma_radiance import ChromaRadiance
from comfy.families.cosmos import CosmosI2VPredict2, CosmosT2IPredict2
from comfy.families.cosmos_video import CosmosI2V, CosmosT2V
from comfy.families.flux import Flux, FluxInpaint, FluxSchnell
from comfy.families.flux2 import Flux2
from comfy.families.hidream import HiDream
from comfy.families.hunyuan3d import Hunyuan3Dv2, Hunyuan3Dv2_1, Hunyuan3Dv2mini
from comfy.families.hunyuan_dit import HunyuanDiT, HunyuanDiT1
from comfy.families.hunyuan_image import HunyuanImage21, HunyuanImage21Refiner
from comfy.families.hunyuan_video import (
    HunyuanVideo,
    HunyuanVideoI2V,
    HunyuanVideoSkyreelsI2V,
)
from comfy.families.hunyuan_video15 import HunyuanVideo15, HunyuanVideo15_SR_Distilled
from comfy.families.kandinsky5 import Kandinsky5, Kandinsky5Image
from comfy.families.ltxav import LTXAV
from comfy.families.ltxv import LTXV
from comfy.families.lumina2 import Lumina2
from comfy.families.mochi import GenmoMochi
from comfy.families.omnigen2 import Omnigen2
from comfy.families.pixart import PixArtAlpha, PixArtSigma
from comfy.families.qwen_image import QwenImage, ZImage
from comfy.families.sd3 import SD3
from comfy.families.sd15 import SD15, SD15_instructpix2pix
from comfy.families.sd20 import SD20
from comfy.families.sd_pictures import (
    LotusD,
    SD21UnclipH,
    SD21UnclipL,
    SD_X4Upscaler,
    Stable_Zero123,
    SV3D_p,
    SV3D_u,
    SVD_img2vid,
)
from comfy.families.sdxl import (
    KOALA_1B,
    KOALA_700M,
    SDXL,
    SSD1B,
    SDXL_instructpix2pix,
    SDXLRefiner,
    Segmind_Vega,
)
from comfy.families.stable_audio import StableAudio
from comfy.families.wan import (
    WAN21_I2V,
    WAN21_T2V,
    WAN22_S2V,
    WAN22_T2V,
    WAN21_Camera,
    WAN21_FunControl2V,
    WAN21_HuMo,
    WAN21_Vace,
    WAN22_Animate,
    WAN22_Camera,
)
from comfy.public import write_through

write_through(__name__)
