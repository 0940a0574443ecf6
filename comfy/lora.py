"""LoRA files and weight arithmetic, under the names custom nodes import."""
# ruff: noqa: F401

from comfy.public import write_through
from comfy.weights.arithmetic import calculate_weight
from comfy.weights.lora import load_lora, model_lora_keys_clip, model_lora_keys_unet

write_through(__name__)
