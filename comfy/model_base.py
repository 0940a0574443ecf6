"""Base models and prediction types, under the names custom nodes import."""
# ruff: noqa: F401

from comfy.families.base import BaseModel
from comfy.families.model_type import ModelType
from comfy.families.prediction import model_sampling
from comfy.families.sd15_model import SD15_instructpix2pix
from comfy.families.sdxl_model import SDXL, SDXL_instructpix2pix, SDXLRefiner
from comfy.public import write_through

write_through(__name__)
