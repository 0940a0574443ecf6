"""Whole-file LoRA conversions, under the names custom nodes import."""
# ruff: noqa: F401

from comfy.public import write_through
from comfy.weights.lora_formats.whole_file import convert_lora

write_through(__name__)
