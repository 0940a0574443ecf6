"""Loading and saving, the CLIP and VAE classes, under the names custom nodes import."""
# ruff: noqa: F401

from comfy import model_detection
from comfy.families.family import ClipTarget
from comfy.families.text_targets import CLIPType
from comfy.legacy_config import load_checkpoint
from comfy.loading import (
    load_checkpoint_guess_config,
    load_diffusion_model,
    load_diffusion_model_state_dict,
    load_state_dict_guess_config,
)
from comfy.loading import load_diffusion_model as load_unet
from comfy.loading import load_diffusion_model_state_dict as load_unet_state_dict
from comfy.lora_loading import load_lora_for_models
from comfy.public import write_through
from comfy.saving import save_checkpoint
from comfy.style_model import StyleModel, load_style_model
from comfy.text_encoders.clip import CLIP
from comfy.text_loading import load_clip, load_text_encoder_state_dicts, t5xxl_detect
from comfy.vae.vae import VAE

write_through(__name__)
