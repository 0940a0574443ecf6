"""Base models and prediction types, under the names custom nodes import."""
# ruff: noqa: F401

from comfy.families.ace_step import ACEStepModel as ACEStep
from comfy.families.auraflow import AuraFlowModel as AuraFlow
from comfy.families.base import BaseModel, convert_tensor
from comfy.families.cascade import StableCascade_B, StableCascade_C
from comfy.families.chroma_radiance import ChromaRadianceModel as ChromaRadiance
from comfy.families.cosmos import CosmosPredict2Model as CosmosPredict2
from comfy.families.cosmos_video import CosmosVideoModel as CosmosVideo
from comfy.families.dit_model import SD3, Chroma, Flux, Flux2
from comfy.families.hidream import HiDreamModel as HiDream
from comfy.families.hunyuan3d import Hunyuan3D21Model as Hunyuan3Dv2_1
from comfy.families.hunyuan3d import Hunyuan3DModel as Hunyuan3Dv2
from comfy.families.hunyuan_dit import HunyuanDiTModel as HunyuanDiT
from comfy.families.hunyuan_image import HunyuanImage21Model as HunyuanImage21
from comfy.families.hunyuan_image import HunyuanImage21RefinerModel as HunyuanImage21Refiner
from comfy.families.hunyuan_video import HunyuanVideoI2VModel as HunyuanVideoI2V
from comfy.families.hunyuan_video import HunyuanVideoModel as HunyuanVideo
from comfy.families.hunyuan_video import SkyreelsModel as HunyuanVideoSkyreelsI2V
from comfy.families.hunyuan_video15 import HunyuanVideo15Model as HunyuanVideo15
from comfy.families.hunyuan_video15 import HunyuanVideo15SRModel as HunyuanVideo15_SR_Distilled
from comfy.families.kandinsky5 import Kandinsky5ImageModel as Kandinsky5Image
from comfy.families.kandinsky5 import Kandinsky5Model as Kandinsky5
from comfy.families.ltxav import LTXAVideoModel as LTXAV
from comfy.families.ltxv import LTXVideoModel as LTXV
from comfy.families.mochi import MochiModel as GenmoMochi
from comfy.families.model_type import ModelType
from comfy.families.noise_augmentation import CLIPEmbeddingNoiseAugmentation, Timestep, unclip_adm
from comfy.families.omnigen2 import Omnigen2Model as Omnigen2
from comfy.families.picture_models import (
    SD21UNCLIP,
    Lotus,
    SD_X4Upscaler,
    Stable_Zero123,
    SV3D_p,
    SV3D_u,
    SVD_img2vid,
)
from comfy.families.pixart import PixArtModel as PixArt
from comfy.families.prediction import model_sampling
from comfy.families.qwen_image import Lumina2Model as Lumina2
from comfy.families.qwen_image import QwenImageModel as QwenImage
from comfy.families.sd15_model import SD15_instructpix2pix
from comfy.families.sdxl_model import SDXL, SDXL_instructpix2pix, SDXLRefiner, sdxl_pooled
from comfy.families.stable_audio import StableAudioModel as StableAudio1
from comfy.families.wan_model import (
    WAN21,
    WAN22,
    WAN22_S2V,
    WAN21_Camera,
    WAN21_HuMo,
    WAN21_Vace,
    WAN22_Animate,
)
from comfy.public import write_through

write_through(__name__)
