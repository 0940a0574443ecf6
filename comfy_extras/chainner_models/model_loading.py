"""Recognising upscale models, under the name custom nodes import."""
# ruff: noqa: F401

from comfy_extras.upscaling import network_of as load_state_dict
